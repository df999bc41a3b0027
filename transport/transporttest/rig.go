// Package transporttest is the contract suite that every transport passes, and the benchmarks that
// compare them. A backend adopts it in a few lines:
//
//	func TestConformance(t *testing.T) {
//		transporttest.Conformance(t, func(tb testing.TB) transport.Backend { return newBackend(tb) })
//	}
//
// It plays two sidecars in one process, each with its own Host, or one of them on another host:
// ConformanceBetween. It owns every goroutine that it starts and joins them before a test ends.
package transporttest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Factory makes one backend, not opened yet. The suite closes it.
type Factory func(tb testing.TB) transport.Backend

// patience bounds every wait. A correct backend needs a fraction of it even on a loaded machine.
const patience = time.Minute

// AttackRunsEnv is the variable that sets the number of runs of the attacks; a few without it.
const AttackRunsEnv = "KVSPRAY_ATTACK_RUNS"

func attackRuns(tb testing.TB) int {
	s := os.Getenv(AttackRunsEnv)
	if s == "" {
		return 10
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		tb.Fatalf("%s=%q: must be a positive number of runs", AttackRunsEnv, s)
	}
	return n
}

// End is one sidecar of the rig: a backend and its Host.
type End struct {
	tb      testing.TB
	Backend transport.Backend
	Boot    transfer.Boot
	Rails   []transport.Rail

	ups   chan transport.Lane
	downs chan transport.Lane

	far *far // the end plays on another host, and this is its shadow; nil: here

	// receives results instead of the bookkeeping below; set before the first lane
	direct func([]transport.Result)

	mu      sync.Mutex
	peers   map[transfer.Boot]transport.Peer
	grants  map[transfer.Slot]*transport.Grant
	origins map[transfer.Slot]*transport.Origin
	pending map[uint64]chan transport.Result // by cookie; a result without one is an error
	lanes   map[uint64]bool                  // by id: up and not down
	lost    map[uint64]error                 // why lanes are down, by id
	refused map[transfer.Reason]int
	cookie  uint64
}

// Pair is two ends that are introduced to each other.
type Pair struct {
	tb   testing.TB
	A, B *End // A sends, B receives, unless a test says otherwise
	Key  [32]byte
}

func randomBoot() (b transfer.Boot) {
	binary.LittleEndian.PutUint64(b[:], rand.Uint64())
	binary.LittleEndian.PutUint64(b[8:], rand.Uint64())
	return b
}

// NewPair opens two backends that are introduced to each other.
func NewPair(tb testing.TB, f Factory) *Pair {
	tb.Helper()
	p := &Pair{tb: tb}
	for i := range p.Key {
		p.Key[i] = byte(rand.Uint32())
	}
	p.A = newEnd(tb, f)
	if far := otherHost.Load(); far != nil {
		p.B = far.newEnd(tb)
	} else {
		p.B = newEnd(tb, f)
	}
	p.A.Introduce(p.B.Boot, p.Key)
	p.B.Introduce(p.A.Boot, p.Key)
	return p
}

func bareEnd(tb testing.TB) *End {
	return &End{tb: tb, ups: make(chan transport.Lane, 256), downs: make(chan transport.Lane, 256),
		peers: map[transfer.Boot]transport.Peer{}, grants: map[transfer.Slot]*transport.Grant{},
		origins: map[transfer.Slot]*transport.Origin{}, pending: map[uint64]chan transport.Result{}, lanes: map[uint64]bool{},
		lost: map[uint64]error{}, refused: map[transfer.Reason]int{}}
}

func newEnd(tb testing.TB, f Factory) *End {
	tb.Helper()
	e := bareEnd(tb)
	e.Backend, e.Boot = f(tb), randomBoot()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	rails, err := e.Backend.Open(ctx, e)
	if errors.Is(err, transport.ErrNotSupported) {
		testutil.Skip(tb, e.Backend.Name(), err.Error())
	}
	if err != nil {
		tb.Fatalf("open: %v", err)
	}
	if len(rails) == 0 {
		tb.Fatal("open: no rails")
	}
	e.Rails = rails
	tb.Cleanup(func() { _ = e.Backend.Close() })
	return e
}

// Introduce registers a peer.
func (e *End) Introduce(boot transfer.Boot, key [32]byte) {
	if e.far != nil {
		e.far.do(e.tb, FarCall{Op: opIntroduce, Peer: transport.Peer{Boot: boot, Key: key}})
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.peers[boot] = transport.Peer{Boot: boot, Self: e.Boot, Key: key}
}

// The transport.Host of an end.

// PeerKey implements transport.Host.
func (e *End) PeerKey(boot transfer.Boot) (transport.Peer, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p, ok := e.peers[boot]
	return p, ok
}

// Grant implements transport.Host.
func (e *End) Grant(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*transport.Grant, transfer.Reason) {
	e.mu.Lock()
	defer e.mu.Unlock()
	g := e.grants[slot]
	switch {
	case g == nil || g.Peer != peer:
		return nil, transfer.ReasonUnknownSlot
	case g.Gen != gen:
		return nil, transfer.ReasonStaleGen
	}
	return g, transfer.ReasonNone
}

// Origin implements transport.Host.
func (e *End) Origin(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*transport.Origin, transfer.Reason) {
	e.mu.Lock()
	defer e.mu.Unlock()
	o := e.origins[slot]
	switch {
	case o == nil || o.Peer != peer:
		return nil, transfer.ReasonUnknownSlot
	case o.Gen != gen:
		return nil, transfer.ReasonStaleGen
	}
	return o, transfer.ReasonNone
}

// LaneUp implements transport.Host.
func (e *End) LaneUp(l transport.Lane) {
	e.mu.Lock()
	if e.lanes[l.ID()] {
		e.tb.Errorf("lane %d is up twice", l.ID())
	}
	e.lanes[l.ID()] = true
	e.mu.Unlock()
	e.ups <- l
}

// LaneDown implements transport.Host.
func (e *End) LaneDown(l transport.Lane, why error) {
	e.mu.Lock()
	if !e.lanes[l.ID()] {
		e.tb.Errorf("lane %d is down and was not up", l.ID())
	}
	delete(e.lanes, l.ID())
	e.lost[l.ID()] = why
	e.mu.Unlock()
	e.downs <- l
}

// Done implements transport.Host.
func (e *End) Done(_ transport.Lane, res []transport.Result) {
	if e.direct != nil {
		e.direct(res)
		return
	}
	for _, r := range res {
		e.mu.Lock()
		c := e.pending[r.Cookie]
		delete(e.pending, r.Cookie)
		e.mu.Unlock()
		if c == nil {
			e.tb.Errorf("slice %d of chunks %d+%d ended twice, or was never moved: %s", r.Cookie, r.Range.First, r.Range.Count, r.Outcome)
			continue
		}
		if (r.Outcome == transfer.Landed) != (r.Err == nil) {
			e.tb.Errorf("slice %d: outcome %s with error %v", r.Cookie, r.Outcome, r.Err)
		}
		c <- r
	}
}

// Refused implements transport.Host.
func (e *End) Refused(_ transport.Lane, r transfer.Reason) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refused[r]++
}

// RefusedFor counts the frames that were refused for a reason.
func (e *End) RefusedFor(r transfer.Reason) int {
	if e.far != nil {
		return e.far.do(e.tb, FarCall{Op: opRefusedFor, Reason: r}).N
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.refused[r]
}

// usable fails the test with the reason once none of these lanes is up, unless the test ended them.
func (e *End) usable(lanes ...transport.Lane) {
	e.tb.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	var why []error
	for _, l := range lanes {
		if e.lanes[l.ID()] {
			return
		}
		why = append(why, e.lost[l.ID()])
	}
	e.tb.Fatalf("every lane was lost: %v", errors.Join(why...))
}

// open slices that have not ended.
func (e *End) open() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.pending)
}

// Dial opens a lane from A to B and returns both ends of it.
func (p *Pair) Dial() (a, b transport.Lane) {
	p.tb.Helper()
	return dial(p.tb, p.A, p.B)
}

func dial(tb testing.TB, from, to *End) (here, there transport.Lane) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	peer, _ := from.PeerKey(to.Boot)
	l, err := from.dial(ctx, peer, from.Rails[0], to.Rails[0])
	if err != nil {
		tb.Fatalf("dial: %v", err)
	}
	up := from.up("LaneUp of the dialled end")
	if up.ID() != l.ID() {
		tb.Fatalf("LaneUp of lane %d, dialled lane %d", up.ID(), l.ID())
	}
	there = to.up("LaneUp of the accepted end")
	for _, x := range []struct {
		l           transport.Lane
		self, other *End
	}{{l, from, to}, {there, to, from}} {
		if x.l.Peer() != x.other.Boot || x.l.Backend() != from.name() || x.l.MaxInFlight() < 1 {
			tb.Fatalf("lane %d: peer %s backend %q in flight %d", x.l.ID(), x.l.Peer(), x.l.Backend(), x.l.MaxInFlight())
		}
		if x.l.Local() != x.self.Rails[0].Name || x.l.Remote() != x.other.Rails[0].Name {
			tb.Fatalf("lane %d: rails %q and %q, want %q and %q", x.l.ID(), x.l.Local(), x.l.Remote(), x.self.Rails[0].Name, x.other.Rails[0].Name)
		}
	}
	return l, there
}

// name of the backend, the same at both ends.
func (e *End) name() string {
	if e.far != nil {
		return e.far.name
	}
	return e.Backend.Name()
}

func (e *End) dial(ctx context.Context, peer transport.Peer, local, remote transport.Rail) (transport.Lane, error) {
	if e.far != nil {
		return e.far.do(e.tb, FarCall{Op: opDial, Peer: peer, Local: local, Remote: remote}).lane(e.far)
	}
	return e.Backend.Dial(ctx, peer, local, remote)
}

// up waits for a lane that came up, and down for one that went down.
func (e *End) up(what string) transport.Lane {
	e.tb.Helper()
	if e.far != nil {
		l, _ := e.far.do(e.tb, FarCall{Op: opUp, What: what}).lane(e.far)
		return l
	}
	return receive(e.tb, e.ups, what)
}

// Redial opens a lane from rail i to rail i, closes it again, and returns the time of opening it.
func (p *Pair) Redial(i int) time.Duration {
	p.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	peer, _ := p.A.PeerKey(p.B.Boot)
	began := time.Now()
	l, err := p.A.dial(ctx, peer, p.A.Rails[i], p.B.Rails[i])
	took := time.Since(began)
	if err != nil {
		p.tb.Fatalf("dial: %v", err)
	}
	p.A.up("LaneUp of the dialled end")
	p.B.up("LaneUp of the accepted end")
	if err := l.Close(); err != nil {
		p.tb.Fatalf("close: %v", err)
	}
	p.A.down("LaneDown of the dialled end")
	p.B.down("LaneDown of the accepted end")
	return took
}

func (e *End) down(what string) transport.Lane {
	e.tb.Helper()
	if e.far != nil {
		l, _ := e.far.do(e.tb, FarCall{Op: opDown, What: what}).lane(e.far)
		return l
	}
	return receive(e.tb, e.downs, what)
}

// anyUp is a lane that has come up, or nil.
func (e *End) anyUp() transport.Lane {
	if e.far != nil {
		if a := e.far.do(e.tb, FarCall{Op: opAnyUp}); a.OK {
			l, _ := a.lane(e.far)
			return l
		}
		return nil
	}
	select {
	case l := <-e.ups:
		return l
	default:
		return nil
	}
}

func receive[T any](tb testing.TB, c <-chan T, what string) (v T) {
	tb.Helper()
	select {
	case v = <-c:
	case <-time.After(patience):
		tb.Fatalf("no %s within %s", what, patience)
	}
	return v
}

// Move passes one slice to a lane and returns the channel of its result. A lane that is down
// produces a NotLanded.
func (e *End) Move(l transport.Lane, o *transport.Origin, r transfer.Range, attempt uint32) <-chan transport.Result {
	c := make(chan transport.Result, 1)
	if e.far != nil {
		go func() { c <- e.far.move(e.tb, l, o, r, attempt) }()
		return c
	}
	e.mu.Lock()
	e.cookie++
	s := transport.Slice{Origin: o, Range: r, Attempt: attempt, Cookie: e.cookie}
	e.pending[s.Cookie] = c
	e.mu.Unlock()
	if err := l.Move([]transport.Slice{s}); err != nil {
		e.mu.Lock()
		delete(e.pending, s.Cookie)
		e.mu.Unlock()
		if !errors.Is(err, net.ErrClosed) {
			e.tb.Errorf("move on a lane that is up, or an error that does not say closed: %v", err)
		}
		c <- transport.Result{Slice: s, Outcome: transfer.NotLanded, Reason: transfer.ReasonLaneLost, Err: err}
	}
	return c
}

// MoveWait moves one slice and waits for its end.
func (e *End) MoveWait(l transport.Lane, o *transport.Origin, r transfer.Range, attempt uint32) transport.Result {
	e.tb.Helper()
	return receive(e.tb, e.Move(l, o, r, attempt), "result")
}

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
	region, err := mem.NewAnonymous("test", uint64(total))
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

// Replace puts the same bytes behind another region, with another way of access. The content stays.
func (m *Memory) Replace(r *mem.Region) {
	for _, blocks := range m.blocks {
		for i := range blocks {
			blocks[i].Region = r
		}
	}
}

// Device implements transport.OnDevice.
func (m *Memory) Device() mem.Device { return m.Region.Device() }

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

// Resolve is that of Sink and Source.
func (m *Memory) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	if err := m.check(r); err != nil {
		return dst, err
	}
	for c := r.First; c < r.End(); c++ {
		dst = append(dst, m.blocks[c]...)
	}
	return dst, nil
}

// Bytes is that of Sink and Source.
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

// Sink is a transport.Sink that checks content as it lands.
type Sink struct {
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
func (s *Sink) Expect(seed uint64) {
	if s.far != nil {
		s.far.do(FarCall{Op: opExpect, Seed: seed})
		return
	}
	s.Seed.Store(seed)
}

// Refuse sets whether Resolve fails.
func (s *Sink) Refuse(all bool) {
	if s.far != nil {
		s.far.do(FarCall{Op: opRefuse, OK: all})
		return
	}
	s.Reject.Store(all)
}

// Count of the chunks that have landed.
func (s *Sink) Count() int {
	if s.far != nil {
		return s.far.do(FarCall{Op: opCount}).N
	}
	return int(s.count.Load())
}

// Resolve implements transport.Sink.
func (s *Sink) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	if s.Reject.Load() {
		return dst, errors.New("this sink resolves nothing")
	}
	return s.Memory.Resolve(dst, r)
}

// Landed implements transport.Sink.
func (s *Sink) Landed(l transport.Lane, r transfer.Range) {
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
func (s *Sink) Full() bool { return s.Count() == len(s.length) }

// Source is a transport.Source whose validity a test decides.
type Source struct {
	*Memory
	Invalid atomic.Bool
	Broken  atomic.Bool // Resolve fails
}

// Resolve implements transport.Source.
func (s *Source) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	if s.Broken.Load() {
		return dst, errors.New("this source resolves nothing")
	}
	return s.Memory.Resolve(dst, r)
}

// Valid implements transport.Source.
func (s *Source) Valid(transfer.Range) bool { return !s.Invalid.Load() }

// Bind is a grant at `to` and the origin at `from` that feeds it.
type Bind struct {
	from, to *End
	Grant    *transport.Grant
	Origin   *transport.Origin
	Sink     *Sink
	Source   *Source
}

// NewBind binds a slot in both directions of the lookup, like the control layer. The caller owns
// src and dst.
func NewBind(tb testing.TB, from, to *End, src, dst *Memory, slot transfer.Slot, gen transfer.Gen) *Bind {
	tb.Helper()
	b := &Bind{from: from, to: to}
	b.bindOrigin(src, to.Boot, slot, gen, b.bindGrant(tb, dst, from.Boot, slot, gen))
	if from.far != nil {
		from.far.newOrigin(tb, b)
	}
	return b
}

// bindGrant makes the receiver's half and returns the token.
func (b *Bind) bindGrant(tb testing.TB, dst *Memory, peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) []byte {
	tb.Helper()
	b.Sink = &Sink{Memory: dst, tb: tb, landed: make([]atomic.Uint32, dst.Chunks())}
	b.Grant = &transport.Grant{Peer: peer, Slot: slot, Gen: gen, Sink: b.Sink}
	b.Sink.grant = b.Grant
	if b.to.far != nil {
		return b.to.far.newGrant(tb, b)
	}
	token, err := b.to.Backend.Grant(b.Grant)
	if err != nil {
		tb.Fatalf("grant: %v", err)
	}
	if b.to.Backend.Caps().NeedsTokens != (token != nil) {
		tb.Fatalf("grant returned a token of %d bytes, Caps.NeedsTokens is %v", len(token), b.to.Backend.Caps().NeedsTokens)
	}
	b.to.mu.Lock()
	b.to.grants[slot] = b.Grant
	b.to.mu.Unlock()
	return token
}

// bindOrigin makes the sender's half.
func (b *Bind) bindOrigin(src *Memory, peer transfer.Boot, slot transfer.Slot, gen transfer.Gen, token []byte) {
	b.Source = &Source{Memory: src}
	b.Origin = &transport.Origin{Peer: peer, Slot: slot, Gen: gen, Source: b.Source, Token: token}
	b.from.mu.Lock()
	defer b.from.mu.Unlock()
	b.from.origins[slot] = b.Origin
}

// enter and leave hold the grant's guard, like a writer.
func (b *Bind) enter() bool {
	if b.Sink.far != nil {
		return b.Sink.far.do(FarCall{Op: opEnter}).OK
	}
	return b.Grant.Enter()
}

func (b *Bind) leave() {
	if b.Sink.far != nil {
		b.Sink.far.do(FarCall{Op: opLeave})
		return
	}
	b.Grant.Leave()
}

// fence revokes the grant and fences it, closeOrigin the same for the origin.
func (b *Bind) fence(ctx context.Context) error {
	if b.Sink.far != nil {
		return b.Sink.far.within(ctx, opFence)
	}
	b.Grant.Revoke()
	return b.to.Backend.Fence(ctx, b.Grant)
}

func (b *Bind) closeOrigin(ctx context.Context) error {
	if b.from.far != nil {
		return b.from.far.bindOf(b.from.tb, b.Origin).within(ctx, opCloseOrigin)
	}
	b.Origin.Revoke()
	return b.from.Backend.CloseOrigin(ctx, b.Origin)
}

// Fence revokes the grant and fences it.
func (b *Bind) Fence(tb testing.TB) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := b.fence(ctx); err != nil {
		tb.Fatalf("fence: %v", err)
	}
}

// CloseOrigin revokes the origin and closes it.
func (b *Bind) CloseOrigin(tb testing.TB) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := b.closeOrigin(ctx); err != nil {
		tb.Fatalf("close origin: %v", err)
	}
}

// End fences and closes both sides.
func (b *Bind) End(tb testing.TB) {
	tb.Helper()
	b.Fence(tb)
	b.CloseOrigin(tb)
	b.to.forgetGrant(tb, b.Grant)
	b.from.forgetOrigin(tb, b.Origin)
}

// forgetGrant removes an ended grant from the lookup, and forgetOrigin an ended origin.
func (e *End) forgetGrant(tb testing.TB, g *transport.Grant) {
	if e.far != nil {
		e.far.forget(tb, g)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.grants[g.Slot] == g {
		delete(e.grants, g.Slot)
	}
}

func (e *End) forgetOrigin(tb testing.TB, o *transport.Origin) {
	if e.far != nil {
		e.far.forget(tb, o)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.origins[o.Slot] == o {
		delete(e.origins, o.Slot)
	}
}
