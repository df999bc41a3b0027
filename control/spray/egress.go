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
	outSpan    = 16 * time.Millisecond   // its rate is measured over so long
	outHalf    = time.Second             // a rate that is not reached any more halves in so long
	probeEvery = 100 * time.Millisecond  // between two probes of a rail of which they find more
	probeRest  = 3200 * time.Millisecond // at most, where they find nothing
	probeSpan  = 12 * time.Millisecond
	probeLook  = 3 * time.Millisecond // in each of these a probe is judged by what is least late
	outLate    = spareTime            // a slice that waited for the rail may be late by
	outSlack   = sliceTime / 4        // what is less late than that says nothing of a queue
)

// Numbers of the model of a local rail.
const (
	fullRail  = 0.9   // of its rate: where it moves that, it is what slices wait for
	outSlices = 16    // of which its rate is measured at least
	outWeight = 0.5   // of the newest sample
	probeGain = 1.125 // times its rate is sent for probeSpan
	// of what the rail moves meanwhile, which must be posted for a probe to count. More would be
	// better evidence, but on paths longer than probeSpan too few probes would raise a rate that is
	// too low.
	probeLeast = 0.5
)

// egressQueue is one local rail with what leaves over it, to all peers. Pairs that share it stand in one
// queue, which is that of the network card, so the prediction of a pair and what it may send follow
// from what all of them have in flight. A pair that is alone there is ruled by its own window only.
//
// What waits there follows from time: free is when the rail will have moved what was posted. The
// confirmations of slices that were posted after all others that were confirmed bring it to the
// truth: what was posted before such a slice has left. Bytes that wait elsewhere, at a peer that is
// slow or stopped, therefore count no longer than the next confirmation of another peer. A
// confirmation that is early is the truth. One that is late may have waited at its peer, or for one
// of two processes to run; so what all of them in a span are late by, the least, is what the rail
// was longer busy.
//
// The rate of the rail is what was confirmed in a span in which it was the rail that slices waited
// for. Bursts of confirmations say nothing: of a rate that is believed too high no pair waits, and
// what is urgent finds every other pair's window in front of it.
//
// Pairs for which there is no room take turns, the more urgent before the less urgent, and among
// equals the one that was given the fewest bytes (start-time fair queueing).
type egressQueue struct {
	load      uint64  // bytes in flight and believed to move, of all pairs
	posted    uint64  // bytes so far
	cleared   uint64  // of them, those posted up to the newest slice that was confirmed
	delivered uint64  // bytes confirmed
	delivAt   Instant // the last of them, or when the rail was idle last
	spanBytes uint64  // bytes confirmed since the last sample
	spanTime  Instant // and the time in which the rail was busy
	spanCount int     // and slices
	spanDry   int     // of them, those that found no queue, left none, and were not late
	late      Instant // the least that a confirmation was late by since; never: there was none
	free      Instant
	bw        float64 // bytes per nanosecond
	probing   bool    // more is sent than that
	probed    Instant // when that began last
	probeGap  Instant // until it begins again
	probeFrom uint64  // posted then
	looked    Instant // at the probe last
	lookLate  Instant // as late, since then
	samples   int
	sampled   Instant
	pairs     int
	alone     *pair // the only one that there ever was; nil: there are several, or were

	waiting int  // pairs in turns
	listed  bool // in Scheduler.awaited
	turns   [numPriorities]heap.Heap[*pair]
	tag     [numPriorities]uint64  // of the slice that was given last
	flights [numPriorities]int     // slices in flight
	owed    [numPriorities]float64 // bytes, to lower priorities that wait here
}

// egressTurn is that of a pair at its egress.
type egressTurn struct {
	*egressQueue
	counted  uint64 // of egress.load
	tags     [numPriorities]uint64
	turn     [numPriorities]heap.Item[*pair]
	meanTrip Instant // from when a slice has left to its confirmation, the mean; see trip
	tripped  bool    // that is known
}

// enter gives a pair its egress. As long as the pair is alone there, nothing is counted.
func (s *Scheduler) enter(q *pair, apart bool) {
	if q.apart = apart || s.cfg.Policy != Spray; q.apart {
		return
	}
	n := q.path.rail()
	e := s.egresses[n]
	if e == nil {
		e = &egressQueue{bw: q.neutral, late: never, probeGap: probeEvery, pairs: 1, alone: q}
		s.egresses[n] = e
		return
	}
	if e.alone != nil {
		if e.alone.samples > 0 {
			e.bw = e.alone.bw
		}
		e.share(e.alone)
		e.alone = nil
	}
	e.pairs++
	e.share(q)
}

// share gives a pair its place beside others.
func (e *egressQueue) share(q *pair) {
	q.out = &egressTurn{egressQueue: e}
	for i := range q.out.turn {
		q.out.turn[i].Value = q
	}
	q.tally()
}

// exit ends that. What the pair has in flight still ends there.
func (s *Scheduler) exit(q *pair) {
	if q.apart {
		return
	}
	n := q.path.rail()
	e := s.egresses[n]
	if q.out != nil {
		for prio := range numPriorities {
			q.leaveTurn(prio)
		}
	}
	if e.alone == q {
		e.alone = nil
	}
	if e.pairs--; e.pairs == 0 {
		delete(s.egresses, n)
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
func (e *egressQueue) queue(now Instant) Instant {
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

// admits reports whether a slice may be added to what waits at the local rail. owed: lower
// priorities of the same peer are, so that they go before what is more urgent.
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
func (e *egressQueue) due() (Priority, bool) {
	for prio := LayerStream; prio < numPriorities; prio++ {
		if e.owed[prio] >= shareQuantum && e.turns[prio].Len() > 0 {
			return prio, true
		}
	}
	return 0, false
}

// first reports whether no pair that waits comes before q.
func (e *egressQueue) first(prio Priority, q *pair) bool {
	if e.turns[prio].Len() == 0 {
		return true
	}
	k, it := e.turns[prio].At(0)
	return it.Value == q || q.out.next(prio) <= uint64(k.At)
}

// next is the tag of the pair's next slice.
func (o *egressTurn) next(prio Priority) uint64 { return max(o.tags[prio], o.tag[prio]) }

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
		s.awaited = append(s.awaited, o.egressQueue)
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
	if fl.rail.clean = o.load == 0; fl.rail.clean {
		o.delivAt = now
		if o.samples > 0 && now-o.sampled >= neutralAfter {
			o.samples, o.bw = 0, q.neutral
		}
	}
	fl.rail.delivered = o.delivered
	fl.rail.busy = float64(o.load) > o.bw*float64(q.least())+float64(q.cut(fl.flow.prio))
	o.posted += fl.bytes
	fl.rail.mark = o.posted
	prio := fl.flow.prio
	if o.probing && prio == DecodeWaits {
		o.probing = false // what is urgent does not wait behind a probe
	}
	rate := o.bw
	if o.probing {
		rate *= probeGain
	}
	o.free = max(o.free, now) + Instant(float64(fl.bytes)/rate)
	fl.rail.leaves = o.free
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

// left takes the confirmation of a slice, and returns the rate of the local rail if that is what
// the slice waited for; 0: it came late, or found the rail idle.
func (q *pair) left(now Instant, fl *flight) (rate float64) {
	o := q.out
	if o == nil || fl.rail.mark == 0 {
		return 0
	}
	o.delivered += fl.bytes
	if fl.rail.clean {
		took := max(now-fl.posted-Instant(float64(fl.bytes)/o.bw), 0)
		if d := q.leastTrip(o.bw); d > 0 {
			took = min(took, d+outLate) // one late confirmation is no longer path
		}
		if o.tripped {
			took = Instant(ewma(float64(o.meanTrip), float64(took), alpha))
		}
		o.meanTrip, o.tripped = took, true
	}
	trip := q.trip(o.bw)
	newest := fl.rail.mark > o.cleared // else later ones have arrived: it waited elsewhere
	if newest {
		o.cleared = fl.rail.mark
		late := now - trip + Instant(float64(o.posted-o.cleared)/o.bw) - o.free
		if late < 0 {
			o.free += late
			late = 0
		}
		o.late, o.lookLate = min(o.late, late), min(o.lookLate, late)
	}
	late := now-trip-fl.posted > 2*(fl.rail.leaves-fl.posted+outLate)
	if !late && !fl.rail.busy && o.waiting == 0 && q.peer.waits(Background) == 0 {
		o.spanDry++
	}
	o.learn(now, fl.bytes)
	alone := o.delivered-fl.rail.delivered == q.delivered-fl.path.delivered
	if !newest || o.samples == 0 || !fl.rail.busy || alone || late {
		return 0
	}
	return o.bw
}

// learn follows the rate of the rail, and what waits there.
func (e *egressQueue) learn(now Instant, bytes uint64) {
	e.spanTime += now - e.delivAt
	e.spanBytes += bytes
	e.spanCount++
	e.delivAt = now
	if e.probing {
		e.judge(now)
	}
	if e.spanTime < outSpan || e.spanCount < outSlices {
		return
	}
	rate := min(max(float64(e.spanBytes)/float64(e.spanTime), smallest), maxClaim)
	late := e.late
	if late == never {
		late = 0
	}
	full := rate >= fullRail*e.bw
	dry := 2*e.spanDry > e.spanCount // the rail waited for slices, and could have moved more
	switch {
	case dry && rate <= e.bw:
		e.restart()
		return
	case e.samples == 0:
		e.bw = rate
	case e.probing:
	case rate > e.bw:
		e.bw = ewma(e.bw, rate, outWeight)
	default:
		e.bw = max(rate, e.bw*max(0, 1-float64(e.spanTime)/float64(2*outHalf)))
	}
	if full {
		// A rail that moves less than it can has no queue: what is late waits at the peers.
		e.free += late
	}
	e.samples, e.sampled = min(e.samples+1, 1<<20), now
	e.restart()
	wanted := e.waiting > 0 && e.turns[DecodeWaits].Len() == 0
	if full && wanted && !e.probing && now-e.probed >= e.probeGap {
		e.probing, e.probed, e.probeFrom = true, now, e.posted
		e.looked, e.lookLate = now, never
	}
}

func (e *egressQueue) restart() {
	e.spanTime, e.spanBytes, e.spanCount, e.spanDry, e.late = 0, 0, 0, 0, never
}

// judge ends a probe: more was sent than the rail is believed to move. Where the ends of the peers
// are what limits a rail, its rate is only what they took; it is found out so that they take more.
func (e *egressQueue) judge(now Instant) {
	switch {
	case now-e.looked >= probeLook && e.lookLate != never:
		if e.lookLate > outSlack {
			// Nothing more has come, and what was added waits.
			e.free += e.lookLate
			e.late = 0
			e.probing, e.probeGap = false, min(2*e.probeGap, probeRest)
			return
		}
		e.looked, e.lookLate = now, never
	}
	if now-e.probed < probeSpan {
		return
	}
	e.probing = false
	if float64(e.posted-e.probeFrom) < probeLeast*e.bw*float64(now-e.probed) {
		return // too little was posted: nothing could be late
	}
	e.probeGap = probeEvery
	e.bw = min(e.bw*probeGain, maxClaim)
	e.restart()
}

// trip is the time from when a slice has left the local rail to its confirmation: the mean of
// slices that found the rail idle, or else leastTrip. The mean includes the time in which the two
// processes wait for a processor, and exceeds leastTrip by outLate at most.
func (q *pair) trip(rate float64) Instant {
	d := q.leastTrip(rate)
	switch o := q.out; {
	case !o.tripped:
		return d
	case d == 0:
		return o.meanTrip // nothing else is known
	default:
		return min(max(d, o.meanTrip), d+outLate)
	}
}

// leastTrip is the RTT of when the lanes came up, or the least delay that was seen without the time
// of its slice on the wire, whichever is longer; 0: unknown.
func (q *pair) leastTrip(rate float64) Instant {
	d, bytes := q.lat[0], q.latBytes[0]
	if d == 0 || q.lat[1] != 0 && q.lat[1] < d {
		d, bytes = q.lat[1], q.latBytes[1]
	}
	return max(d-min(Instant(float64(bytes)/rate), sliceTime), q.rtt, 0)
}
