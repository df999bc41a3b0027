package transporttest

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Conformance runs the contract suite. Run it with -race as well.
func Conformance(t *testing.T, f Factory) {
	for _, c := range []struct {
		name string
		run  func(*testing.T, Factory)
	}{
		{"Caps", testCaps},
		{"Meter", testMeter},
		{"Content", testContent},
		{"Empty lane", testIdle},
		{"Many at once", testMany},
		{"Both directions", testBothDirections},
		{"Accepted end moves", testAcceptedEndMoves},
		{"Duplicates", testDuplicates},
		{"Late garbage after landing", testLateGarbage},
		{"Invalidated, then retried", testInvalidated},
		{"Resolve errors", testResolveErrors},
		{"Refusals", testRefusals},
		{"Too many in flight", testTooMany},
		{"Fence attack after cancel", func(t *testing.T, f Factory) { testFenceAttack(t, f, false) }},
		{"Fence attack after success", func(t *testing.T, f Factory) { testFenceAttack(t, f, true) }},
		{"Fence honours its context", testFenceContext},
		{"Source rewritten after close", func(t *testing.T, f Factory) { testSourceAttack(t, f, true) }},
		{"Source rewritten after preemption", func(t *testing.T, f Factory) {
			testSourceAttack(t, f, false)
		}},
		{"Lanes killed", testKill},
		{"Close", testClose},
		{"Unknown peer", testUnknownPeer},
		{"Wrong key", testWrongKey},
		{"Dial honours its context", testDialContext},
	} {
		t.Run(c.name, func(t *testing.T) {
			leaktest.Check(t)
			c.run(t, f)
		})
	}
}

var shapes = []Shape{
	{Chunks: 1, BlockBytes: 64 << 10},
	{Chunks: 16, BlockBytes: 64 << 10},
	{Chunks: 16, BlockBytes: 16 << 10, Shuffle: true, TailBytes: 24},
	{Chunks: 13, BlockBytes: 4 << 10, Shuffle: true, TailBytes: 40008},
	{Chunks: 9, BlockBytes: 7 << 10, Shuffle: true, TailBytes: 8},
	{Chunks: 20, BlockBytes: 64, Shuffle: true, TailBytes: 128},
	{Chunks: 12, BlockBytes: 1 << 10, Across: 16, TailBytes: 5000},
}

func testCaps(t *testing.T, f Factory) {
	p := NewPair(t, f)
	c := p.A.Backend.Caps()
	if c.Initiator != transport.BySource && c.Initiator != transport.ByDestination {
		t.Errorf("initiator %d", c.Initiator)
	}
	if c.SliceBytes <= 0 || c.SliceBytes%transfer.ChunkBytes != 0 {
		t.Errorf("slice of %d bytes is no multiple of a chunk", c.SliceBytes)
	}
	if c.Evidence == 0 || c.Fence == 0 || p.A.Backend.Name() == "" {
		t.Errorf("incomplete: %+v", c)
	}
	seen := map[string]bool{}
	for _, r := range p.A.Rails {
		if r.Name == "" || seen[r.Name] {
			t.Errorf("rail name %q is empty or not unique", r.Name)
		}
		seen[r.Name] = true
	}
	if p.A.Backend.Caps() != c {
		t.Error("Caps changed")
	}
}

// testMeter: if Caps announces it, lanes report acknowledged bytes, which grow by the moved bytes
// and do not change without traffic.
func testMeter(t *testing.T, f Factory) {
	p := NewPair(t, f)
	a, _ := p.Dial()
	if !p.A.Backend.Caps().ReportsAcked {
		return // testCaps has checked the rest
	}
	m, ok := a.(transport.Meter)
	if !ok {
		t.Fatal("Caps has ReportsAcked, and this lane is no transport.Meter")
	}
	if w, ok := a.(transport.Timed); ok && (w.RTT() < 0 || w.RTT() > time.Second) {
		t.Errorf("an RTT of %v", w.RTT())
	}
	src, dst := p.A.Memory(shapes[1]), p.B.Memory(shapes[1])
	b := NewBind(t, p.A, p.B, src, dst, 1, 1)
	defer b.End(t)
	for i := range 3 {
		before := m.Acked()
		if r := p.A.MoveWait(a, b.Origin, src.All(), uint32(i+1)); r.Outcome != transfer.Landed {
			t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
		}
		want, err := b.Source.Bytes(src.All())
		if err != nil {
			t.Fatal(err)
		}
		// The acknowledgement of a confirmation may come a little after it.
		for deadline := time.Now().Add(patience); m.Acked()-before < want; {
			if time.Now().After(deadline) {
				t.Fatalf("%d bytes landed, and %d of them were acknowledged", want, m.Acked()-before)
			}
		}
	}
	idle := m.Acked()
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	p.A.down("LaneDown")
	if got := m.Acked(); got < idle {
		t.Errorf("%d bytes acknowledged after the lane was closed, %d before", got, idle)
	}
}

func testContent(t *testing.T, f Factory) {
	p := NewPair(t, f)
	a, _ := p.Dial()
	for i, s := range shapes {
		for j, d := range shapes {
			if testing.Short() && j != (i+1)%len(shapes) {
				continue // each layout once on either side
			}
			// The same content in another layout: the receiver has blocks of its own.
			d.Chunks, d.TailBytes = s.Chunks, s.TailBytes
			src, dst := p.A.Memory(s), p.B.Memory(d)
			seed := uint64(1000 + 100*i + j)
			src.Write(seed)
			b := NewBind(t, p.A, p.B, src, dst, transfer.Slot(i), transfer.Gen(j+1))
			b.Dest.Expect(seed)
			if r := p.A.MoveWait(a, b.Origin, src.All(), 1); r.Outcome != transfer.Landed ||
				r.Origin != b.Origin || r.Attempt != 1 || r.Took <= 0 {
				t.Fatalf("%+v to %+v: %s %s after %s: %v", s, d, r.Outcome, r.Reason, r.Took, r.Err)
			}
			if !b.Dest.Full() {
				t.Fatalf("%+v to %+v: the sender has its Landed, the destination has %d of %d", s, d,
					b.Dest.Count(),
					dst.Chunks())
			}
			b.End(t)
			dst.GapsIntact(t)
		}
	}
}

func testIdle(t *testing.T, f Factory) {
	p := NewPair(t, f)
	a, b := p.Dial()
	if err := a.Move(nil); err != nil {
		t.Errorf("an empty batch: %v", err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if l := p.A.down("LaneDown"); l.ID() != a.ID() {
		t.Errorf("lane %d is down, closed %d", l.ID(), a.ID())
	}
	if l := p.B.down("LaneDown of the other end"); l.ID() != b.ID() {
		t.Errorf("lane %d is down, closed %d", l.ID(), b.ID())
	}
	if a.ID() == b.ID() && p.B.far == nil {
		t.Error("two ends in one process share an id")
	}
}

// feed moves every chunk of a bind over lanes, in random slices, and retries slices that did not
// land. It reports the slices.
func feed(t *testing.T, from *End, lanes []transport.Lane, b *Bind) {
	var wg sync.WaitGroup
	work := make(chan transfer.Range, b.Source.Chunks())
	for at := uint32(0); at < b.Source.Chunks(); {
		n := min(1+rand.Uint32N(7), b.Source.Chunks()-at)
		work <- transfer.Range{First: at, Count: n}
		at += n
	}
	close(work)
	for _, l := range lanes {
		for range 3 {
			wg.Go(func() {
				for r := range work {
					if res := from.MoveWait(l, b.Origin, r, 1); res.Outcome != transfer.Landed {
						t.Errorf("chunks %d+%d: %s %s: %v", r.First, r.Count, res.Outcome, res.Reason, res.Err)
					}
				}
			})
		}
	}
	wg.Wait()
}

func testMany(t *testing.T, f Factory) {
	p := NewPair(t, f)
	var lanes []transport.Lane
	for range 4 {
		a, _ := p.Dial()
		lanes = append(lanes, a)
	}
	var wg sync.WaitGroup
	for slot := range transfer.Slot(4) {
		s := Shape{Chunks: 60, BlockBytes: 8 << 10, Shuffle: true, TailBytes: 1000}
		src, dst := p.A.Memory(s), p.B.Memory(s)
		seed := uint64(slot + 1)
		src.Write(seed)
		b := NewBind(t, p.A, p.B, src, dst, slot, 9)
		b.Dest.Expect(seed)
		wg.Go(func() {
			feed(t, p.A, lanes, b)
			if !b.Dest.Full() {
				t.Errorf("slot %d: %d of %d chunks", slot, b.Dest.Count(), dst.Chunks())
			}
			b.End(t)
			dst.GapsIntact(t)
		})
	}
	wg.Wait()
}

func testBothDirections(t *testing.T, f Factory) {
	p := NewPair(t, f)
	a, b := p.Dial()
	var wg sync.WaitGroup
	for slot := range transfer.Slot(2) {
		s := Shape{Chunks: 120, BlockBytes: 16 << 10, Shuffle: true}
		from, to, lane := p.A, p.B, a
		if slot == 1 {
			from, to, lane = p.B, p.A, b
		}
		src, dst := from.Memory(s), to.Memory(s)
		src.Write(7)
		bind := NewBind(t, from, to, src, dst, slot, 1)
		bind.Dest.Expect(7)
		wg.Go(func() {
			feed(t, from, []transport.Lane{lane}, bind)
			bind.End(t)
		})
	}
	wg.Wait()
}

func testAcceptedEndMoves(t *testing.T, f Factory) {
	p := NewPair(t, f)
	_, a := dial(t, p.B, p.A) // the receiver dialed
	src, dst := p.A.Memory(shapes[2]), p.B.Memory(shapes[2])
	src.Write(3)
	b := NewBind(t, p.A, p.B, src, dst, 1, 1)
	b.Dest.Expect(3)
	if r := p.A.MoveWait(a, b.Origin, src.All(), 1); r.Outcome != transfer.Landed {
		t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	b.End(t)
}

func testDuplicates(t *testing.T, f Factory) {
	p := NewPair(t, f)
	a1, _ := p.Dial()
	a2, _ := p.Dial()
	s := Shape{Chunks: 16, BlockBytes: 4 << 10, Shuffle: true}
	src, dst := p.A.Memory(s), p.B.Memory(s)
	src.Write(5)
	b := NewBind(t, p.A, p.B, src, dst, 1, 1)
	b.Dest.Expect(5)
	for round := range uint32(10) {
		// The same range at once on two lanes, with the later attempt on either; at least one of
		// them lands.
		r1 := p.A.Move(a1, b.Origin, src.All(), 2*round+1)
		r2 := p.A.Move(a2, b.Origin, src.All(), 2*round+2)
		x, y := receive(t, r1, "result"), receive(t, r2, "result")
		if x.Outcome != transfer.Landed && y.Outcome != transfer.Landed {
			t.Fatalf("neither of two attempts landed: %s %s, %s %s", x.Outcome, x.Reason,
				y.Outcome, y.Reason)
		}
		for _, r := range []transport.Result{x, y} {
			if r.Outcome != transfer.Landed && (r.Outcome != transfer.NotLanded ||
				r.Reason != transfer.ReasonSuperseded) {
				t.Fatalf("attempt %d: %s %s: %v", r.Attempt, r.Outcome, r.Reason, r.Err)
			}
		}
	}
	if !b.Dest.Full() {
		t.Error("not full")
	}
	b.End(t)
}

// testLateGarbage: landed chunks are never written again, whatever a slower attempt still carries.
func testLateGarbage(t *testing.T, f Factory) {
	p := NewPair(t, f)
	a, _ := p.Dial()
	s := Shape{Chunks: 12, BlockBytes: 4 << 10, Shuffle: true}
	src, dst := p.A.Memory(s), p.B.Memory(s)
	src.Write(5)
	b := NewBind(t, p.A, p.B, src, dst, 1, 1)
	part := transfer.Range{First: 2, Count: 7}
	if r := p.A.MoveWait(a, b.Origin, part, 2); r.Outcome != transfer.Landed {
		t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	// The source is invalidated and its blocks hold other content; an attempt that began before
	// still sends them.
	b.Source.Invalid.Store(true)
	src.Write(666)
	for attempt := uint32(1); attempt <= 3; attempt++ {
		if r := p.A.MoveWait(a, b.Origin, src.All(), attempt); r.Outcome != transfer.NotLanded {
			t.Fatalf("invalidated: %s %s: %v", r.Outcome, r.Reason, r.Err)
		}
	}
	b.Fence(t)
	for c := part.First; c < part.End(); c++ {
		if at, ok := dst.Holds(5, int(c)); !ok {
			t.Fatalf("chunk %d had landed and was written again, at byte %d", c, at)
		}
	}
	b.End(t)
}

func testInvalidated(t *testing.T, f Factory) {
	p := NewPair(t, f)
	a, _ := p.Dial()
	src, dst := p.A.Memory(shapes[2]), p.B.Memory(shapes[2])
	src.Write(5)
	b := NewBind(t, p.A, p.B, src, dst, 1, 1)
	b.Dest.Expect(5)
	b.Source.Invalid.Store(true)
	r := p.A.MoveWait(a, b.Origin, src.All(), 1)
	if r.Outcome != transfer.NotLanded || r.Reason != transfer.ReasonInvalidated {
		t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	if n := b.Dest.Count(); n != 0 {
		t.Fatalf("%d chunks of an invalidated slice landed", n)
	}
	b.Source.Invalid.Store(false)
	if r := p.A.MoveWait(a, b.Origin, src.All(), 2); r.Outcome != transfer.Landed {
		t.Fatalf("the lane did not survive an invalidated slice: %s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	b.End(t)
}

func testResolveErrors(t *testing.T, f Factory) {
	p := NewPair(t, f)
	a, _ := p.Dial()
	src, dst := p.A.Memory(shapes[2]), p.B.Memory(shapes[2])
	src.Write(5)
	b := NewBind(t, p.A, p.B, src, dst, 1, 1)
	b.Dest.Expect(5)
	b.Source.Broken.Store(true)
	if r := p.A.MoveWait(a, b.Origin, src.All(), 1); r.Outcome == transfer.Landed ||
		r.Outcome == transfer.InDoubt {
		t.Fatalf("a source that resolves nothing: %s %s", r.Outcome, r.Reason)
	}
	b.Source.Broken.Store(false)
	b.Dest.Refuse(true)
	if r := p.A.MoveWait(a, b.Origin, src.All(), 2); r.Outcome != transfer.Rejected ||
		r.Reason != transfer.ReasonRange {
		t.Fatalf("a destination that resolves nothing: %s %s", r.Outcome, r.Reason)
	}
	b.Dest.Refuse(false)
	if r := p.A.MoveWait(a, b.Origin, src.All(), 3); r.Outcome != transfer.Landed {
		t.Fatalf("the lane did not survive: %s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	b.End(t)
}

func testRefusals(t *testing.T, f Factory) {
	p := NewPair(t, f)
	a, _ := p.Dial()
	s := Shape{Chunks: 8, BlockBytes: 16 << 10}
	big := Shape{Chunks: 16, BlockBytes: 16 << 10}
	src, dst := p.A.Memory(big), p.B.Memory(s)
	src.Write(5)
	b := NewBind(t, p.A, p.B, src, dst, 1, 7)
	b.Dest.Expect(5)
	dst.Fill(0x11)
	want := func(what string, o *transport.Origin, r transfer.Range, reason transfer.Reason) {
		t.Helper()
		before := p.B.RefusedFor(reason)
		res := p.A.MoveWait(a, o, r, 1)
		if res.Outcome != transfer.Rejected || res.Reason != reason {
			t.Errorf("%s: %s %s, want rejected %s: %v", what, res.Outcome, res.Reason, reason, res.Err)
		}
		if n := p.B.RefusedFor(reason) - before; n != 1 {
			t.Errorf("%s: counted %d times as %s", what, n, reason)
		}
		if at, ok := dst.Filled(0x11); !ok {
			t.Errorf("%s: byte %d was written", what, at)
		}
	}
	other := func(slot transfer.Slot, gen transfer.Gen) *transport.Origin {
		o := &transport.Origin{Peer: p.B.Boot, Slot: slot, Gen: gen, Memory: b.Source,
			Valid: b.Source.Valid, Token: b.Origin.Token}
		p.A.mu.Lock()
		p.A.origins[slot] = o
		p.A.mu.Unlock()
		return o
	}
	want("unknown slot", other(99, 7), transfer.Range{Count: 8}, transfer.ReasonUnknownSlot)
	want("older generation", other(1, 6), transfer.Range{Count: 8}, transfer.ReasonStaleGen)
	want("newer generation", other(1, 8), transfer.Range{Count: 8}, transfer.ReasonStaleGen)
	p.A.mu.Lock()
	p.A.origins[1] = b.Origin
	p.A.mu.Unlock()
	want("past the end", b.Origin, transfer.Range{First: 4, Count: 8}, transfer.ReasonRange)
	want("far past the end", b.Origin, transfer.Range{First: 12, Count: 4}, transfer.ReasonRange)
	b.Fence(t)
	want("revoked", b.Origin, transfer.Range{Count: 8}, transfer.ReasonRevoked)
	b.End(t)

	// Lengths that do not match the receiver's.
	tails := p.B.Memory(Shape{Chunks: 8, BlockBytes: 16 << 10, TailBytes: 4096})
	tails.Fill(0x11)
	b = NewBind(t, p.A, p.B, src, tails, 2, 1)
	res := p.A.MoveWait(a, b.Origin, transfer.Range{Count: 8}, 1)
	if res.Outcome != transfer.Rejected || res.Reason != transfer.ReasonLength {
		t.Errorf("length mismatch: %s %s", res.Outcome, res.Reason)
	}
	if at, ok := tails.Filled(0x11); !ok {
		t.Errorf("length mismatch: byte %d was written", at)
	}
	b.End(t)

	// The lane survived all of this.
	good := p.B.Memory(big)
	b = NewBind(t, p.A, p.B, src, good, 3, 1)
	b.Dest.Expect(5)
	if r := p.A.MoveWait(a, b.Origin, src.All(), 1); r.Outcome != transfer.Landed {
		t.Fatalf("the lane did not survive: %s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	b.End(t)
}

func testTooMany(t *testing.T, f Factory) {
	p := NewPair(t, f)
	a, _ := p.Dial()
	// one chunk a slice: equal attempts at one chunk supersede each other
	s := Shape{Chunks: a.MaxInFlight() + 1, BlockBytes: 16 << 10}
	src, dst := p.A.Memory(s), p.B.Memory(s)
	src.Write(5)
	b := NewBind(t, p.A, p.B, src, dst, 1, 1)
	batch := make([]transport.Slice, a.MaxInFlight()+1)
	for i := range batch {
		r := transfer.Range{First: uint32(i), Count: 1}
		batch[i] = transport.Slice{Origin: b.Origin, Range: r, Attempt: 1, Cookie: uint64(1e6 + i)}
	}
	if err := a.Move(batch); err == nil {
		t.Fatal("more than MaxInFlight were taken")
	}
	// Nothing was accepted: a result would have no cookie waiting. The lane still works.
	if r := p.A.MoveWait(a, b.Origin, transfer.Range{Count: 1}, 1); r.Outcome != transfer.Landed {
		t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	// A whole window at once.
	got := make([]<-chan transport.Result, a.MaxInFlight())
	p.A.mu.Lock()
	batch = batch[:len(got)]
	for i := range batch {
		p.A.cookie++
		c := make(chan transport.Result, 1)
		batch[i].Cookie, got[i] = p.A.cookie, c
		p.A.pending[p.A.cookie] = c
	}
	p.A.mu.Unlock()
	if err := a.Move(batch); err != nil {
		t.Fatal(err)
	}
	clear(batch) // the header was not kept
	for _, c := range got {
		if r := receive(t, c, "result"); r.Outcome != transfer.Landed {
			t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
		}
	}
	b.End(t)
}
