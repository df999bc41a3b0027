package copybench

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync/atomic"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

const chunk = transfer.ChunkBytes

// space is a transfer space of total bytes whose blocks lie at random places of a region. The last
// block may be used in part. Both processes compute both sides.
type space struct {
	region *mem.Region
	bytes  []byte
	block  int
	total  int
	at     []uint64 // offset of each block, in transfer-space order
	landed atomic.Int64
}

// scatter picks distinct places for the blocks.
func scatter(block, total int, seed uint64) []uint64 {
	r := rand.New(rand.NewPCG(seed, 1))
	p := r.Perm(regionBytes / block)[:blocks(block, total)]
	at := make([]uint64, len(p))
	for i, x := range p {
		at[i] = uint64(x) * uint64(block)
	}
	return at
}

// blocks is the number of blocks that hold a given number of bytes.
func blocks(block, total int) int { return (total + block - 1) / block }

// used is what the space has of block b.
func (s *space) used(b int) []byte {
	return s.bytes[s.at[b]:][:min(s.block, s.total-b*s.block)]
}

// Resolve implements transport.Memory.
func (s *space) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	off, end := int(r.First)*chunk, int(r.End())*chunk
	if r.Count == 0 || end > s.total {
		return dst, fmt.Errorf("chunks %d+%d of %d", r.First, r.Count, s.total/chunk)
	}
	for off < end {
		i, in := off/s.block, off%s.block
		n := min(s.block-in, end-off)
		dst = append(dst, mem.Block{Region: s.region, Off: s.at[i] + uint64(in), Len: uint64(n)})
		off += n
	}
	return dst, nil
}

// Bytes implements transport.Memory.
func (s *space) Bytes(r transfer.Range) (uint64, error) {
	if r.Count == 0 || int(r.End())*chunk > s.total {
		return 0, fmt.Errorf("chunks %d+%d of %d", r.First, r.Count, s.total/chunk)
	}
	return uint64(r.Count) * chunk, nil
}

// Device implements transport.Memory.
func (s *space) Device() mem.Device { return s.region.Device() }

// received is the grant's Landed.
func (s *space) received(_ transport.Lane, r transfer.Range, _ uint32) {
	s.landed.Add(int64(r.Count))
}

// content is the word at 8-byte step i of the space.
func content(seed uint64, i int) uint64 {
	x := (seed ^ uint64(i)) * 0x9e3779b97f4a7c15
	return x ^ x>>29
}

// write fills the blocks with the content of a seed, one block a call so that the collector can
// stop it.
func (s *space) write(seed uint64) {
	for b := range s.at {
		s.writeBlock(seed, b)
	}
}

//go:noinline
func (s *space) writeBlock(seed uint64, b int) {
	p := s.used(b)
	for i := 0; i < len(p); i += 8 {
		binary.LittleEndian.PutUint64(p[i:], content(seed, (b*s.block+i)/8))
	}
}

// wrong counts blocks that do not hold the content of a seed.
func (s *space) wrong(seed uint64) (n int) {
	for b := range s.at {
		if !s.blockHolds(seed, b) {
			n++
		}
	}
	return n
}

//go:noinline
func (s *space) blockHolds(seed uint64, b int) bool {
	p := s.used(b)
	for i := 0; i < len(p); i += 8 {
		if binary.LittleEndian.Uint64(p[i:]) != content(seed, (b*s.block+i)/8) {
			return false
		}
	}
	return true
}
