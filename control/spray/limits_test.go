package spray

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// Flows after their deadline send nothing; among equals the earlier deadline goes first.
func TestDeadlines(t *testing.T) {
	s, p := solo(t, 1)
	open := func(deadline Instant) *Flow {
		f := s.Open(p, LayerStream, deadline, space(t, transfer.ChunkBytes), nil)
		f.Ready(f.space.All())
		return f
	}
	never, late, soon, past := open(0), open(2*sec), open(sec), open(ms)
	var order []*Flow
	for _, sl := range pullAll(s, p, 2*ms) {
		order = append(order, sl.Flow)
	}
	if len(order) != 3 || order[0] != soon || order[1] != late || order[2] != never ||
		past.Waiting() != 0 {
		t.Errorf("%d flows sent, in the wrong order or past their deadline", len(order))
	}
}

// A slow rail leaves short work to a fast one: the work is not sent on the slow rail and hedged
// later, but not sent there at all.
func TestTailIsLeftToFasterRails(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(2*gbit, 100*time.Microsecond, 1)
	slow := m.rail(5*mbit, 100*time.Microsecond, 1)
	m.move(256 << 20)
	m.wait(sec)
	before, hedges := slow.bytes, m.p.pairs[0].count.Hedges
	for range 50 {
		m.move(1 << 20)
		m.wait(2 * ms)
	}
	if n := slow.bytes - before; n != 0 || m.p.pairs[0].count.Hedges != hedges {
		t.Errorf("%d bytes of short transfers on the slow rail, %d hedges", n,
			m.p.pairs[0].count.Hedges-hedges)
	}
}

// Urgent slices are sent at once, though windows and lanes are full of other work.
func TestUrgentNeedsNoOpenWindow(t *testing.T) {
	for _, slots := range []int{2, 16} { // full lanes, full window
		s := New(Config{})
		p := s.Peer(transfer.Boot{1}, nil)
		if err := s.LaneUp(0, p, LaneInfo{ID: 1, Path: Path{"tcp", "a", "b"}, SliceBytes: 1 << 20,
			MaxSlices: slots}); err != nil {
			t.Fatal(err)
		}
		flow(t, s, p, 64)
		if n := len(pullAll(s, p, 0)); n != min(slots-1, coldChunks) {
			t.Errorf("%d slices of bulk on a lane for %d", n, slots)
		}
		f := s.Open(p, DecodeWaits, 0, space(t, 4096), nil)
		f.Ready(f.space.All())
		if all := pullAll(s, p, 0); len(all) != 1 || all[0].Flow != f {
			t.Errorf("lane for %d: the urgent slice waits: %+v", slots, all)
		}
	}
}

// Short transfers cannot fill a rail, and do not make it look slow.
func TestShortTransfersDoNotChangeTheRate(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(gbit, ms, 1)
	m.move(128 << 20)
	for range 200 {
		m.move(4096)
		m.wait(ms)
	}
	near(t, "after short transfers", m.p.pairs[0].bw, gbit, 0.05)
}

// The window follows the delay of the path, not the queue that the window itself makes.
func TestWindowDoesNotFeedOnItself(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(gbit, ms, 2, func(in *LaneInfo) { in.MaxSlices = 1024 })
	f := m.open(LayerStream, 4<<30-1<<20)
	m.run(10*sec, f.landed)
	q := m.p.pairs[0]
	if limit := uint64(gbit * float64(5*ms)); q.window > limit {
		t.Errorf("window of %d bytes after 10 s at full load, with a delay of 1 ms: want %d at most",
			q.window, limit)
	}
	near(t, "learned", q.bw, gbit, 0.03)
}

// A flow avoids a transport that refuses it; other flows do not.
func TestRefusalsConcernOneFlow(t *testing.T) {
	s := New(Config{})
	p := s.Peer(transfer.Boot{1}, nil)
	for i, name := range []string{"shm", "tcp"} {
		if err := s.LaneUp(0, p, LaneInfo{ID: uint64(i + 1), Path: Path{name, "a", "b"}, Rank: i,
			SliceBytes: 1 << 20, MaxSlices: 16}); err != nil {
			t.Fatal(err)
		}
	}
	f := flow(t, s, p, 64)
	now := Instant(0)
	for range badFlow {
		all := pullAll(s, p, now)
		if all[0].Lane != 1 {
			t.Fatalf("a flow leaves the preferred transport early: %+v", all[0])
		}
		for i, sl := range all {
			v := Dropped
			if i == 0 {
				v = Refused
			}
			now += ms
			s.End(now, sl.Cookie, v)
		}
	}
	for _, sl := range pullAll(s, p, now) {
		if sl.Lane != 2 {
			t.Errorf("still on the transport that refused it: %+v", sl)
		}
	}
	f.Close()
	flow(t, s, p, 1)
	if all := pullAll(s, p, now); len(all) != 1 || all[0].Lane != 1 {
		t.Errorf("another flow went %+v", all)
	}
	if q := p.pairs[0]; q.state != Healthy || q.count.Errors != 0 {
		t.Errorf("the rail was blamed: %v, %d errors", q.state, q.count.Errors)
	}
}

// A flow that the only transport refuses waits between its tries, so that another transport has
// time to come up, and then uses that one at once.
func TestRefusalsAreNotSpentAtOnce(t *testing.T) {
	s := New(Config{})
	p := s.Peer(transfer.Boot{1}, nil)
	up := func(id uint64, name string) {
		if err := s.LaneUp(0, p, LaneInfo{ID: id, Path: Path{name, "a", "b"}, Rank: int(id) - 1,
			SliceBytes: 1 << 20, MaxSlices: 16}); err != nil {
			t.Fatal(err)
		}
	}
	up(1, "shm")
	f := flow(t, s, p, 1)
	var tries []Instant
	now, touched := Instant(0), 0
	for ; now < 10*sec; now += tickEvery {
		s.Tick(now, func(*Peer) { touched++ })
		for _, sl := range pullAll(s, p, now) {
			tries = append(tries, now)
			if end, _ := s.End(now, sl.Cookie, Refused); end.Exhausted {
				now = 10 * sec
			}
		}
		if now < 10*sec && !s.Busy() && len(tries) >= badFlow {
			t.Fatal("no transport will be tried again")
		}
	}
	if n := len(tries); n != DefaultMaxStrikes ||
		tries[n-1]-tries[badFlow-1] < (DefaultMaxStrikes-badFlow)*refusalRest ||
		touched < DefaultMaxStrikes-badFlow {
		t.Fatalf("tries at %v, touched %d times", tries, touched)
	}
	f.Close()
	f = flow(t, s, p, 1)
	for range badFlow {
		for _, sl := range pullAll(s, p, now) {
			s.End(now, sl.Cookie, Refused)
		}
	}
	if all := pullAll(s, p, now); len(all) != 0 {
		t.Errorf("tried again at once: %+v", all)
	}
	up(2, "tcp")
	if all := pullAll(s, p, now); len(all) != 1 || all[0].Lane != 2 {
		t.Errorf("over the transport that came: %+v", all)
	}
	f.Close()
	if s.Tick(now, func(*Peer) {}); len(s.resting) != 0 {
		t.Error("a flow that is over rests")
	}
}

// Hedges are bounded by the budget of the flow, no slice is hedged twice, and background is never
// hedged.
func TestHedgesAreBounded(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(gbit, 100*time.Microsecond, 1)
	m.rail(gbit, 100*time.Microsecond, 1)
	m.move(16 << 20)
	hedges := func() uint64 { return m.p.pairs[0].count.Hedges + m.p.pairs[1].count.Hedges }
	limit := func(*Flow) {}
	run := func(prio Priority) uint64 {
		f := m.open(prio, 8<<20)
		limit(f)
		before := hedges()
		m.run(20*ms, f.landed)
		l := m.links[0]
		l.set(func() { l.rate = gbit / 1000 })
		m.run(30*sec, f.landed)
		l.set(func() { l.rate = gbit })
		if !f.landed() {
			t.Fatal("not done")
		}
		if int(f.hedges) < 0 {
			t.Errorf("hedge budget is %d", f.hedges)
		}
		f.Close()
		n := hedges() - before
		m.wait(sec)
		m.move(32 << 20)
		return n
	}
	if n := run(LayerStream); n == 0 || n > 8 {
		t.Errorf("%d hedges for the tail of a stream: want some, and few", n)
	}
	if n := run(Background); n != 0 {
		t.Errorf("%d hedges for background", n)
	}
	// Without a budget there are none.
	limit = func(f *Flow) { f.hedges = 0 }
	if n := run(LayerStream); n != 0 {
		t.Errorf("%d hedges of a flow whose budget is spent", n)
	}
	limit = func(*Flow) { m.p.hedged += MaxHedgeBytes }
	if n := run(LayerStream); n != 0 {
		t.Errorf("%d hedges though as many bytes as may are in flight", n)
	}
}

// Values from peers and numbers of entries are bounded; the error names what was refused.
func TestBounds(t *testing.T) {
	s, p := solo(t, 0)
	for i, gbps := range []float64{math.Inf(1), math.NaN(), -1, 1e300, 1e-300} {
		name := fmt.Sprint("claim", i)
		if err := s.LaneUp(0, p, LaneInfo{ID: uint64(i + 1), Path: Path{"tcp", name, name},
			Gbps: gbps}); err != nil {
			t.Fatal(err)
		}
		if q := s.lanes[uint64(i+1)].pair; !(q.bw >= minClaim && q.bw <= maxClaim) ||
			q.window != coldChunks*transfer.ChunkBytes {
			t.Errorf("claim of %g: rate %g, window %d", gbps, q.bw, q.window)
		}
	}
	refused := 0
	for i := range 10000 {
		name := fmt.Sprint("rail", i)
		if err := s.LaneUp(0, p, LaneInfo{ID: uint64(i + 10), Path: Path{"tcp", name, name}}); err !=
			nil {
			refused++
			if !strings.Contains(err.Error(), name) {
				t.Fatalf("refused without a name: %v", err)
			}
		}
	}
	if len(p.pairs) != MaxPairs || refused != 10000-MaxPairs+5 {
		t.Errorf("%d pairs, %d refused", len(p.pairs), refused)
	}
	// A pair without lanes makes room for another.
	s.LaneDown(sec, 1)
	if err := s.LaneUp(sec, p, LaneInfo{ID: 1, Path: Path{"tcp", "new", "new"}}); err != nil ||
		len(p.pairs) != MaxPairs {
		t.Errorf("%d pairs: %v", len(p.pairs), err)
	}
	if err := s.LaneUp(sec, p, LaneInfo{ID: 1, Path: Path{"tcp", "new", "new"}}); err == nil {
		t.Error("one lane came up twice")
	}
	for i := range 2 * MaxLanes {
		_ = s.LaneUp(0, p, LaneInfo{ID: uint64(i + 20000), Path: Path{"tcp", "new", "new"}})
	}
	if p.lanes != MaxLanes {
		t.Errorf("%d lanes", p.lanes)
	}
	if err := s.LaneUp(0, s.Peer(transfer.Boot{2}, nil), LaneInfo{ID: 99999, Path: Path{"tcp",
		strings.Repeat("x", 10000), "b"}}); err == nil ||
		len(err.Error()) > 200 {
		t.Errorf("a name of 10,000 bytes: %v", err)
	}
}

// Unknown cookies, second ends of a slice, and a clock that goes back change nothing.
func TestEndsOfUnknownSlices(t *testing.T) {
	s, p := solo(t, 1)
	f := flow(t, s, p, 3)
	all := pullAll(s, p, sec)
	for _, c := range []uint64{0, 1 << 32, 1<<32 | 77, 1<<63 | 1, ^uint64(0)} {
		if _, ok := s.End(sec, c, Confirmed); ok && c != all[0].Cookie {
			t.Errorf("cookie %#x ended something", c)
		}
	}
	for _, sl := range all {
		s.End(ms, sl.Cookie, Confirmed) // earlier than it was posted
		if _, ok := s.End(2*sec, sl.Cookie, Failed); ok {
			t.Error("an end came twice and counted twice")
		}
	}
	s.Tick(0, func(*Peer) {})
	if err := check(s, []*Peer{p}, []*Flow{f}); err != nil || !f.landed() {
		t.Error(err)
	}
}
