package spray

import (
	"testing"
	"time"
)

// A window must be as long as its path, so that a long path is full, and longer only by a few
// slices, so that urgent slices do not wait in a queue of our own making. Measurements of the path
// alone, now and then, distinguish the two.

// busy keeps a rail pair under endless load of a priority.
func busy(m *model, prio Priority, d Instant) {
	until := m.now + d
	for m.now < until {
		f := m.open(prio, 4<<30-1<<20)
		m.run(until-m.now, f.landed)
		if !f.landed() {
			f.Close()
		}
	}
}

// A long path is full, even with no more slices than a lane takes by default, and also with
// background.
func TestLongPathIsFull(t *testing.T) {
	for _, prio := range []Priority{DecodeWaits, LayerStream, Background} {
		m := newModel(t, Config{})
		l := m.rail(gbit, 50*ms, 2)
		busy(m, prio, 3*sec)
		before, began := l.bytes, m.now
		busy(m, prio, 10*sec)
		got := float64(l.bytes-before) / float64(m.now-began)
		t.Logf("%v: %.3f of the rail", prio, got/gbit)
		if got < 0.97*gbit {
			t.Errorf("%v: %.3f of a rail of 1 Gbit/s and 50 ms: want 0.97: %+v", prio, got/gbit,
				m.s.View(m.now).Pairs[0])
		}
	}
}

// A queue that was in front of the rail when it was first used must not count as delay for as long
// as there is work. Without measurements of the path alone it would, because no slice finds an idle
// rail.
func TestQueueIsNotDelay(t *testing.T) {
	for _, prio := range []Priority{LayerStream, Background} {
		m := newModel(t, Config{})
		l := m.rail(gbit, 40*ms, 2)
		m.open(prio, 4<<30-1<<20)
		m.wait(2 * sec)
		q := m.p.pairs[0]
		if q.minDelay() < 35*ms {
			t.Fatalf("delay %v: not what this test is about", q.minDelay())
		}
		l.set(func() { l.delay = 100 * time.Microsecond })
		m.wait(5 * latencySpan)
		if q.minDelay() > 2*ms || q.window > uint64(gbit*float64(6*ms)) {
			t.Errorf("%v: delay %v and window %d under load, 10 s after the path became short", prio,
				q.minDelay(), q.window)
		}
		before, began := l.bytes, m.now
		m.wait(5 * sec)
		if got := float64(l.bytes-before) / float64(m.now-began); got < 0.97*gbit {
			t.Errorf("%v: %.3f of the rail", prio, got/gbit)
		}
	}
}

// A path that becomes long under load is full again.
func TestPathBecomesLong(t *testing.T) {
	m := newModel(t, Config{})
	l := m.rail(gbit, 100*time.Microsecond, 2)
	busy(m, LayerStream, 2*sec)
	l.set(func() { l.delay = 30 * ms })
	busy(m, LayerStream, 6*sec)
	before, began := l.bytes, m.now
	busy(m, LayerStream, 5*sec)
	if got := float64(l.bytes-before) / float64(m.now-began); got < 0.97*gbit {
		t.Errorf("%.3f of the rail: %+v", got/gbit, m.s.View(m.now).Pairs[0])
	}
}

// Processes do not always run when they could: confirmations are late, by half a millisecond
// mostly, by eight now and then. The window must not count this as delay of the path, and urgent
// slices wait behind hardly more than two slices.
func TestLateConfirmationIsNotDelay(t *testing.T) {
	m := newModel(t, Config{})
	l := m.rail(2*gbit, 100*time.Microsecond, 2)
	n := 0
	l.late = func() Instant {
		if n++; n%37 == 0 {
			return 8 * ms
		}
		return Instant(n*7919%1000) * time.Microsecond
	}
	deep, posts := 0, 0
	m.open(Background, 4<<30-1<<20)
	m.wait(2 * sec)
	m.pulled = func(sl Slice) {
		if posts++; m.p.pairs[0].inflight > uint64(2*gbit*float64(3*ms)) {
			deep++
		}
	}
	before, began := l.bytes, m.now
	m.wait(10 * sec)
	got := float64(l.bytes-before) / float64(m.now-began)
	q := m.p.pairs[0]
	t.Logf("%.3f of the rail; delay %v, slice %d, %d of %d times more than 3 ms in flight",
		got/(2*gbit), q.minDelay(), q.piece, deep, posts)
	if deep > posts/50 {
		t.Errorf("%d of %d slices of background left more than 3 ms in flight", deep, posts)
	}
}

// Background does not use one lane of each pair; a pair with one lane carries it there.
func TestBackgroundLeavesALane(t *testing.T) {
	for lanes, want := range map[int]int{1: 1, 2: 1, 3: 2} {
		m := newModel(t, Config{})
		m.rail(gbit, 100*time.Microsecond, lanes)
		used := map[uint64]bool{}
		m.pulled = func(sl Slice) { used[sl.Lane] = true }
		m.move(16 << 20)
		if len(used) != lanes {
			t.Errorf("%d lanes: layer streams use %d", lanes, len(used))
		}
		clear(used)
		f := m.open(Background, 64<<20)
		m.run(sec, f.landed)
		if len(used) != want {
			t.Errorf("%d lanes: background uses %d, want %d", lanes, len(used), want)
		}
	}
}

// Pairs are drained one at a time: the others continue, and the cost is small.
func TestDrainsTakeTurns(t *testing.T) {
	m := newModel(t, Config{})
	for range 4 {
		m.rail(gbit, 100*time.Microsecond, 2)
	}
	drains := map[*pair]bool{}
	m.pulled = func(Slice) {
		n := 0
		for _, q := range m.p.pairs {
			if q.draining {
				drains[q] = true
				n++
			}
		}
		if n > 1 {
			t.Fatalf("%d pairs are drained at once", n)
		}
	}
	m.open(LayerStream, 4<<30-1<<20)
	m.wait(4 * sec)
	if len(drains) != 4 {
		t.Errorf("%d pairs of 4 were ever drained", len(drains))
	}
	// A lane that is lost meanwhile does not keep the others from their turn.
	q := m.p.pairs[0]
	m.run(sec, func() bool { return q.draining })
	for _, l := range append([]*laneState(nil), q.lanes...) {
		m.s.LaneDown(m.now, l.info.ID)
	}
	clear(drains)
	m.wait(2 * sec)
	if len(drains) < 3 {
		t.Errorf("%d pairs were drained after one lost its lanes in mid drain", len(drains))
	}
}

// A short message goes where it arrives soonest, and not over a pair that is out of use.
func TestQuickest(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(gbit, 100*time.Microsecond, 2)
	m.rail(gbit/50, 100*time.Microsecond, 2)
	if _, ok := m.s.Quickest(m.now, m.p, "shm"); ok {
		t.Error("a rail of a transport that is not there")
	}
	m.open(Background, 1<<30)
	for range 100 {
		m.wait(ms)
		if p, ok := m.s.Quickest(m.now, m.p, "tcp"); !ok || p.Local != "r0" {
			t.Fatalf("%v: %v, %v", m.now, p, ok)
		}
	}
	m.s.RailDown(m.now, nil, "tcp", "r0")
	if p, ok := m.s.Quickest(m.now, m.p, "tcp"); !ok || p.Local != "r1" {
		t.Errorf("the fast rail's link is down: %v, %v", p, ok)
	}
	m.s.RailDown(m.now, nil, "tcp", "r1")
	if p, ok := m.s.Quickest(m.now, m.p, "tcp"); ok {
		t.Errorf("both links are down: %v", p)
	}
}
