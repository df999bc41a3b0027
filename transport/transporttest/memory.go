package transporttest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Shape is the layout of one side's test memory.
type Shape struct {
	Chunks     int
	TailBytes  int  // of every fourth chunk, which ends a segment; 0: all are whole
	BlockBytes int  // scattered blocks; ChunkBytes or more: contiguous chunks
	Shuffle    bool // in random order
	// blocks of a row at a distance of a row's length, like a page in another order; 0: consecutive
	Across  int
	Gapless bool // nothing between blocks: without Shuffle, one piece of memory
}

// lengths of its chunks.
func (s Shape) lengths() (all []uint64) {
	for c := range s.Chunks {
		n := transfer.ChunkBytes
		if s.TailBytes > 0 && c%4 == 3 {
			n = s.TailBytes
		}
		all = append(all, uint64(n))
	}
	return all
}

// Memory is a test space in a region: for each chunk its blocks. Gaps between all blocks must stay
// unwritten.
type Memory struct {
	Region *mem.Region
	far    *farMemory // it lies on another host; nil: here
	bytes  []byte
	blocks [][]mem.Block
	length []uint64 // of each chunk
	gap    int
}

const gapByte = 0xa5

// Memory lays out a space at this end.
func (e *End) Memory(s Shape) *Memory {
	e.tb.Helper()
	if e.far != nil {
		return e.far.newMemory(e.tb, s)
	}
	return NewMemory(e.tb, s)
}

// NewMemory lays out a space. Both sides of a transfer need the same Chunks and TailBytes.
func NewMemory(tb testing.TB, s Shape) *Memory {
	tb.Helper()
	m := &Memory{gap: 64, length: s.lengths()}
	if s.Gapless {
		m.gap = 0
	}
	bb := min(s.BlockBytes, transfer.ChunkBytes)
	type ref struct{ chunk, at, n int }
	var refs []ref
	for c := range s.Chunks {
		n, k := int(m.length[c]), 0
		for at := 0; at < n; at += bb {
			refs = append(refs, ref{c, k, min(bb, n-at)})
			k++
		}
		m.blocks = append(m.blocks, make([]mem.Block, k))
	}
	if s.Shuffle {
		rand.Shuffle(len(refs), func(i, j int) { refs[i], refs[j] = refs[j], refs[i] })
	}
	for n, page := s.Across, refs; n > 0 && len(page) >= n*n; page = page[n*n:] {
		for i := range n {
			for k := range i {
				page[i*n+k], page[k*n+i] = page[k*n+i], page[i*n+k]
			}
		}
	}
	total := m.gap
	for _, r := range refs {
		total += r.n + m.gap
	}
	region, err := partOfFile(uint64(total))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(region.Release)
	m.bytes, _ = region.Bytes()
	if d := onDevice.Load(); d != nil {
		if region, err = d.Region(m.bytes); err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(region.Release)
	}
	m.Region = region
	off := m.gap
	for _, r := range refs {
		m.blocks[r.chunk][r.at] = mem.Block{Region: region, Off: uint64(off), Len: uint64(r.n)}
		off += r.n + m.gap
	}
	mem.Fill(m.bytes, gapByte)
	return m
}

// partOfFile makes a region that does not begin where its file does, as engines may have.
func partOfFile(bytes uint64) (*mem.Region, error) {
	start := uint64(3 * os.Getpagesize())
	whole, err := mem.NewAnonymous("test", start+bytes)
	if err != nil {
		return nil, err
	}
	defer whole.Release()
	fd, err := unix.FcntlInt(uintptr(whole.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate a memfd: %w", err)
	}
	f := mem.NewFile(fd)
	defer f.Release()
	return f.Map(mem.NewID(), start, bytes)
}

// Replace puts the same bytes behind another region, with another way of access. The content stays.
func (m *Memory) Replace(r *mem.Region) {
	for _, blocks := range m.blocks {
		for i := range blocks {
			blocks[i].Region = r
		}
	}
}

// Device implements transport.Memory.
func (m *Memory) Device() mem.Device { return mem.DeviceOf(m.blocks[0]) }

// Chunks of the space.
func (m *Memory) Chunks() uint32 { return uint32(len(m.length)) }

// All chunks of the space.
func (m *Memory) All() transfer.Range { return transfer.Range{Count: m.Chunks()} }

// Range checks r.
func (m *Memory) check(r transfer.Range) error {
	if r.Count == 0 || r.End() > m.Chunks() || r.End() < r.First {
		return fmt.Errorf("chunks %d+%d of %d", r.First, r.Count, m.Chunks())
	}
	return nil
}

// Resolve implements transport.Memory.
func (m *Memory) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	if err := m.check(r); err != nil {
		return dst, err
	}
	for c := r.First; c < r.End(); c++ {
		dst = append(dst, m.blocks[c]...)
	}
	return dst, nil
}

// Bytes implements transport.Memory.
func (m *Memory) Bytes(r transfer.Range) (n uint64, err error) {
	if err := m.check(r); err != nil {
		return 0, err
	}
	for c := r.First; c < r.End(); c++ {
		n += m.length[c]
	}
	return n, nil
}

// word is the test content at 8-byte step i of a chunk.
func word(seed uint64, chunk, i int) uint64 {
	x := seed ^ uint64(chunk)<<32 ^ uint64(i)
	x *= 0x9e3779b97f4a7c15
	return x ^ x>>29
}

// each calls f for every 8-byte word of a chunk, in content order. Chunks and blocks are multiples
// of 8 bytes.
func (m *Memory) each(chunk int, f func(i int, p []byte) bool) {
	i := 0
	for _, b := range m.blocks[chunk] {
		p := m.bytes[b.Off : b.Off+b.Len]
		for ; len(p) >= 8; p = p[8:] {
			if !f(i, p) {
				return
			}
			i++
		}
	}
}

// Write fills every chunk with the content of seed.
func (m *Memory) Write(seed uint64) {
	if m.far != nil {
		m.far.do(FarCall{Op: opWrite, Seed: seed})
		return
	}
	for c := range m.blocks {
		m.each(c, func(i int, p []byte) bool {
			binary.LittleEndian.PutUint64(p, word(seed, c, i))
			return true
		})
	}
}

// Holds reports whether a chunk holds the content of seed, and where not.
func (m *Memory) Holds(seed uint64, chunk int) (at int, ok bool) {
	if m.far != nil {
		a := m.far.do(FarCall{Op: opHolds, Seed: seed, N: chunk})
		return a.N, a.OK
	}
	at, ok = -1, true
	m.each(chunk, func(i int, p []byte) bool {
		if binary.LittleEndian.Uint64(p) != word(seed, chunk, i) {
			at, ok = i*8, false
		}
		return ok
	})
	return at, ok
}

// GapsIntact fails the test if a byte between blocks was written.
func (m *Memory) GapsIntact(tb testing.TB) {
	tb.Helper()
	if m.far != nil {
		m.far.do(FarCall{Op: opGapsIntact})
		return
	}
	used := make([]bool, len(m.bytes))
	for _, bs := range m.blocks {
		for _, b := range bs {
			for i := b.Off; i < b.Off+b.Len; i++ {
				used[i] = true
			}
		}
	}
	for i, u := range used {
		if !u && m.bytes[i] != gapByte {
			tb.Fatalf("byte %d outside of every block was written", i)
		}
	}
}

// Fill sets every byte.
func (m *Memory) Fill(c byte) {
	if m.far != nil {
		m.far.do(FarCall{Op: opFill, Byte: c})
		return
	}
	mem.Fill(m.bytes, c)
}

// Filled reports whether every byte is c, and the first that is not.
func (m *Memory) Filled(c byte) (int, bool) {
	if m.far != nil {
		a := m.far.do(FarCall{Op: opFilled, Byte: c})
		return a.N, a.OK
	}
	for i, b := range m.bytes {
		if b != c {
			return i, false
		}
	}
	return 0, true
}

// Dest is the memory of a grant. It checks content as it lands.
type Dest struct {
	*Memory
	tb     testing.TB
	Seed   atomic.Uint64 // content that may land; 0: not checked
	landed []atomic.Uint32
	count  atomic.Int64
	Reject atomic.Bool // Resolve fails
	grant  *transport.Grant
	far    *farBind // it lies on another host; nil: here
}

// Expect sets the content that may land from now on.
func (s *Dest) Expect(seed uint64) {
	if s.far != nil {
		s.far.do(FarCall{Op: opExpect, Seed: seed})
		return
	}
	s.Seed.Store(seed)
}

// Refuse sets whether Resolve fails.
func (s *Dest) Refuse(all bool) {
	if s.far != nil {
		s.far.do(FarCall{Op: opRefuse, OK: all})
		return
	}
	s.Reject.Store(all)
}

// Count of the chunks that have landed.
func (s *Dest) Count() int {
	if s.far != nil {
		return s.far.do(FarCall{Op: opCount}).N
	}
	return int(s.count.Load())
}

// Resolve implements transport.Memory.
func (s *Dest) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	if s.Reject.Load() {
		return dst, errors.New("this destination resolves nothing")
	}
	return s.Memory.Resolve(dst, r)
}

// Landed is the grant's.
func (s *Dest) Landed(l transport.Lane, r transfer.Range, _ uint32) {
	if l == nil {
		s.tb.Error("Landed without a lane")
	}
	for c := r.First; c < r.End(); c++ {
		if seed := s.Seed.Load(); seed != 0 {
			if at, ok := s.Holds(seed, int(c)); !ok {
				s.tb.Errorf("chunk %d landed with wrong content at byte %d", c, at)
			}
		}
		if s.landed[c].Add(1) == 1 {
			s.count.Add(1)
		}
	}
}

// Full reports whether every chunk has landed.
func (s *Dest) Full() bool { return s.Count() == len(s.length) }

// Source is the memory of an origin whose validity a test decides.
type Source struct {
	*Memory
	Invalid atomic.Bool
	Broken  atomic.Bool // Resolve fails
}

// Resolve implements transport.Memory.
func (s *Source) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	if s.Broken.Load() {
		return dst, errors.New("this source resolves nothing")
	}
	return s.Memory.Resolve(dst, r)
}

// Valid is the origin's.
func (s *Source) Valid(transfer.LeaseID) bool { return !s.Invalid.Load() }
