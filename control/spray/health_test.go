package spray

import (
	"strings"
	"testing"
	"time"
)

// The same with an excluded pair: a slice that never ends does not prevent the last resort.
func TestLastResortBesideAStuckSlice(t *testing.T) {
	s, p := solo(t, 1)
	f := flow(t, s, p, 64)
	for i, sl := range pullAll(s, p, 0) {
		if i > 0 {
			s.End(ms, sl.Cookie, Failed)
		}
	}
	if p.pairs[0].state != Excluded {
		t.Fatalf("the pair is %s", p.pairs[0].state)
	}
	confirmed(t, s, p, f, 0, nil)
}

// confirmed sends and confirms all chunks of f, from at on, each slice one tick after it was sent.
func confirmed(t *testing.T, s *Scheduler, p *Peer, f *Flow, at Instant, sent []Slice) {
	t.Helper()
	for ; f.Waiting() > 0 || len(sent) > 0; at += TickEvery {
		if at > 4*sec {
			t.Fatalf("%d chunks still wait", f.Waiting())
		}
		for _, sl := range sent {
			s.End(at, sl.Cookie, Confirmed)
		}
		s.Tick(at, func(*Peer) {})
		sent = pullAll(s, p, at)
	}
}

// If every pair is excluded, each is tried with one chunk at a time: there is no storm, and no
// transfer waits for a cooldown.
func TestLastResort(t *testing.T) {
	s, p := solo(t, 3)
	flow(t, s, p, 64)
	for _, q := range p.pairs {
		q.exclude(0, &s.cfg, "test")
	}
	used := map[uint64]bool{}
	for _, sl := range pullAll(s, p, ms) {
		if sl.Range.Count != 1 || used[sl.Lane] {
			t.Errorf("%+v, though its rail is excluded: want one chunk on each", sl)
		}
		used[sl.Lane] = true
		s.End(2*ms, sl.Cookie, Failed)
	}
	if len(used) != 3 {
		t.Errorf("%d of 3 excluded rails are tried while there is no other", len(used))
	}
	if err := check(s, []*Peer{p}, nil); err != nil {
		t.Error(err)
	}
}

// Estimates that are not used any more decay to neutral.
func TestDecayToNeutral(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(gbit/100, 100*time.Microsecond, 1, func(in *LaneInfo) { in.Gbps = 2 })
	m.move(1 << 20)
	q := m.p.pairs[0]
	learned := q.bw
	near(t, "learned", learned, gbit/100, 0.2)
	look := func(after Instant) float64 {
		m.wait(after)
		m.s.Pull(m.now, m.p)
		return q.bw
	}
	if v := look(4 * sec); v != learned {
		t.Errorf("after 4 s: %g, learned was %g", v, learned)
	}
	if v := look(6 * sec); v < 2*learned || v > gbit {
		t.Errorf("after 10 s: %g, learned was %g", v, learned)
	}
	near(t, "after a minute", look(51*sec), 2*gbit, 1e-9)
	if q.samples != 0 {
		t.Error("neutral, and still in use")
	}
}

// After 60 ms of silence a lane is suspect, and its chunks go elsewhere. The exclusion follows only
// because other pairs moved.
func TestSuspicionAndExclusionBySilence(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(gbit, 100*time.Microsecond, 1)
	m.rail(gbit, 100*time.Microsecond, 1)
	m.move(16 << 20)
	f := m.open(LayerStream, 3<<30)
	m.run(50*ms, f.landed)
	q := m.p.pairs[0]
	m.links[0].set(func() { m.links[0].dead = true })
	if d := m.run(sec, func() bool { return q.live == 0 }); d < DefaultSuspect-5*ms ||
		d > DefaultSuspect+2*TickEvery {
		t.Errorf("suspect after %v, want %v", d, DefaultSuspect)
	}
	if v := m.s.View(m.now).Pairs[0]; v.State != "suspect" || v.Suspect != 1 {
		t.Errorf("shown as %+v", v)
	}
	m.wait(DefaultExclude)
	if q.state != Excluded || !strings.Contains(q.reason, "other rails") {
		t.Errorf("%v (%s) after a second of silence beside a rail that moves", q.state, q.reason)
	}

	// The reason is still visible when the pair is healthy again.
	m.links[0].set(func() { m.links[0].dead = false })
	if m.run(2*sec, func() bool { return q.state == Healthy }) < 0 {
		t.Fatalf("%v: not back", q.state)
	}
	if v := m.s.View(m.now).Pairs[0]; v.Reason != "" || !strings.Contains(v.Last, "other rails") {
		t.Errorf("back, with the reason %q and the last one %q", v.Reason, v.Last)
	}
	m.links[0].set(func() { m.links[0].dead = true })
	m.wait(2 * DefaultExclude)

	// The other one becomes silent as well: no pair moves, so none is excluded.
	m.links[1].set(func() { m.links[1].dead = true })
	m.wait(5 * sec)
	if o := m.p.pairs[1]; o.state != Healthy || o.live != 0 {
		t.Errorf("the last rail is %v with %d usable lanes: want suspect, not excluded", o.state, o.live)
	}
}

// A rail that is silent for long is excluded once, not again and again while nothing could be sent
// on it. When it moves again, it is probed at once, and not after a cooldown that has doubled
// meanwhile.
func TestProgressEndsTheCooldown(t *testing.T) {
	m := newModel(t, Config{MaxCooldown: 20 * sec, Cooldown: 10 * sec})
	m.rail(gbit, 100*time.Microsecond, 1)
	m.rail(gbit, 100*time.Microsecond, 1)
	m.move(16 << 20)
	m.open(LayerStream, 4<<30-1<<20)
	m.wait(50 * ms)
	q, l := m.p.pairs[0], m.links[0]
	l.set(func() { l.dead = true })
	m.wait(15 * sec)
	if q.count.Exclusions != 1 || q.count.Probes != 0 || q.count.TimedOut != 0 {
		t.Fatalf("%d exclusions and %d probes of a rail that nothing could be tried on: want 1, 0",
			q.count.Exclusions, q.count.Probes)
	}
	// Once more, and the rail works again early in the present cooldown. Its slices in flight do not
	// count as late: the rail was silent.
	l.set(func() { l.dead = false })
	m.wait(200 * ms)
	if q.state != Healthy || q.count.TimedOut != 0 {
		t.Fatalf("%v (%s) 200 ms after it moved, %d slices timed out", q.state, q.reason,
			q.count.TimedOut)
	}
	l.set(func() { l.dead = true })
	m.wait(2 * sec)
	if q.state != Excluded || q.until < m.now+5*sec {
		t.Fatalf("%v until %v at %v: not what this test is about", q.state, q.until, m.now)
	}
	l.set(func() { l.dead = false })
	if d := m.run(sec, func() bool { return q.state == Healthy }); d > 100*ms {
		t.Errorf("in use again %v after it moved: %v", d, q.state)
	}
	// A rail whose slices fail moves as well, but has to wait for its cooldown.
	m.wait(10 * ms)
	q.exclude(m.now, &m.s.cfg, "checksums")
	until := q.until
	m.wait(100 * ms)
	if q.state != Excluded || q.until != until {
		t.Errorf("excluded for errors until %v: %v until %v after it moved", until, q.state, q.until)
	}
}

// A pause of this process of five seconds excludes no pair: the confirmations have arrived, and are
// not read yet.
func TestPauseOfTheProcessExcludesNoRail(t *testing.T) {
	s, p := solo(t, 2)
	f := flow(t, s, p, 640)
	now := Instant(0)
	var sent []Slice
	for range 20 {
		sent = append(sent, pullAll(s, p, now)...)
		now += 5 * ms
		s.Tick(now, func(*Peer) {})
		s.End(now, sent[0].Cookie, Confirmed)
		sent = sent[1:]
	}
	now += 5 * sec
	s.Tick(now, func(*Peer) {})
	for _, q := range p.pairs {
		if q.state != Healthy || q.live != 1 || q.count.TimedOut != 0 || q.count.Errors != 0 {
			t.Errorf("%s: %v, %d usable lanes, %d timeouts after our own sleep", q.path, q.state, q.live,
				q.count.TimedOut)
		}
	}
	// Silence after the pause counts.
	for range 30 {
		now += 5 * ms
		s.Tick(now, func(*Peer) {})
	}
	if p.pairs[0].live+p.pairs[1].live != 0 {
		t.Error("lanes that brought nothing for 150 ms are not suspect")
	}
	if err := check(s, []*Peer{p}, []*Flow{f}); err != nil {
		t.Error(err)
	}
}

// A slow rail is not considered silent, and packet loss that stops a rail for 200 ms now and then
// excludes no pair.
func TestNoFalseExclusion(t *testing.T) {
	m := newModel(t, Config{})
	m.rail(2*gbit, 100*time.Microsecond, 2)
	m.rail(5*mbit, 100*time.Microsecond, 2)
	var gap func()
	n := 0
	gap = func() {
		l := m.links[n%2]
		n++
		l.set(func() { l.dead = true })
		m.at(200*ms, func() {
			l.set(func() { l.dead = false })
			m.at(500*ms, gap)
		})
	}
	m.at(100*ms, gap)
	for m.now < 60*sec {
		m.move(128 << 20)
	}
	for _, v := range m.s.View(m.now).Pairs {
		if v.Counters.Exclusions != 0 {
			t.Errorf("%s was excluded %d times: %s", v.Path, v.Counters.Exclusions, v.Reason)
		}
	}
}
