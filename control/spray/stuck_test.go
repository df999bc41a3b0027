package spray

import (
	"testing"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// Slices that never end, on lanes that move others and on silent lanes.

// later ticks until to, as a running process does, and pulls each time.
func later(s *Scheduler, p *Peer, from, to Instant, sent func(at Instant, sl Slice)) {
	for at := from; at <= to; at += TickEvery {
		s.Tick(at, func(*Peer) {})
		for _, sl := range pullAll(s, p, at) {
			sent(at, sl)
		}
	}
}

func ignore(Instant, Slice) {}

// Slices that never end once filled the window of the only lane for ever. A slice that is late on a
// moving lane fills no window, and its silence is no evidence: later flows use the lane.
func TestStuckSlicesFillTheWindow(t *testing.T) {
	s, p := solo(t, 1)
	f := flow(t, s, p, 64)
	stuck := pullAll(s, p, 0)
	q := p.pairs[0]
	if q.room(transfer.ChunkBytes, LayerStream, false) {
		t.Fatalf("%d slices leave room in a window of %d bytes", len(stuck), q.window)
	}
	var sent []Slice
	at := Instant(0)
	for ; at < 3*sec && len(sent) == 0; at += TickEvery {
		s.Tick(at, func(*Peer) {})
		sent = pullAll(s, p, at)
	}
	if len(sent) != 1 || sent[0].Range.Count != 1 || at < DefaultAttempt {
		t.Fatalf("%+v were sent at %v: want one chunk, when the stuck ones are late", sent, at)
	}
	confirmed(t, s, p, f, at, sent)
	if l := q.lanes[0]; l.passed != q.stalled || l.passed != l.inflight || l.passed == 0 {
		t.Fatalf("%d bytes in flight, %d passed, %d stalled: want all of them", l.inflight,
			l.passed, q.stalled)
	}
	for at = 10 * sec; at < 13*sec; at += TickEvery {
		later(s, p, at, at+2*DefaultSuspect, ignore)
		at += 2 * DefaultSuspect
		g := flow(t, s, p, 1)
		sent := pullAll(s, p, at)
		if len(sent) != 1 || sent[0].Flow != g {
			t.Fatalf("at %v %+v are sent, want the new slice", at, sent)
		}
		s.End(at, sent[0].Cookie, Confirmed)
		if err := check(s, []*Peer{p}, nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, sl := range stuck {
		s.End(at, sl.Cookie, Superseded)
	}
	if err := check(s, []*Peer{p}, nil); err != nil || q.inflight != 0 || q.stalled != 0 {
		t.Errorf("%d bytes in flight, %d stalled, and nothing is: %v", q.inflight, q.stalled, err)
	}
}

// ranks is a scheduler with a lane of a preferred transport that is nearly full with few slices.
func ranks(t *testing.T, slots int) (*Scheduler, *Peer, func(at Instant)) {
	s := New(Config{})
	p := s.Peer(transfer.Boot{1}, nil)
	lane := func(at Instant, id uint64, transport string, rank, slots int) {
		t.Helper()
		if err := s.LaneUp(at, p, LaneInfo{ID: id, Path: Path{transport, "a", "b"}, Rank: rank,
			SliceBytes: 1 << 20, MaxSlices: slots}); err != nil {
			t.Fatal(err)
		}
	}
	lane(0, 1, "shm", 0, slots)
	return s, p, func(at Instant) { lane(at, 2, "tcp", 1, 16) }
}

// A dead lane that late slices fill keeps no flow from another transport.
func TestDeadLaneHoldsUpNoFlow(t *testing.T) {
	s, p, other := ranks(t, 4)
	f := flow(t, s, p, 64)
	pullAll(s, p, 0)
	later(s, p, 0, 4*sec, ignore)
	other(4 * sec)
	later(s, p, 4*sec, 24*sec, func(at Instant, sl Slice) {
		if sl.Lane == 2 {
			s.End(at, sl.Cookie, Confirmed)
		}
	})
	if !f.landed() {
		t.Errorf("%d of 64 chunks landed in 20 s beside a dead lane", f.chunks.Landed())
	}
}

// The same for a lane that moved once, so that its slices are passed, and then no more.
func TestLaneFullOfPassedSlices(t *testing.T) {
	s, p, other := ranks(t, 3)
	other(0)
	f := flow(t, s, p, 64)
	confirm := func(at Instant, sl Slice) {
		if sl.Lane == 2 {
			s.End(at, sl.Cookie, Confirmed)
		}
	}
	for at := Instant(0); at < 3*sec; at += TickEvery {
		s.Moved(at, 1)
		later(s, p, at, at, confirm)
	}
	if l := p.pairs[0].lanes[0]; l.passed == 0 || l.flights < l.limit(false) {
		t.Fatalf("%d bytes passed, %d slices: want a lane full of them", l.passed, l.flights)
	}
	later(s, p, 3*sec, 23*sec, confirm)
	if !f.landed() {
		t.Errorf("%d of 64 chunks landed in 20 s beside a lane full of slices that never end",
			f.chunks.Landed())
	}
}

// The transfer on a dead rail was given up, so nothing is sent that would show its state. A slower
// rail that comes up then carries everything: the tail is not left to the dead rail.
func TestDeadRailGetsNoTail(t *testing.T) {
	for _, second := range []string{"rail", "lane"} {
		m := newModel(t, Config{})
		dead := m.rail(4*gbit, 100*time.Microsecond, 1)
		m.move(128 << 20)
		f := m.open(LayerStream, 1<<30)
		m.run(20*ms, f.landed)
		dead.set(func() { dead.dead = true })
		m.wait(3 * sec)
		f.Close()
		m.wait(3 * sec)
		path := Path{"tcp", "r0", "r0"}
		if second == "rail" {
			path = Path{"tcp", "r1", "r1"}
		}
		m.rail(gbit/10, 100*time.Microsecond, 1, func(in *LaneInfo) { in.Path = path })
		for range 3 {
			g := m.open(LayerStream, 1<<20)
			if d := m.run(30*sec, g.landed); d < 0 || d > sec {
				t.Errorf("1 MiB over a second %s of 0.1 Gbit/s took %v", second, d)
			}
		}
	}
}

// The only lane is silent for long and then lost. Its chunks are not charged with failures, because
// other lanes may carry them.
func TestSilenceCostsNoStrikes(t *testing.T) {
	m := newModel(t, Config{})
	a := m.rail(gbit, 100*time.Microsecond, 1, func(in *LaneInfo) { in.MaxSlices = 64 })
	m.move(64 << 20)
	f := m.open(LayerStream, 512<<20)
	m.run(20*ms, f.landed)
	a.set(func() { a.dead = true })
	m.wait(60 * sec)
	if n := m.p.pairs[0].count.TimedOut; n < 8 {
		t.Fatalf("%d slices timed out in a minute of silence: the test has no point", n)
	}
	m.ends = func(e Ended, sl Slice) {
		if e.Exhausted {
			t.Errorf("%+v: given up for a silence", sl.Range)
		}
	}
	held := a.queue
	a.queue = nil
	for _, sl := range held {
		m.end(sl, Lost)
	}
}

// A late slice of a silent lane is not charged, even if a pause of this process has moved the times
// of the lane. If the slice fails, it is charged.
func TestLateSlicesThatFailAreCharged(t *testing.T) {
	s, p := solo(t, 1)
	flow(t, s, p, 64)
	first := pullAll(s, p, 0)
	later(s, p, 0, TickEvery, ignore)
	later(s, p, sec, 5*sec, ignore)
	q := p.pairs[0]
	if q.count.TimedOut < uint64(len(first)) || q.count.Errors != 0 {
		t.Fatalf("%d slices are late and %d errors: want all and none", q.count.TimedOut, q.count.Errors)
	}
	for _, sl := range first {
		s.End(5*sec, sl.Cookie, Failed)
		if k := sl.Flow.state(sl.Range.First); k.Strikes != 1 {
			t.Errorf("%+v failed: %d strikes", sl.Range, k.Strikes)
		}
	}
	if q.count.Errors != uint64(len(first)) || q.state != Excluded {
		t.Errorf("%d slices failed: %d errors, and the pair is %s", len(first), q.count.Errors, q.state)
	}
}

// A late slice of a moving lane is charged once, and not again if it fails.
func TestLateSlicesAreChargedOnce(t *testing.T) {
	s, p := solo(t, 1)
	flow(t, s, p, 1<<16)
	first := pullAll(s, p, 0)
	stuck := first[0]
	for _, sl := range first[1:] {
		s.End(ms, sl.Cookie, Confirmed)
	}
	later(s, p, ms, 3*sec, func(at Instant, sl Slice) { s.End(at, sl.Cookie, Confirmed) })
	q := p.pairs[0]
	if k := stuck.Flow.state(stuck.Range.First); q.count.Errors != 1 || k.Strikes != 1 ||
		q.stalled != stuck.Bytes {
		t.Fatalf("late: %d errors, %d strikes, %d bytes passed; want one each, and its bytes",
			q.count.Errors, k.Strikes, q.stalled)
	}
	s.End(3*sec, stuck.Cookie, Failed)
	if k := stuck.Flow.state(stuck.Range.First); q.count.Errors != 1 || k.Strikes != 1 {
		t.Errorf("it failed then: %d errors, %d strikes", q.count.Errors, k.Strikes)
	}
}
