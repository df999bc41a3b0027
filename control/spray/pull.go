package spray

import (
	"math"

	"github.com/kvspray/kvspray/transfer"
)

// Pull returns the next slice for a lane to p. False: no chunk waits, or no window is open for
// those that wait. The caller calls it until it returns false, after every event.
func (s *Scheduler) Pull(now Instant, p *Peer) (Slice, bool) {
	if p.lanes == 0 || p.flights >= s.cfg.MaxFlights {
		return Slice{}, false
	}
	s.renew(now, p)
	if p.probing > 0 && p.flights > 0 {
		if out, ok := s.probe(now, p); ok {
			return out, true
		}
	}
	if p.waits(Background) == 0 {
		return s.hedge(now, p)
	}
	// Shares of lower priorities that are due.
	for prio := LayerStream; prio < numPriorities; prio++ {
		if p.owed[prio] >= shareQuantum && p.queues[prio].Len() > 0 {
			// With the room of urgent slices, which would leave none otherwise.
			if out, ok := s.serve(now, p, prio, true); ok {
				p.owed[prio] = max(0, p.owed[prio]-float64(out.Bytes))
				p.owe(prio, out.Bytes)
				return out, true
			}
		}
	}
	for prio := range numPriorities {
		if p.queues[prio].Len() == 0 || p.inTurns[prio] == len(p.pairs) {
			continue // all pairs are in turns: Wake finds the next one
		}
		if out, ok := s.serve(now, p, prio, prio == DecodeWaits); ok {
			p.owe(prio, out.Bytes)
			return out, true
		}
	}
	return Slice{}, false
}

// owe adds to the shares of the lower priorities that wait.
func (p *Peer) owe(prio Priority, bytes uint64) {
	for low := prio + 1; low < numPriorities; low++ {
		if p.queues[low].Len() > 0 {
			p.owed[low] = min(p.owed[low]+share[low]*float64(bytes), maxShareQuanta*shareQuantum)
		}
	}
}

// renew applies what time alone changes.
func (s *Scheduler) renew(now Instant, p *Peer) {
	if now < p.renewAt {
		return
	}
	p.renewAt = now + renewEvery
	for _, q := range p.pairs {
		q.decay(now)
		q.drain(now)
		if q.state == Excluded && now >= q.until {
			q.state, q.since = Probing, now
			p.probing++
		}
	}
}

// serve takes a slice from the first flows of one priority.
func (s *Scheduler) serve(now Instant, p *Peer, prio Priority, urgent bool) (Slice, bool) {
	closed := uint32(math.MaxUint32) // run length for which no pair had room, of a flow before
	for i := 0; i < min(p.queues[prio].Len(), scanFlows); i++ {
		f := p.queues[prio].flow(i)
		if f.deadline != 0 && now >= f.deadline {
			f.Stop()
			i--
			continue
		}
		run, avoid := f.chunks.Next(maxSliceChunks)
		if run.Count >= closed && !f.picky {
			continue
		}
		fresh := avoid == 0 && f.chunks.Retries() == 0
		q, limit, open := s.choose(now, p, f, run, avoid, urgent)
		if q == nil && avoid != 0 && f.chunks.Fresh() > 0 && !f.parked {
			// Failed chunks wait for another pair. Chunks that were never sent do not wait with them.
			fresh = true
			q, limit, open = s.choose(now, p, f, f.chunks.NextFresh(maxSliceChunks), 0, urgent)
		}
		if q == nil {
			switch {
			case f.parked:
				i--
			case !open && !f.picky:
				closed = min(closed, run.Count)
			}
			continue
		}
		l := q.pick(prio, urgent)
		if l == nil {
			continue
		}
		trial := f.class(q) >= MaxRanks // by a transport that refused the flow: one chunk at a time
		if trial {
			limit = 1
		}
		r, attempt := f.take(limit, fresh)
		if trial {
			f.park()
		}
		out := s.post(now, l, f, r, attempt)
		q = l.pair
		more := p.queues[prio].Len() > 0 && q.crowded() && q.room(q.cut(prio), prio, urgent)
		if more && !q.admits(now, prio, false) {
			s.await(q, prio) // else the next pull would do it
		}
		return out, true
	}
	return Slice{}, false
}

// choose returns the pair for the next slice of f, and its maximum of chunks; nil: none now. open
// is false if the reason is that no pair has room.
func (s *Scheduler) choose(now Instant, p *Peer, f *Flow, run transfer.Range, avoid uint16,
	urgent bool) (_ *pair, limit uint32, open bool) {
	c := s.rank(now, p, f, run, avoid, urgent)
	switch {
	case c.usable == 0 && c.resting:
		f.park()
		return nil, 0, true
	case c.usable == 0:
		return s.lastResort(p), 1, true
	case c.usable > 1 && c.best != nil && p.othersFinish(now, f, c, avoid):
		return nil, 0, true
	case c.best != nil:
		return c.best, uint32(c.best.cut(f.prio) / transfer.ChunkBytes), true
	// A pair that failed these chunks gets them again only if it is the only one.
	case c.avoided != nil && c.usable == 1:
		return c.avoided, uint32(c.avoided.cut(f.prio) / transfer.ChunkBytes), true
	// Late slices fill the window: one chunk tests whether the pair still moves.
	case c.full != nil && s.allLate(c.full):
		return c.full, 1, true
	}
	return nil, 0, c.avoided != nil
}

// ranking is what the usable pairs of the best class offer for a slice.
type ranking struct {
	class   int
	usable  int     // pairs of this class
	resting bool    // a pair that refused the flow is left out while it rests
	best    *pair   // with room, it would finish first
	score   float64 // of best
	avoided *pair   // with room, it failed these chunks
	full    *pair   // without room
}

// rank finds the best pair with room. Usually there is none, because the call after each slice that
// was given ends here.
func (s *Scheduler) rank(now Instant, p *Peer, f *Flow, run transfer.Range, avoid uint16,
	urgent bool) ranking {
	avail := uint64(run.Count) * transfer.ChunkBytes
	if run.Count == 1 {
		avail = f.space.ChunkBytes(run.First)
	}
	class, usable, resting, owed := 1<<30, 0, false, urgent && f.prio != DecodeWaits
	var best, avoided, full *pair
	var score float64
	for _, q := range p.pairs {
		if !q.usable() {
			continue
		}
		c := f.class(q)
		if c >= MaxRanks && f.rest != 0 {
			resting = true
			continue
		}
		if c > class {
			continue
		}
		if c < class {
			class, usable, best, avoided, full = c, 0, nil, nil, nil
		}
		usable++
		n := min(avail, q.cut(f.prio))
		if !q.room(n, f.prio, urgent) {
			full = q
			continue
		}
		if q.waitsTurn(f.prio, owed) || !q.admits(now, f.prio, owed) {
			s.await(q, f.prio)
			continue
		}
		if int(avoid) == q.index+1 {
			avoided = q
			continue
		}
		if v := q.score(now, n, f.at); best == nil || v < score {
			best, score = q, v
		}
	}
	return ranking{class, usable, resting, best, score, avoided, full}
}

// othersFinish reports, near the end, whether the other pairs finish all waiting work before the
// best one finishes this piece: it is then left to them. One of them has a slice in flight, whose
// end leads to the next call. The pair to avoid does not count.
func (p *Peer) othersFinish(now Instant, f *Flow, c ranking, avoid uint16) bool {
	var rate float64
	load, fixed, near, flying := uint64(0), maxB0, uint8(len(tierPenalty)-1), false
	for _, q := range p.pairs {
		if !q.usable() || f.class(q) != c.class || int(avoid) == q.index+1 {
			continue
		}
		near, fixed = min(near, q.tierAt(f.at)), min(fixed, q.b0)
		if q != c.best {
			rate += q.bw
			flying = flying || q.load() > 0
			load += q.ahead(now)
		}
	}
	others := fixed + (float64(load)+float64(p.waits(f.prio))*transfer.ChunkBytes)/rate
	// Being far costs only where something is nearer.
	return flying && c.score/tierPenalty[near] > tailSlack*others
}

// Quickest is the rail pair of a transport over which a short message reaches p soonest. It serves
// messages outside of this package's lanes that wait in the same queues. False: no pair is usable.
func (s *Scheduler) Quickest(now Instant, p *Peer, transport string) (Path, bool) {
	var best *pair
	var score float64
	for _, q := range p.pairs {
		if !q.usable() || q.path.Transport != transport {
			continue
		}
		if v := q.expectAt(now, 0); best == nil || v < score {
			best, score = q, v
		}
	}
	if best == nil {
		return Path{}, false
	}
	return best.path, true
}

// class orders the transports for one flow: those that keep refusing it are last.
func (f *Flow) class(q *pair) int {
	if f.picky && f.bad[q.rank] >= badFlow {
		return q.rank + MaxRanks
	}
	return q.rank
}

// lastResort is the excluded pair whose cooldown ends first, of those with nothing but late slices
// in flight. The peer has no other path.
func (s *Scheduler) lastResort(p *Peer) *pair {
	var found *pair
	for _, q := range p.pairs {
		if q.live > 0 && !q.down && (found == nil || q.until < found.until) && s.allLate(q) {
			found = q
		}
	}
	return found
}

// allLate reports whether all slices in flight on usable lanes are late.
func (s *Scheduler) allLate(q *pair) bool {
	for _, l := range q.lanes {
		for i := l.head; i >= 0 && l.usable(); i = s.flights[i].next {
			if s.flights[i].progress == onTime {
				return false
			}
		}
	}
	return true
}

// probe sends a copy of one chunk that is in flight elsewhere over a pair whose cooldown is over.
// As attempt 0 it takes the chunk from no other lane, however it ends.
func (s *Scheduler) probe(now Instant, p *Peer) (Slice, bool) {
	for _, q := range p.pairs {
		if q.state != Probing || q.live == 0 || q.load() > 0 {
			continue
		}
		l := q.pick(DecodeWaits, true)
		if l == nil {
			continue
		}
		for _, o := range p.pairs {
			if o == q || o.live == 0 {
				continue
			}
			for _, other := range o.lanes {
				if other.tail < 0 {
					continue
				}
				fl := &s.flights[other.tail]
				if fl.copy == probeCopy || fl.flow.stopped || fl.flow.class(q) > fl.flow.class(o)+MaxRanks {
					continue
				}
				q.count.Probes++
				return s.post(now, l, fl.flow, transfer.Range{First: fl.r.First, Count: 1}, 0), true
			}
		}
	}
	return Slice{}, false
}

// hedge sends a second copy of a slice that a better pair would deliver sooner, when no chunk
// waits. The budgets of flow and peer bound the cost.
func (s *Scheduler) hedge(now Instant, p *Peer) (Slice, bool) {
	if p.flights == 0 || p.hedged >= MaxHedgeBytes {
		return Slice{}, false
	}
	var best *pair
	var score float64
	for _, q := range p.pairs {
		if q.state == Healthy && q.live > 0 && q.room(transfer.ChunkBytes, LayerStream, false) {
			if v := q.score(now, transfer.ChunkBytes, 0); best == nil || v < score {
				best, score = q, v
			}
		}
	}
	if best == nil {
		return Slice{}, false
	}
	victim := int32(-1)
	var gain float64
	for _, q := range p.pairs {
		if q == best || q.rank < best.rank {
			continue
		}
		for _, l := range q.lanes {
			for i, n := l.tail, 0; i >= 0 && n < hedgeScan; i, n = s.flights[i].prev, n+1 {
				fl := &s.flights[i]
				f := fl.flow
				if fl.copy != soleCopy || f.stopped || f.prio == Background || f.hedges < int(fl.r.Count) ||
					f.bad[best.rank] >= badFlow ||
					f.deadline != 0 && now >= f.deadline {
					continue
				}
				left := remaining(now, fl)
				if left < hedgeFloor {
					continue
				}
				if g := float64(left) - hedgeGain*penalty(best.tierAt(f.at), q.tierAt(f.at))*best.expectAt(now,
					fl.bytes); g > gain {
					victim, gain = i, g
				}
			}
		}
	}
	if victim < 0 {
		return Slice{}, false
	}
	l := best.pick(LayerStream, false)
	if l == nil {
		return Slice{}, false
	}
	f, r := s.flights[victim].flow, s.flights[victim].r
	s.flights[victim].copy = doubledCopy
	f.hedges -= int(r.Count)
	best.count.Hedges++
	f.chunks.Detail()
	out := s.post(now, l, f, r, f.chunks.Send(r))
	fl, _ := s.find(out.Cookie)
	fl.copy = hedgeCopy
	p.hedged += fl.bytes
	return out, true
}

// remaining estimates the time until a slice ends: the rest of its prediction, and after that as
// long as the slice is late.
func remaining(now Instant, fl *flight) Instant {
	due := fl.posted + fl.forgiven + fl.predicted
	if now <= due {
		return due - now
	}
	return now - due
}
