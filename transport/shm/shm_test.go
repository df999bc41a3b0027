package shm

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const waitFor = time.Minute // of a test that is about to fail

// node is one process's side of the contract, small enough to see through.
type node struct {
	boot, other transfer.Boot
	key         [32]byte
	b           *Backend
	rail        transport.Rail
	up          chan transport.Lane
	down        chan error
	results     chan transport.Result

	mu      sync.Mutex
	grants  map[transfer.Slot]*transport.Grant
	refused map[transfer.Reason]int
}

func newNode(tb testing.TB, boot, other byte, cfg Config) *node {
	n := &node{boot: transfer.Boot{boot}, other: transfer.Boot{other}, key: [32]byte{1, 2, 3},
		b:  New(cfg),
		up: make(chan transport.Lane, 16), down: make(chan error, 16),
		results: make(chan transport.Result, 1024),
		grants:  map[transfer.Slot]*transport.Grant{}, refused: map[transfer.Reason]int{}}
	rails, err := n.b.Open(tb.Context(), n)
	if err != nil {
		tb.Fatal(err)
	}
	n.rail = rails[0]
	tb.Cleanup(func() { _ = n.b.Close() })
	return n
}

func (n *node) PeerKey(b transfer.Boot) (transport.Peer, bool) {
	return transport.Peer{Boot: n.other, Self: n.boot, Key: n.key}, b == n.other
}

func (n *node) Grant(_ transfer.Boot, s transfer.Slot, g transfer.Gen) (*transport.Grant,
	transfer.Reason) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch gr := n.grants[s]; {
	case gr == nil:
		return nil, transfer.ReasonUnknownSlot
	case gr.Gen != g:
		return nil, transfer.ReasonStaleGen
	default:
		return gr, transfer.ReasonNone
	}
}

func (n *node) Origin(transfer.Boot, transfer.Slot, transfer.Gen) (*transport.Origin,
	transfer.Reason) {
	return nil, transfer.ReasonUnknownSlot
}
func (n *node) LaneUp(l transport.Lane)            { n.up <- l }
func (n *node) LaneDown(_ transport.Lane, e error) { n.down <- e }
func (n *node) Done(_ transport.Lane, rs []transport.Result) {
	for _, r := range rs {
		n.results <- r
	}
}
func (n *node) Refused(_ transport.Lane, r transfer.Reason) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.refused[r]++
}

// memory is both ends of a transfer: blocks of blockBytes scattered over a region.
type memory struct {
	space  *transfer.Space
	blocks []mem.Block
	each   uint64
	bitmap *transfer.Bitmap
}

func newMemory(tb testing.TB, bytes, blockBytes uint64, seed uint64) *memory {
	r, err := mem.NewAnonymous("test", 2*bytes)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(r.Release)
	sp, err := transfer.NewSpace([]uint64{bytes})
	if err != nil {
		tb.Fatal(err)
	}
	m := &memory{space: sp, each: blockBytes, bitmap: transfer.NewBitmap(sp.NumChunks())}
	blocks := rand.New(rand.NewPCG(seed, 1)).Perm(int(2 * bytes / blockBytes))
	for _, i := range blocks[:bytes/blockBytes] {
		m.blocks = append(m.blocks, mem.Block{Region: r, Off: uint64(i) * blockBytes, Len: blockBytes})
	}
	return m
}

func (m *memory) fill(seed byte) {
	c := rand.NewChaCha8([32]byte{seed})
	for _, b := range m.blocks {
		p, _ := b.Bytes()
		_, _ = c.Read(p)
	}
}

func (m *memory) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	if err := m.space.Check(r); err != nil {
		return dst, err
	}
	n, _ := m.space.Bytes(r)
	for off := uint64(r.First) * transfer.ChunkBytes; n > 0; {
		b := m.blocks[off/m.each]
		k := min(n, m.each-off%m.each)
		dst = append(dst, mem.Block{Region: b.Region, Off: b.Off + off%m.each, Len: k})
		off += k
		n -= k
	}
	return dst, nil
}

func (m *memory) Bytes(r transfer.Range) (uint64, error)              { return m.space.Bytes(r) }
func (m *memory) Device() mem.Device                                  { return nil }
func (m *memory) Landed(_ transport.Lane, r transfer.Range, _ uint32) { m.bitmap.Set(r) }

func valid(transfer.LeaseID) bool   { return true }
func invalid(transfer.LeaseID) bool { return false }

func equal(a, b *memory) bool {
	for i := range a.blocks {
		x, _ := a.blocks[i].Bytes()
		y, _ := b.blocks[i].Bytes()
		if !bytes.Equal(x, y) {
			return false
		}
	}
	return true
}

type pair struct {
	src, dst *node
	lane     transport.Lane
}

func newPair(tb testing.TB, cfg Config) *pair {
	if cfg.Dir == "" {
		cfg.Dir = testutil.ShortDir(tb)
	}
	p := &pair{src: newNode(tb, 1, 2, cfg), dst: newNode(tb, 2, 1, cfg)}
	p.lane = p.dial(tb)
	return p
}

func (p *pair) dial(tb testing.TB) transport.Lane {
	l, err := p.src.b.Dial(tb.Context(), transport.Peer{Boot: p.dst.boot, Self: p.src.boot,
		Key: p.src.key}, p.src.rail, p.dst.rail)
	if err != nil {
		tb.Fatal(err)
	}
	for _, n := range []*node{p.src, p.dst} {
		select {
		case <-n.up:
		case <-time.After(waitFor):
			tb.Fatal("no LaneUp")
		}
	}
	return l
}

func (p *pair) bind(tb testing.TB, slot transfer.Slot, from, to *memory) (*transport.Origin,
	*transport.Grant) {
	g := &transport.Grant{Peer: p.src.boot, Slot: slot, Gen: 7, Memory: to, Landed: to.Landed}
	g.Receipt.Reset(to.space.NumChunks())
	p.dst.mu.Lock()
	p.dst.grants[slot] = g
	p.dst.mu.Unlock()
	tb.Cleanup(func() { // before the memory goes
		g.Revoke()
		if err := p.dst.b.Fence(context.Background(), g); err != nil {
			tb.Error(err)
		}
	})
	return &transport.Origin{Peer: p.dst.boot, Slot: slot, Gen: 7, Memory: from, Valid: valid}, g
}

func (n *node) result(tb testing.TB) transport.Result {
	tb.Helper()
	select {
	case r := <-n.results:
		return r
	case <-time.After(waitFor):
		tb.Fatal("no result")
		return transport.Result{}
	}
}

// move sends the whole space in slices of count chunks, as fast as the lane takes them.
func (p *pair) move(tb testing.TB, o *transport.Origin, sp *transfer.Space, count uint32,
	lanes ...transport.Lane) {
	tb.Helper()
	type state struct{ inFlight int }
	st := map[transport.Lane]*state{}
	for _, l := range lanes {
		st[l] = &state{}
	}
	next, out := uint32(0), 0
	owner := map[uint64]transport.Lane{}
	for next < sp.NumChunks() || out > 0 {
		for _, l := range lanes {
			var batch []transport.Slice
			for st[l].inFlight+len(batch) < l.MaxInFlight() && next < sp.NumChunks() {
				r := transfer.Range{First: next, Count: min(count, sp.NumChunks()-next)}
				batch = append(batch, transport.Slice{Origin: o, Range: r, Attempt: 1, Cookie: uint64(next)})
				owner[uint64(next)] = l
				next += r.Count
			}
			if len(batch) > 0 {
				if err := l.Move(batch); err != nil {
					tb.Fatal(err)
				}
				st[l].inFlight += len(batch)
				out += len(batch)
			}
		}
		r := p.src.result(tb)
		if r.Outcome != transfer.Landed {
			tb.Fatalf("%v ended %s (%s): %v", r.Range, r.Outcome, r.Reason, r.Err)
		}
		st[owner[r.Cookie]].inFlight--
		out--
	}
}

func TestMove(t *testing.T) {
	p := newPair(t, Config{})
	for i, each := range []uint64{4 << 10, 100, 64 << 10, 1 << 20, 3 * 1024} {
		n := (uint64(5<<20) + 12345) / each * each
		from, to := newMemory(t, n, each, 1), newMemory(t, n, each, 2)
		from.fill(byte(i))
		o, g := p.bind(t, transfer.Slot(i), from, to)
		p.move(t, o, from.space, 16, p.lane)
		if !to.bitmap.Full() || !equal(from, to) {
			t.Fatalf("blocks of %d: full %v, equal %v", each, to.bitmap.Full(), equal(from, to))
		}
		g.Revoke()
		o.Revoke()
		if err := p.dst.b.Fence(t.Context(), g); err != nil {
			t.Fatal(err)
		}
		if err := p.src.b.CloseOrigin(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
}

// A pull or a push that either side refuses lands nothing, and the lane serves on.
func TestRefusals(t *testing.T) {
	for name, size := range map[string]struct{ bytes, block uint64 }{"pulls": {4 << 20, 16 << 10},
		"pushes": {8 << 10, 512}} {
		t.Run(name, func(t *testing.T) { testRefusals(t, size.bytes, size.block) })
	}
}

func testRefusals(t *testing.T, n, each uint64) {
	p := newPair(t, Config{})
	from, to := newMemory(t, n, each, 1), newMemory(t, n, each, 2)
	from.fill(9)
	all := from.space.All()
	for name, c := range map[string]struct {
		edit    func(*transport.Origin, *transport.Grant)
		outcome transfer.Outcome
		reason  transfer.Reason
		known   bool // to the source by the time it would push
	}{
		"unknown slot": {func(o *transport.Origin, _ *transport.Grant) { o.Slot = 99 },
			transfer.Rejected, transfer.ReasonUnknownSlot, false},
		"stale gen": {func(o *transport.Origin, _ *transport.Grant) { o.Gen = 6 }, transfer.Rejected,
			transfer.ReasonStaleGen, false},
		"revoked grant": {func(_ *transport.Origin, g *transport.Grant) { g.Revoke() }, transfer.Rejected,
			transfer.ReasonRevoked, false},
		"closed origin": {func(o *transport.Origin, _ *transport.Grant) { o.Revoke() },
			transfer.NotLanded, transfer.ReasonSourceGone, true},
		"invalidated": {func(o *transport.Origin, _ *transport.Grant) { o.Valid = invalid },
			transfer.NotLanded, transfer.ReasonInvalidated, true},
		"other length": {func(_ *transport.Origin, g *transport.Grant) {
			m := newMemory(t, n-each, each, 3)
			g.Memory, g.Landed = m, m.Landed
		}, transfer.Rejected, transfer.ReasonLength, false},
		"a later attempt holds it": {func(_ *transport.Origin, g *transport.Grant) {
			var c transport.Claim
			if why := g.Claim(&c, all, 2); why != transfer.ReasonNone {
				t.Fatal(why)
			}
		}, transfer.NotLanded, transfer.ReasonSuperseded, false},
	} {
		t.Run(name, func(t *testing.T) {
			o, g := p.bind(t, 5, from, to)
			p.dst.mu.Lock() // what the copiers see comes after it
			c.edit(o, g)
			p.dst.mu.Unlock()
			before, _ := requests(p.lane)
			if err := p.lane.Move([]transport.Slice{{Origin: o, Range: all, Attempt: 1, Cookie: 42}}); err !=
				nil {
				t.Fatal(err)
			}
			r := p.src.result(t)
			if r.Outcome != c.outcome || r.Reason != c.reason || r.Cookie != 42 {
				t.Fatalf("ended %s (%s): %v", r.Outcome, r.Reason, r.Err)
			}
			if to.bitmap.Count() != 0 {
				t.Fatal("something landed")
			}
			if n > pushBytes {
				return
			}
			// Of a push nothing is written before it counts, and a source that is gone
			// is not sent at all.
			if sent, _ := requests(p.lane); (sent == before) != c.known || equal(from, to) {
				t.Errorf("%d pushes were sent; bytes written: %v", sent-before, equal(from, to))
			}
		})
	}
	// The lane serves on.
	o, _ := p.bind(t, 6, from, to)
	p.move(t, o, from.space, 16, p.lane)
	if !equal(from, to) {
		t.Fatal("bytes differ")
	}
}

func TestProcessMemoryIsLeftToOthers(t *testing.T) {
	p := newPair(t, Config{})
	from, to := newMemory(t, 1<<20, 4096, 1), newMemory(t, 1<<20, 4096, 2)
	from.blocks[3].Region = processRegion(t)
	from.blocks[3].Off = 0
	o, _ := p.bind(t, 1, from, to)
	if err := p.lane.Move([]transport.Slice{{Origin: o, Range: from.space.All(), Attempt: 1}}); err !=
		nil {
		t.Fatal(err)
	}
	if r := p.src.result(t); r.Outcome != transfer.NotLanded || !errors.Is(r.Err,
		transport.ErrNotSupported) {
		t.Fatalf("ended %s (%s): %v", r.Outcome, r.Reason, r.Err)
	}
}

func TestLaneEnds(t *testing.T) {
	p := newPair(t, Config{})
	from, to := newMemory(t, 16<<20, 16<<10, 1), newMemory(t, 16<<20, 16<<10, 2)
	o, _ := p.bind(t, 1, from, to)
	var batch []transport.Slice
	for i := range uint32(maxInFlight) {
		batch = append(batch, transport.Slice{Origin: o, Range: transfer.Range{First: i % 16 * 16,
			Count: 16}, Attempt: 1, Cookie: uint64(i)})
	}
	if err := p.lane.Move(batch); err != nil {
		t.Fatal(err)
	}
	if err := p.lane.Move(batch[:1]); err != nil && !errors.Is(err, ErrBusy) {
		t.Fatal(err)
	} else if err == nil {
		p.src.result(t) // an early answer made room
	}
	if err := p.lane.Close(); err != nil {
		t.Fatal(err)
	}
	seen := map[uint64]bool{}
	for range maxInFlight {
		r := p.src.result(t)
		if seen[r.Cookie] && r.Cookie != 0 {
			t.Fatalf("slice %d ended twice", r.Cookie)
		}
		seen[r.Cookie] = true
	}
	for _, n := range []*node{p.src, p.dst} {
		select {
		case <-n.down:
		case <-time.After(waitFor):
			t.Fatal("no LaneDown")
		}
	}
	if err := p.lane.Move(batch[:1]); err == nil {
		t.Fatal("a closed lane took a slice")
	}
	o.Revoke()
	if err := p.src.b.CloseOrigin(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	p.dial(t) // a new lane to the same peer
}

// TestSilentPeer: a peer that answers no pull cannot hold the origin for ever.
func TestSilentPeer(t *testing.T) {
	p := newPair(t, Config{})
	from, to := newMemory(t, 1<<20, 16<<10, 1), newMemory(t, 1<<20, 16<<10, 2)
	o, g := p.bind(t, 1, from, to)
	hang, entered := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(hang) })
	t.Cleanup(release) // also where the test fails
	p.dst.mu.Lock()
	g.Memory = &hanging{memory: to, entered: entered, hang: hang}
	p.dst.mu.Unlock()
	if err := p.lane.Move([]transport.Slice{{Origin: o, Range: from.space.All(), Attempt: 1}}); err !=
		nil {
		t.Fatal(err)
	}
	<-entered
	o.Revoke()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := p.src.b.CloseOrigin(ctx, o); err != nil {
		t.Fatal(err)
	}
	if r := p.src.result(t); r.Outcome != transfer.NotLanded {
		t.Fatalf("ended %s", r.Outcome)
	}
	release()
	if err := p.src.b.CloseOrigin(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if to.bitmap.Count() != 0 {
		t.Fatal("it landed without a verdict")
	}
}

type hanging struct {
	*memory
	entered, hang chan struct{}
	once          sync.Once
}

func (h *hanging) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	h.once.Do(func() { close(h.entered) })
	<-h.hang
	return h.memory.Resolve(dst, r)
}

func TestFreedRegionIsForgotten(t *testing.T) {
	p := newPair(t, Config{})
	r, err := mem.NewAnonymous("gone", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	from, to := newMemory(t, 1<<20, 1<<20, 1), newMemory(t, 1<<20, 1<<20, 2)
	from.blocks[0] = mem.Block{Region: r, Len: 1 << 20}
	o, _ := p.bind(t, 1, from, to)
	p.move(t, o, from.space, 16, p.lane)
	mapped := func() int {
		p.dst.b.maps.mu.Lock()
		defer p.dst.b.maps.mu.Unlock()
		return len(p.dst.b.maps.all)
	}
	if mapped() != 1 {
		t.Fatalf("%d regions are mapped", mapped())
	}
	r.Release()
	p.lane.(*lane).src.forgetFreed()
	// The answer to a later pull shows that the earlier message was handled.
	from2 := newMemory(t, 1<<20, 1<<20, 3)
	o2, _ := p.bind(t, 2, from2, to)
	p.move(t, o2, from2.space, 16, p.lane)
	if mapped() != 1 {
		t.Fatalf("%d regions are mapped after one of two was freed", mapped())
	}
}

// Lanes open after a user has removed the socket, or its directory.
func TestSocketIsRemoved(t *testing.T) {
	p := newPair(t, Config{Dir: testutil.ShortDir(t), look: time.Millisecond})
	path := p.dst.rail.Address
	for _, remove := range []func() error{
		func() error { return os.Remove(path) },
		// RemoveAll fails if a socket is made meanwhile.
		func() error { return os.Rename(filepath.Dir(path), filepath.Dir(path)+"2") },
	} {
		if err := remove(); err != nil {
			t.Fatal(err)
		}
		testutil.Eventually(t, waitFor, "the socket is not made again", func() bool {
			st, err := os.Stat(path)
			return err == nil && st.Mode().Perm() == 0o600
		})
		p.dial(t)
	}
}

func TestWrongKey(t *testing.T) {
	p := newPair(t, Config{})
	_, err := p.src.b.Dial(t.Context(), transport.Peer{Boot: p.dst.boot, Self: p.src.boot,
		Key: [32]byte{66}}, p.src.rail, p.dst.rail)
	if err == nil {
		t.Fatal("a lane opened with the wrong key")
	}
	_, err = p.src.b.Dial(t.Context(), transport.Peer{Boot: p.dst.boot, Self: transfer.Boot{9},
		Key: p.src.key}, p.src.rail, p.dst.rail)
	if err == nil {
		t.Fatal("a lane opened for an unknown boot")
	}
	_, err = p.src.b.Dial(t.Context(), transport.Peer{Boot: p.dst.boot, Self: p.src.boot,
		Key: p.src.key}, p.src.rail, transport.Rail{Address: "/nowhere"})
	if !errors.Is(err, transport.ErrNotSupported) {
		t.Fatal(err)
	}
}

// TestSuperseded: a slow first attempt never damages what the second has landed.
func TestSuperseded(t *testing.T) {
	p := newPair(t, Config{})
	from, old, to := newMemory(t, 1<<20, 16<<10, 1), newMemory(t, 1<<20, 16<<10, 1),
		newMemory(t, 1<<20, 16<<10, 2)
	from.fill(1)
	old.fill(2)
	o, _ := p.bind(t, 1, from, to)
	p.move(t, o, from.space, 16, p.lane)
	late := &transport.Origin{Peer: o.Peer, Slot: o.Slot, Gen: o.Gen, Memory: old, Valid: valid}
	if err := p.lane.Move([]transport.Slice{{Origin: late, Range: from.space.All(),
		Attempt: 1}}); err != nil {
		t.Fatal(err)
	}
	p.src.result(t)
	if !equal(from, to) {
		t.Fatal("a late attempt wrote over landed chunks")
	}
}
