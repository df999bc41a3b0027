package spray

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/spray/internal/chunks"
	"github.com/kvspray/kvspray/transfer"
)

// check compares a scheduler with its invariants, computed from scratch.
func check(s *Scheduler, peers []*Peer, flows []*Flow) error {
	type sum struct {
		bytes   uint64
		passed  uint64
		flights int
	}
	lanes, pairs, all := map[*laneState]sum{}, map[*pair]sum{}, map[*Peer]sum{}
	hedged, copies, perFlow := map[*Peer]uint64{}, map[*Flow][]int{}, map[*Flow]int{}
	add := func(m sum, f *flight) sum {
		if f.progress == flightPassed {
			m.passed += f.bytes
		}
		return sum{m.bytes + f.bytes, m.passed, m.flights + 1}
	}
	live := 0
	for i := range s.flights {
		f := &s.flights[i]
		if f.progress == unused {
			continue
		}
		live++
		q := f.lane.pair
		lanes[f.lane], pairs[q], all[q.peer] = add(lanes[f.lane], f), add(pairs[q], f),
			add(all[q.peer], f)
		perFlow[f.flow]++
		if f.copy == hedgeCopy {
			hedged[q.peer] += f.bytes
		}
		if f.copy == probeCopy {
			continue
		}
		if copies[f.flow] == nil {
			copies[f.flow] = make([]int, f.flow.chunks.Len())
		}
		for c := f.r.First; c < f.r.End(); c++ {
			copies[f.flow][c]++
		}
	}
	if live != s.live || live+len(s.unused) != len(s.flights) {
		return fmt.Errorf("%d flights live, %d counted, %d unused of %d", live, s.live, len(s.unused),
			len(s.flights))
	}
	for l, v := range lanes {
		n, last := 0, int32(-1)
		for i := l.head; i >= 0; last, i = i, s.flights[i].next {
			f := &s.flights[i]
			if f.progress == unused || f.lane != l || f.prev != last ||
				last >= 0 && f.posted < s.flights[last].posted {
				return fmt.Errorf("lane %d: its list of flights is broken", l.info.ID)
			}
			if f.charged && f.progress < flightLate ||
				f.progress >= flightLate && last >= 0 && s.flights[last].progress < flightLate {
				return fmt.Errorf("lane %d: a slice is late before an older one, or passed and not late",
					l.info.ID)
			}
			n++
		}
		if l.inflight != v.bytes || l.passed != v.passed || l.flights != v.flights || n != v.flights ||
			l.tail != last || s.busy[l.busy] != l {
			return fmt.Errorf("lane %d: %d bytes (%d passed) and %d slices, its flights have %+v", l.info.ID,
				l.inflight, l.passed, l.flights, v)
		}
	}
	if len(s.busy) != len(lanes) {
		return fmt.Errorf("%d lanes are busy, %d counted", len(lanes), len(s.busy))
	}
	loads, turns := map[*egressQueue]uint64{}, map[*egressQueue]int{}
	for _, p := range peers {
		if p.flights != all[p].flights || p.hedged != hedged[p] {
			return fmt.Errorf("peer: %d slices, %d of hedges: counted %d and %d", all[p].flights, hedged[p],
				p.flights, p.hedged)
		}
		if p.flights > s.cfg.MaxFlights || p.hedged > MaxHedgeBytes+(1<<20) {
			return fmt.Errorf("peer: %d slices and %d bytes of hedges pass the bounds", p.flights, p.hedged)
		}
		probing, up := 0, 0
		for _, q := range p.pairs {
			var usable, stalled uint64
			flights, slots, kept, n := 0, 0, 0, 0
			for _, l := range q.lanes {
				up++
				if l.usable() {
					usable += l.inflight - l.passed
					flights += l.flights
					slots += l.info.MaxSlices
					kept += l.info.MaxSlices - l.limit(false)
					n++
				}
				if l.flights > l.info.MaxSlices {
					return fmt.Errorf("lane %d has %d slices of %d", l.info.ID, l.flights, l.info.MaxSlices)
				}
			}
			stalled = q.inflight - usable
			if q.inflight != pairs[q].bytes || q.stalled != stalled || q.live != n || q.flights != flights ||
				q.slots != slots ||
				q.kept != kept || (q.spare != nil) != (n > 1) || q.spare != nil && (!q.spare.usable() ||
				q.spare.pair != q) {
				return fmt.Errorf("pair %s: %d bytes (%d stalled), its flights have %+v (%d)", q.path,
					q.inflight, q.stalled, pairs[q], stalled)
			}
			if q.state == Probing {
				probing++
			}
			if o := q.out; o != nil {
				if o.counted != q.load() {
					return fmt.Errorf("pair %s: %d bytes move, %d counted at its local rail", q.path,
						q.load(), o.counted)
				}
				loads[o.egressQueue] += o.counted
				for prio := range numPriorities {
					if o.turn[prio].Queued() {
						turns[o.egressQueue]++
					}
				}
			}
			if q.draining != (p.draining == q) || q.draining && q.state > Readmitted {
				return fmt.Errorf("pair %s: draining %v, and the peer thinks otherwise, or it is %s", q.path,
					q.draining, q.state)
			}
			if !(q.bw > 0) || !(q.b0 >= 0) || !(q.b1 > 0) || q.window < transfer.ChunkBytes ||
				q.low > q.window || q.piece < transfer.ChunkBytes || q.piece > q.slice {
				return fmt.Errorf("pair %s learned an invalid value: rate %v, b0 %v, b1 %v, "+
					"window %d, slice %d",
					q.path, q.bw, q.b0, q.b1, q.window, q.piece)
			}
		}
		if probing != p.probing || up != p.lanes {
			return fmt.Errorf("peer: %d pairs on probe and %d lanes, counted %d and %d", probing, up,
				p.probing, p.lanes)
		}
		var backlog [numPriorities]int
		for prio := range p.queues {
			for i := range p.queues[prio].Len() {
				k, it := p.queues[prio].At(i)
				f := it.Value
				at := f.deadline
				if at == 0 {
					at = math.MaxInt64
				}
				if it != &f.queued || k.At != at || k.Seq != f.seq || int(f.prio) != prio || f.Waiting() == 0 ||
					f.stopped || f.parked {
					return fmt.Errorf("queue %d: wrong at %d", prio, i)
				}
				backlog[f.prio] += int(f.Waiting())
			}
		}
		if backlog != p.backlog {
			return fmt.Errorf("peer: %v chunks wait, %v counted", backlog, p.backlog)
		}
	}
	for n, e := range s.egresses {
		if e.load != loads[e] || e.waiting != turns[e] || e.pairs == 0 || !(e.bw > 0) ||
			e.cleared > e.posted {
			return fmt.Errorf("local rail %v: %d bytes and %d turns, its pairs have %d and %d; rate %v", n,
				e.load, e.waiting, loads[e], turns[e], e.bw)
		}
	}
	for _, f := range flows {
		if f.flights != perFlow[f] {
			return fmt.Errorf("flow: %d slices, counted %d", perFlow[f], f.flights)
		}
		for c := range f.chunks.Len() {
			k, fresh, again, recorded := f.chunks.State(c)
			landed := f.chunks.HasLanded(c)
			n := 0
			if copies[f] != nil {
				n = copies[f][c]
			}
			waits := fresh || again
			switch {
			// a flow that was stopped before its first failure has no records
			case int(k.Copies) != n && (!f.stopped || recorded):
				return fmt.Errorf("chunk %d: %d copies in flight, counted %d", c, n, k.Copies)
			case n > chunks.MaxCopies+1:
				return fmt.Errorf("chunk %d: %d copies", c, n)
			case fresh && (again || k.Attempt > 0), waits && landed, waits && f.stopped:
				return fmt.Errorf("chunk %d waits and must not: %+v, landed %v", c, k, landed)
			case !f.stopped && k.Attempt > 0 && !landed && !waits && n == 0:
				return fmt.Errorf("chunk %d is lost", c)
			}
		}
	}
	return nil
}

// declared reports whether every chunk of a new slice is in flight once, or again for a stated
// reason.
func declared(s *Scheduler, sl Slice) error {
	mine, _ := s.find(sl.Cookie)
	if (mine.copy == probeCopy) != (sl.Attempt == 0) {
		return fmt.Errorf("attempt %d and probe %v", sl.Attempt, mine.copy == probeCopy)
	}
	for i := range s.flights {
		f := &s.flights[i]
		if f.progress == unused || f == mine || f.copy == probeCopy || f.flow != sl.Flow ||
			f.r.First >= sl.Range.End() ||
			sl.Range.First >= f.r.End() {
			continue
		}
		if mine.copy != probeCopy && f.copy == soleCopy {
			return fmt.Errorf("chunks %+v are in flight as %+v, and were not declared doubled",
				sl.Range, f.r)
		}
	}
	for c := sl.Range.First; c < sl.Range.End(); c++ {
		if k := sl.Flow.state(c); sl.Attempt > 0 && uint32(k.Attempt) != sl.Attempt {
			return fmt.Errorf("chunk %d goes out as attempt %d, after %d", c, sl.Attempt, k.Attempt)
		}
	}
	return nil
}

// TestRandomOrders performs random events: lanes come and go, slices end in every way or not at
// all, flows stop.
func TestRandomOrders(t *testing.T) {
	runs := uint64(60)
	if testing.Short() {
		runs = 20
	}
	passed := 0
	for seed := range runs {
		passed += randomOrder(t, seed)
	}
	if passed < int(runs) {
		t.Errorf("in %d orders some slice was passed after %d steps: want more", runs, passed)
	}
}

// randomOrder returns the number of steps after which a passed slice was in flight.
func randomOrder(t *testing.T, seed uint64) (passed int) {
	rng := rand.New(rand.NewPCG(seed, 1))
	s := New(Config{MaxFlights: 1 + rng.IntN(100), Attempt: []Instant{0, 50 * ms}[seed%2]})
	peers := []*Peer{s.Peer(transfer.Boot{1}, nil), s.Peer(transfer.Boot{2}, nil)}
	now := Instant(rng.Int64N(int64(time.Hour)))
	type up struct {
		id uint64
		p  *Peer
	}
	var lanes []up
	var flows []*Flow
	var sent []Slice
	var last uint64
	fail := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("seed %d, at %v: %v", seed, now, err)
		}
	}
	laneUp := func() {
		last++
		p := peers[rng.IntN(2)]
		rail := fmt.Sprint(rng.IntN(4))
		fail(s.LaneUp(now, p, LaneInfo{ID: last, Path: Path{fmt.Sprint(rng.IntN(2)), rail, rail},
			Rank: rng.IntN(2), Tier: rng.IntN(4),
			Gbps: float64(rng.IntN(400)), SliceBytes: (1 + rng.IntN(16)) * transfer.ChunkBytes,
			MaxSlices: 1 + rng.IntN(8)}))
		lanes = append(lanes, up{last, p})
	}
	pull := func() {
		for again := true; again; again = s.Wake(now, func(*Peer) {}) {
			for _, p := range peers {
				for n := 0; ; n++ {
					sl, ok := s.Pull(now, p)
					if !ok {
						break
					}
					fail(declared(s, sl))
					sent = append(sent, sl)
					if n > 10000 {
						t.Fatalf("seed %d: pulls without end", seed)
					}
				}
			}
		}
		for _, p := range peers {
			// Nothing starves: if a lane has room, something is in flight.
			live := false
			for _, q := range p.pairs {
				live = live || q.live > 0
			}
			waits := p.waits(Background)
			for _, f := range s.resting {
				if f.peer == p && !f.parked {
					waits -= int(f.Waiting())
				}
			}
			turn := false // it waits for what others have in flight on the same rail
			for _, q := range p.pairs {
				for prio := range numPriorities {
					turn = turn || q.out != nil && q.out.turn[prio].Queued() && q.out.load > 0
				}
			}
			if live && waits > 0 && p.flights == 0 && !turn {
				t.Fatalf("seed %d: %d chunks wait beside idle lanes", seed, waits)
			}
		}
	}
	end := func(v Verdict) {
		i := rng.IntN(len(sent))
		sl := sent[i]
		sent = slices.Delete(sent, i, i+1)
		out, ok := s.End(now, sl.Cookie, v)
		if !ok || out.Flow != sl.Flow || out.Bytes != sl.Bytes {
			t.Fatalf("seed %d: slice %+v ended as %+v, %v", seed, sl, out, ok)
		}
		if _, again := s.End(now, sl.Cookie, v); again {
			t.Fatalf("seed %d: a slice ended twice", seed)
		}
		if out.Exhausted {
			sl.Flow.Close()
		}
		if v == Lost {
			s.LaneDown(now, sl.Lane)
			lanes = slices.DeleteFunc(lanes, func(u up) bool { return u.id == sl.Lane })
		}
	}
	for range 600 {
		switch n := rng.IntN(20); {
		case n < 2 && len(lanes) < 12:
			laneUp()
		case n == 2 && len(lanes) > 0 && rng.IntN(4) == 0:
			i := rng.IntN(len(lanes))
			s.LaneDown(now, lanes[i].id)
			lanes = slices.Delete(lanes, i, i+1)
		case n < 5 && len(flows) < 30:
			sp := space(t, uint64(1+rng.IntN(4<<20)), uint64(rng.IntN(4<<20)), 0, 4096)
			var deadline Instant
			if rng.IntN(4) == 0 {
				deadline = now + Instant(rng.Int64N(int64(10*sec)))
			}
			flows = append(flows, s.Open(peers[rng.IntN(2)], Priority(rng.IntN(4)), deadline, sp, nil))
		case n < 9 && len(flows) > 0:
			f := flows[rng.IntN(len(flows))]
			c := rng.Uint32N(f.space.NumChunks())
			f.Ready(transfer.Range{First: c, Count: rng.Uint32N(f.space.NumChunks()-c) +
				uint32(rng.IntN(2))})
		case n == 9 && len(flows) > 0 && rng.IntN(6) == 0:
			f := flows[rng.IntN(len(flows))]
			if f.Stop(); rng.IntN(2) == 0 {
				f.Close()
			}
		case n < 12:
			now += Instant(rng.Int64N(int64(100 * ms)))
			s.Tick(now, func(*Peer) {})
		case len(sent) > 0:
			now += Instant(rng.Int64N(int64(2 * ms)))
			end([]Verdict{Confirmed, Confirmed, Confirmed, Confirmed, Superseded, Failed, Refused, Lost,
				Dropped}[rng.IntN(9)])
		}
		pull()
		fail(check(s, peers, flows))
		if slices.ContainsFunc(s.busy, func(l *laneState) bool { return l.passed > 0 }) {
			passed++
		}
	}
	// From here on there are no faults, and everything that is not stopped arrives.
	laneUp()
	for _, p := range peers {
		if p.lanes == 0 {
			last++
			fail(s.LaneUp(now, p, LaneInfo{ID: last, Path: Path{"0", "a", "b"}, MaxSlices: 4}))
		}
	}
	for _, f := range flows {
		f.Ready(f.space.All())
		f.deadline = 0
	}
	for range 200000 {
		pull()
		if len(sent) > 0 {
			now += ms
			end(Confirmed)
			continue
		}
		if !s.Busy() {
			break
		}
		now += tickEvery
		s.Tick(now, func(*Peer) {})
	}
	fail(check(s, peers, flows))
	for i, f := range flows {
		if !f.stopped && !f.landed() {
			t.Fatalf("seed %d: flow %d did not arrive: %d chunks wait, %d slices in flight", seed, i,
				f.Waiting(), f.flights)
		}
	}
	return passed
}

// The same events give the same slices.
func TestDeterministic(t *testing.T) {
	trace := func() (out []string) {
		m := newModel(t, Config{})
		for _, r := range []float64{2, 1, 0.5} {
			m.rail(r*gbit, 100*time.Microsecond, 2)
		}
		m.pulled = func(sl Slice) {
			out = append(out, fmt.Sprint(m.now, sl.Lane, sl.Range, sl.Attempt, sl.Cookie))
		}
		f := m.open(LayerStream, 64<<20)
		m.run(100*ms, f.landed)
		m.links[1].set(func() { m.links[1].dead = true })
		m.run(sec, f.landed)
		return out
	}
	if a, b := trace(), trace(); !slices.Equal(a, b) {
		t.Errorf("%d and %d slices, not the same", len(a), len(b))
	}
}
