package spray

import (
	"testing"
	"time"
)

// Flows that their only transport refuses do not delay a healthy flow, while they rest and while
// they are tried again.
func TestRefusedFlowsDoNotBlockOthers(t *testing.T) {
	const trip = 100 * time.Microsecond
	for _, n := range []int{3, 4, 16, 64} {
		s, p := solo(t, 1)
		m := &model{t: t, s: s, p: p, now: sec}
		refused := map[*Flow]int{} // slices in flight
		for range n {
			refused[flow(t, s, p, 64)] = 0
		}
		var good *Flow
		var first, limit Instant
		var pull func()
		end := func(sl Slice) {
			v := Confirmed
			if _, bad := refused[sl.Flow]; bad {
				v = Refused
				refused[sl.Flow]--
			}
			if out, _ := s.End(m.now, sl.Cookie, v); out.Exhausted {
				out.Flow.Close() // the executor does
				delete(refused, sl.Flow)
				refused[flow(t, s, p, 64)] = 0
			}
			pull()
		}
		pull = func() {
			for sl, ok := s.Pull(m.now, p); ok; sl, ok = s.Pull(m.now, p) {
				switch {
				case sl.Flow != good:
					refused[sl.Flow]++
					if sl.Flow.bad[0] >= badFlow && (sl.Range.Count > 1 || refused[sl.Flow] > 1) {
						t.Fatalf("%d chunks of a flow on trial, %d slices", sl.Range.Count, refused[sl.Flow])
					}
				case first < 0:
					first = m.now
				}
				m.at(trip, func() { end(sl) })
			}
		}
		var tick func()
		tick = func() { m.at(TickEvery, func() { s.Tick(m.now, func(*Peer) {}); pull(); tick() }) }
		tick()
		rest := func(d Instant) { pull(); m.wait(d) }
		rest(refusalRest / 2) // all have been refused as often as it takes
		for range 200 {
			good, first = flow(t, s, p, 1), -1
			from := m.now
			pull()
			m.run(sec, good.landed)
			if first < 0 || !good.landed() {
				t.Fatalf("%d refused flows: a healthy one does not end", n)
			}
			limit = max(limit, first-from)
			good.Close()
			rest(3 * ms) // while flows wake, are tried, exhausted, and come anew
		}
		t.Logf("%d refused flows: a healthy one has its first slice after %v at most", n, limit)
		if limit >= ms {
			t.Errorf("%d refused flows: a healthy one had its first slice after %v: want less than 1ms", n,
				limit)
		}
	}
}

// A transport that accepts a flow after all is used in full again.
func TestTrialThatLands(t *testing.T) {
	s, p := solo(t, 1)
	now := sec
	flow(t, s, p, 64)
	for range badFlow {
		for i, sl := range pullAll(s, p, now) {
			v := Dropped
			if i == 0 {
				v = Refused
			}
			now += ms
			s.End(now, sl.Cookie, v)
		}
	}
	if all := pullAll(s, p, now); len(all) != 0 || p.backlog != [numPriorities]int{} ||
		p.queues[LayerStream].Len() != 0 {
		t.Fatalf("rests, and is given %+v; %v chunks wait", all, p.backlog)
	}
	now += refusalRest
	s.Tick(now, func(*Peer) {})
	all := pullAll(s, p, now)
	if len(all) != 1 || all[0].Range.Count != 1 {
		t.Fatalf("after the rest it is tried with %+v: want one chunk", all)
	}
	s.End(now+ms, all[0].Cookie, Confirmed)
	if all = pullAll(s, p, now+ms); len(all) < 2 {
		t.Errorf("after a trial that landed it has %+v", all)
	}
}

// A flow whose trial hangs uses another transport that has come up meanwhile.
func TestTrialThatHangs(t *testing.T) {
	s, p := solo(t, 1)
	now := sec
	f := flow(t, s, p, 1)
	for range badFlow {
		for _, sl := range pullAll(s, p, now) {
			s.End(now, sl.Cookie, Refused)
		}
	}
	now += refusalRest
	s.Tick(now, func(*Peer) {})
	if all := pullAll(s, p, now); len(all) != 1 {
		t.Fatalf("not tried: %+v", all)
	}
	if err := s.LaneUp(now, p, LaneInfo{ID: 2, Path: Path{"other", "a", "b"}, Rank: 1,
		SliceBytes: 1 << 20, MaxSlices: 16}); err != nil {
		t.Fatal(err)
	}
	for end := now + 2*DefaultSuspect; now < end; now += tickEvery {
		s.Tick(now, func(*Peer) {})
		if all := pullAll(s, p, now); len(all) == 1 && all[0].Lane == 2 && all[0].Flow == f {
			return
		}
	}
	t.Error("the other transport has not been given what hangs")
}
