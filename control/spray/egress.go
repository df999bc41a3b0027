package spray

import (
	"slices"
	"time"

	"github.com/kvspray/kvspray/internal/heap"
)

// leaveWithin is the longest queue at a shared local rail to which a slice of each priority may be
// added. The slice itself adds sliceTime or lowSliceTime.
var leaveWithin = [numPriorities]Instant{spareTime, spareTime - sliceTime, lowSliceTime * 3 / 2}

// Times of the model of a local rail.
const (
	outSpan    = 16 * time.Millisecond   // busy time of one rate sample
	outHalf    = time.Second             // half-life of a rate that is no longer reached
	probeEvery = 100 * time.Millisecond  // between two probes, after one that succeeded
	probeRest  = 3200 * time.Millisecond // the same after many that failed, at most
	probeSpan  = 12 * time.Millisecond   // duration of a probe
	probeLook  = 3 * time.Millisecond    // a probe is judged once in each of these
	outLate    = spareTime               // tolerated lateness of a slice that waited for the rail
	outSlack   = sliceTime / 4           // lateness up to this is no sign of a queue
)

// Numbers of the model of a local rail.
const (
	fullRail  = 0.9   // part of its rate from which a rail counts as full
	outSlices = 16    // slices of one rate sample, at least
	outWeight = 0.5   // of the newest sample
	probeGain = 1.125 // a probe sends this multiple of the rate
	// Part of the rate that must be posted for a probe to count. A larger part would be better
	// evidence, but on paths longer than probeSpan too few probes would raise a rate that is too low.
	probePart = 0.5
)

// egressQueue models the queue in front of one local rail, to all peers. Pairs that share the rail
// share the queue of its network card. Therefore the prediction of a pair, and what it may send,
// follow from the bytes in flight of all of them. A pair that is alone at a rail is limited by its
// own window only.
//
// Length of the queue: free is the time when the rail will have moved everything that was posted.
// Confirmations correct it. A slice that was posted after all slices confirmed so far proves that
// everything posted before it has left the rail. Bytes that wait at a slow peer therefore count
// only until the next confirmation of another peer. An early confirmation is believed. A late one
// may have waited at its peer, or for one of the two processes to run; so only the smallest
// lateness of a span is added to the queue.
//
// Rate of the rail: bytes confirmed per busy time, over spans. A span lowers the rate only if the
// rail limited its slices (spanDry). Single bursts of confirmations are ignored: if the rate is
// believed too high, no pair waits, and urgent slices queue behind the windows of all other pairs.
//
// Pairs without room take turns: higher priorities first, and among equals the pair that was given
// the fewest bytes (start-time fair queueing).
type egressQueue struct {
	load      uint64  // bytes in flight of all pairs, without stalled ones
	posted    uint64  // bytes so far
	cleared   uint64  // of them, those posted up to the newest slice that was confirmed
	delivered uint64  // bytes confirmed
	delivAt   Instant // last confirmation, or last post at an idle rail
	spanBytes uint64  // bytes confirmed in this span
	spanTime  Instant // busy time of this span
	spanCount int     // slices confirmed in this span
	spanDry   int     // of them, those that found no queue, left nothing waiting, and were not late
	late      Instant // least lateness of a confirmation in this span; never: there was none
	free      Instant // when the rail will have moved everything that was posted
	bw        float64 // bytes per nanosecond
	probing   bool    // more than that rate is sent
	probed    Instant // begin of the last probe
	probeGap  Instant // until the next probe may begin
	probeFrom uint64  // posted when the probe began
	looked    Instant // begin of the current probeLook
	lookLate  Instant // least lateness since then
	samples   int     // of bw
	sampled   Instant // the last of them
	pairs     int
	alone     *pair // the only pair there has ever been; nil: there are, or were, several

	waiting int  // pairs in turns
	listed  bool // in Scheduler.awaited
	turns   [numPriorities]heap.Heap[*pair]
	tag     [numPriorities]uint64  // of the last slice given
	flights [numPriorities]int     // slices in flight
	owed    [numPriorities]float64 // bytes, to lower priorities that wait here
}

// egressTurn is the place of a pair in its egress queue.
type egressTurn struct {
	*egressQueue
	counted  uint64                // part of egressQueue.load
	tags     [numPriorities]uint64 // of the pair's next slices
	turn     [numPriorities]heap.Item[*pair]
	meanTrip Instant // mean time from leaving the rail to the confirmation; see trip
	tripped  bool    // meanTrip is known
}

// enter adds a pair to the queue of its local rail. While a pair is alone there, nothing is
// counted.
func (s *Scheduler) enter(q *pair, apart bool) {
	if q.apart = apart; q.apart {
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

// share starts to count a pair in a queue that several pairs share.
func (e *egressQueue) share(q *pair) {
	q.out = &egressTurn{egressQueue: e}
	for i := range q.out.turn {
		q.out.turn[i].Value = q
	}
	q.tally()
}

// exit removes a pair. Its slices in flight still end in this queue.
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

// tally brings egressQueue.load up to date with the pair's bytes in flight.
func (q *pair) tally() {
	if q.out != nil {
		load := q.load()
		q.out.load += load - q.out.counted
		q.out.counted = load
	}
}

// crowded reports whether other pairs have bytes in flight over the same local rail, or wait for
// it.
func (q *pair) crowded() bool {
	return q.out != nil && (q.out.load > q.out.counted || q.out.waiting > 0)
}

// queue is the time until everything posted on the rail will have left it.
func (e *egressQueue) queue(now Instant) Instant {
	if e.load == 0 {
		return 0
	}
	return max(e.free-now, 0)
}

// ahead is the number of bytes before a new slice: of this pair, or in the egress queue.
func (q *pair) ahead(now Instant) uint64 {
	load := q.load()
	if q.crowded() {
		load = max(load, uint64(float64(q.out.queue(now))*q.out.bw))
	}
	return load
}

// admits reports whether the pair may add a slice to the egress queue. owed: the slice is part of
// the share of a lower priority of this peer, which precedes higher ones.
func (q *pair) admits(now Instant, prio Priority, owed bool) bool {
	if !q.crowded() {
		return true
	}
	o := q.out
	if o.samples == 0 {
		// The rate is unknown. Lower priorities wait until it is known.
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

// due is the priority that precedes higher ones because its share is due.
func (e *egressQueue) due() (Priority, bool) {
	for prio := LayerStream; prio < numPriorities; prio++ {
		if e.owed[prio] >= shareQuantum && e.turns[prio].Len() > 0 {
			return prio, true
		}
	}
	return 0, false
}

// first reports whether no waiting pair precedes q.
func (e *egressQueue) first(prio Priority, q *pair) bool {
	if e.turns[prio].Len() == 0 {
		return true
	}
	k, it := e.turns[prio].At(0)
	return it.Value == q || q.out.next(prio) <= uint64(k.At)
}

// next is the tag of the pair's next slice.
func (o *egressTurn) next(prio Priority) uint64 { return max(o.tags[prio], o.tag[prio]) }

// await queues the pair for its turn at the local rail.
func (s *Scheduler) await(q *pair, prio Priority) {
	o := q.out
	if o == nil || o.turn[prio].Queued() {
		return
	}
	s.seq++ // of pairs with the same tag, the one that has waited longest is first
	o.turns[prio].Set(&o.turn[prio], heap.Key{At: time.Duration(o.next(prio)), Seq: s.seq})
	q.peer.inTurns[prio]++
	if o.waiting++; !o.listed {
		o.listed = true
		s.awaited = append(s.awaited, o.egressQueue)
	}
}

// waitsTurn reports whether the pair is queued already. Then only Wake ends its wait, so that an
// event at its peer needs no new check.
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

// Wake calls touched for the peer whose turn it is at each local rail with room, and reports
// whether there was one. The caller then calls Pull for these peers and Wake again, until Wake
// reports false. It calls Wake after Tick and after every event that may have ended a slice.
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
			continue // no priority has room
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

// leaves counts a posted slice, and ends the pair's turn.
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
	fl.rail.busy = float64(o.load) > o.bw*float64(q.minDelay())+float64(q.cut(fl.flow.prio))
	o.posted += fl.bytes
	fl.rail.mark = o.posted
	prio := fl.flow.prio
	if o.probing && prio == DecodeWaits {
		o.probing = false // an urgent slice does not queue behind a probe
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
		o.owed[prio] -= float64(fl.bytes) // the excess is taken from the next share
	}
	for low := prio + 1; low < numPriorities; low++ {
		if o.turns[low].Len() > 0 {
			o.owed[low] = min(o.owed[low]+share[low]*float64(fl.bytes), maxShareQuanta*shareQuantum)
		}
	}
}
