// SPDX-License-Identifier: Apache-2.0

package spray

import (
	"slices"
	"time"

	"github.com/kvspray/kvspray/internal/heap"
)

// leaveWithin is how much may wait at a local rail before a slice of a priority is added, where
// several peers share the rail: a slice takes sliceTime or lowSliceTime more.
var leaveWithin = [numPriorities]Instant{spareTime, spareTime - sliceTime, lowSliceTime * 3 / 2}

// Times of the model of a local rail.
const (
	outSpan    = 8 * time.Millisecond    // its rate is measured over so long
	outHalf    = 5 * time.Second         // a rate that is not reached any more halves in so long
	probeEvery = 100 * time.Millisecond  // between two probes of a rail of which they find more
	probeRest  = 3200 * time.Millisecond // and at most, where they find nothing: each one doubles it
	probeSpan  = 12 * time.Millisecond
	probeSlack = sliceTime // what a probe may add to the queue before it has found nothing
)

// Numbers of the model of a local rail.
const (
	fullRail  = 0.9  // of its rate: where it moves that, it is what slices wait for
	probeGain = 1.25 // times its rate is sent for probeSpan
	probeWon  = 1.05 // times the rate found before: there may be still more
)

// egress is one local rail with what leaves over it, to all peers. Pairs that share it stand in one
// queue, which is that of the network card, so the prediction of a pair and what it may send follow
// from what all of them have in flight. A pair that is alone there is ruled by its own window only.
//
// What waits there follows from time: free is when the rail will have moved what was posted. It is
// brought to the truth by each confirmation of a slice that was posted after all others that were
// confirmed: what was posted before such a slice has left. Bytes that wait elsewhere, at a peer that
// is slow or stopped, therefore count no longer than the next confirmation of another peer.
//
// Pairs for which there is no room take turns, the more urgent before the less urgent, and among
// equals the one that was given the fewest bytes (start-time fair queueing).
type egress struct {
	load      uint64  // bytes in flight and believed to move, of all pairs
	posted    uint64  // bytes so far
	cleared   uint64  // of them, those posted up to the newest slice that was confirmed
	delivered uint64  // bytes confirmed
	delivAt   Instant // the last of them, or when the rail was idle last
	spanBytes uint64  // bytes confirmed since the last sample
	spanTime  Instant // and the time in which the rail was busy
	free      Instant
	bw        float64 // bytes per nanosecond
	full      bool    // it moved that, or nearly, when it was measured last
	probed    Instant // when it was tried last whether there is more
	probeGap  Instant // until it is tried again
	probing   bool
	samples   int
	sampled   Instant
	pairs     int

	waiting int  // pairs in turns
	listed  bool // in Scheduler.awaited
	turns   [numPriorities]heap.Heap[*pair]
	tag     [numPriorities]uint64  // of the slice that was given last
	flights [numPriorities]int     // slices in flight
	owed    [numPriorities]float64 // bytes, to lower priorities that wait here
}

// place is that of a pair at its egress.
type place struct {
	*egress
	counted uint64 // of egress.load
	tags    [numPriorities]uint64
	turn    [numPriorities]heap.Item[*pair]
}

// enter gives a pair its egress.
func (s *Scheduler) enter(q *pair, apart bool) {
	if apart || s.cfg.Policy != Spray {
		return
	}
	n := q.path.rail()
	e := s.egresses[n]
	if e == nil {
		e = &egress{bw: q.neutral}
		s.egresses[n] = e
	}
	e.pairs++
	q.out = &place{egress: e}
	for i := range q.out.turn {
		q.out.turn[i].Value = q
	}
}

// exit ends that. What the pair has in flight still ends there.
func (s *Scheduler) exit(q *pair) {
	if q.out == nil {
		return
	}
	e := q.out.egress
	for prio := range numPriorities {
		q.leaveTurn(prio)
	}
	if e.pairs--; e.pairs == 0 {
		delete(s.egresses, q.path.rail())
	}
}

// tally follows a change of what the pair has in flight.
func (q *pair) tally() {
	if q.out != nil {
		load := q.load()
		q.out.load += load - q.out.counted
		q.out.counted = load
	}
}

// crowded reports whether other pairs have something in flight over the same local rail, or wait
// for it.
func (q *pair) crowded() bool {
	return q.out != nil && (q.out.load > q.out.counted || q.out.waiting > 0)
}

// queue is how long what was posted on the local rail still takes to leave it.
func (e *egress) queue(now Instant) Instant {
	if e.load == 0 {
		return 0
	}
	return max(e.free-now, 0)
}

// ahead is what a slice finds before it: of this pair, or on the local rail.
func (q *pair) ahead(now Instant) uint64 {
	load := q.load()
	if q.crowded() {
		load = max(load, uint64(float64(q.out.queue(now))*q.out.bw))
	}
	return load
}

// admits reports whether a slice may be added to what waits at the local rail. owed: lower priorities
// of the same peer are, so that they go before what is more urgent.
func (q *pair) admits(now Instant, prio Priority, owed bool) bool {
	if !q.crowded() {
		return true
	}
	o := q.out
	if o.samples == 0 {
		// Nobody knows yet how fast it is. What is less urgent waits for that.
		for p := range prio {
			if o.flights[p] > 0 && !owed && o.load > o.counted {
				return false
			}
		}
		return true
	}
	if owed {
		return o.queue(now) < leaveWithin[DecodeWaits]
	}
	if o.owed[prio] >= shareQuantum {
		return o.queue(now) < leaveWithin[DecodeWaits] && o.first(prio, q)
	}
	if _, due := o.due(); due {
		return false
	}
	for p := range prio {
		if o.turns[p].Len() > 0 {
			return false
		}
	}
	return o.queue(now) < leaveWithin[prio] && o.first(prio, q)
}

// due is the priority that goes first because more urgent ones owe it that.
func (e *egress) due() (Priority, bool) {
	for prio := LayerStream; prio < numPriorities; prio++ {
		if e.owed[prio] >= shareQuantum && e.turns[prio].Len() > 0 {
			return prio, true
		}
	}
	return 0, false
}

// first reports whether no pair that waits comes before q.
func (e *egress) first(prio Priority, q *pair) bool {
	if e.turns[prio].Len() == 0 {
		return true
	}
	k, it := e.turns[prio].At(0)
	return it.Value == q || q.out.next(prio) <= uint64(k.At)
}

// next is the tag of the pair's next slice.
func (o *place) next(prio Priority) uint64 { return max(o.tags[prio], o.tag[prio]) }

// await has the pair wait for the local rail.
func (s *Scheduler) await(q *pair, prio Priority) {
	o := q.out
	if o == nil || o.turn[prio].Queued() {
		return
	}
	s.seq++ // of pairs with the same tag, the one that has waited longest comes first
	o.turns[prio].Set(&o.turn[prio], heap.Key{At: time.Duration(o.next(prio)), Seq: s.seq})
	q.peer.inTurns[prio]++
	if o.waiting++; !o.listed {
		o.listed = true
		s.awaited = append(s.awaited, o.egress)
	}
}

// waitsTurn reports whether the pair stands in turns already. Then Wake alone says when it is its
// turn, so that nothing has to be looked at again for each event at its peer.
func (q *pair) waitsTurn(prio Priority, owed bool) bool {
	return q.out != nil && !owed && q.out.turn[prio].Queued()
}

func (q *pair) leaveTurn(prio Priority) {
	if o := q.out; o.turn[prio].Queued() {
		o.turns[prio].Remove(&o.turn[prio])
		o.waiting--
		q.peer.inTurns[prio]--
	}
}

// Wake calls touched for a peer whose turn has come at each local rail that has room, and reports
// whether there was one. Pull is called for the peers; then Wake again, until it reports false. It
// belongs after every event that may have ended a slice, and after Tick.
func (s *Scheduler) Wake(now Instant, touched func(*Peer)) (woken bool) {
	for i := 0; i < len(s.awaited); i++ {
		e := s.awaited[i]
		if e.waiting == 0 {
			e.listed = false
			s.awaited = slices.Delete(s.awaited, i, i+1)
			i--
			continue
		}
		if e.samples > 0 && e.queue(now) >= leaveWithin[DecodeWaits] {
			continue // room for nobody
		}
		turn, due := e.due()
		for ; !due && turn < numPriorities; turn++ {
			due = e.turns[turn].Len() > 0
			if due {
				break
			}
		}
		if !due {
			continue
		}
		_, it := e.turns[turn].At(0)
		if q := it.Value; q.admits(now, turn, false) {
			q.leaveTurn(turn)
			touched(q.peer)
			woken = true
		}
	}
	return woken
}

// leaves counts a slice that was posted. The pair has its turn behind it.
func (q *pair) leaves(now Instant, fl *flight) {
	o := q.out
	if o == nil {
		return
	}
	if o.load == 0 {
		o.delivAt = now
		if o.samples > 0 && now-o.sampled >= neutralAfter {
			o.samples, o.bw = 0, q.neutral
		}
	}
	fl.outDelivered, fl.outBegin = o.delivered, o.delivAt
	fl.outBusy = float64(o.load) > o.bw*float64(q.least())+float64(q.cut(fl.flow.prio))
	o.posted += fl.bytes
	fl.mark = o.posted
	prio := fl.flow.prio
	if o.probing && (prio == DecodeWaits || now-o.probed >= probeSpan) {
		o.probing = false // what is urgent does not wait behind a probe
	}
	rate := o.bw
	if o.probing {
		rate *= probeGain
	}
	o.free = max(o.free, now) + Instant(float64(fl.bytes)/rate)
	fl.outLeft = o.free
	o.flights[prio]++
	o.tag[prio] = o.next(prio)
	o.tags[prio] = o.tag[prio] + fl.bytes
	q.leaveTurn(prio)
	if o.owed[prio] > 0 {
		o.owed[prio] -= float64(fl.bytes) // what is too much is kept from the next share
	}
	for low := prio + 1; low < numPriorities; low++ {
		if o.turns[low].Len() > 0 {
			o.owed[low] = min(o.owed[low]+share[low]*float64(fl.bytes), maxShareQuanta*shareQuantum)
		}
	}
}

// left takes the confirmation of a slice, and returns at what rate the local rail moved all that
// left it meanwhile; 0: the slice tells nothing of that, for it came late or found the rail idle.
func (q *pair) left(now Instant, fl *flight) (rate float64) {
	o := q.out
	if o == nil || fl.mark == 0 {
		return 0
	}
	o.delivered += fl.bytes
	o.learn(now, fl.bytes)
	if fl.mark <= o.cleared {
		return 0 // others that were posted later have arrived: what held it up was not the local rail
	}
	o.cleared = fl.mark
	trip := q.trip(o.bw)
	// A rail that moves less than it can has no queue, and what is late there waits at the peers.
	free := now - trip + Instant(float64(o.posted-o.cleared)/o.bw)
	if o.probing && free > o.free+probeSlack {
		// More was sent and nothing more has come: the rail is full.
		o.probing, o.probeGap = false, min(2*o.probeGap, probeRest)
	}
	if o.full && !o.probing || free < o.free {
		o.free = free
	}
	alone := o.delivered-fl.outDelivered == q.delivered-fl.delivered
	if !fl.outBusy || alone || now-trip-fl.posted > 2*(fl.outLeft-fl.posted) {
		return 0
	}
	rate = float64(o.delivered-fl.outDelivered) / float64(max(now-fl.outBegin, time.Microsecond))
	return min(max(rate, smallest), maxClaim)
}

// learn follows the rate of the rail: the most that was confirmed in outSpan of the time in which it
// was busy, and less from then on, until as much comes again.
func (e *egress) learn(now Instant, bytes uint64) {
	e.spanTime += now - e.delivAt
	e.spanBytes += bytes
	e.delivAt = now
	if e.spanTime < outSpan {
		return
	}
	rate := min(max(float64(e.spanBytes)/float64(e.spanTime), smallest), maxClaim)
	if e.samples > 0 {
		rate = max(rate, e.bw*max(0, 1-float64(e.spanTime)/float64(2*outHalf)))
	}
	if rate > probeWon*e.bw || e.probeGap == 0 {
		e.probeGap = probeEvery
	}
	e.full = float64(e.spanBytes) >= fullRail*rate*float64(e.spanTime)
	e.bw, e.samples, e.sampled = rate, min(e.samples+1, 1<<20), now
	e.spanTime, e.spanBytes = 0, 0
	if e.full && e.waiting > 0 && e.turns[DecodeWaits].Len() == 0 && now-e.probed >= e.probeGap {
		e.probing, e.probed = true, now
	}
}

// trip is the least time from when a slice has left the local rail to its confirmation.
func (q *pair) trip(rate float64) Instant {
	d, bytes := q.lat[0], q.latBytes[0]
	if d == 0 || q.lat[1] != 0 && q.lat[1] < d {
		d, bytes = q.lat[1], q.latBytes[1]
	}
	if d == 0 {
		d = q.way
	}
	return max(d-min(Instant(float64(bytes)/rate), sliceTime), 0)
}
