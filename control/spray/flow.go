// SPDX-License-Identifier: Apache-2.0

package spray

import (
	"math"
	"slices"

	"github.com/kvspray/kvspray/internal/heap"
	"github.com/kvspray/kvspray/transfer"
)

// chunk is the record of one chunk of a flow, beside the sets that it is in.
type chunk struct {
	attempt uint16 // the last one that carried it
	avoid   uint16 // one more than the index of the pair that failed it last; 0: none
	copies  uint8  // slices in flight that carry it, probes not counted
	strikes uint8  // failures
}

// Flow is the sending side of one part to one peer: which of its chunks may be sent, are in flight,
// and have landed.
type Flow struct {
	Owner any // the caller's

	peer     *Peer
	prio     Priority
	at       Place
	deadline Instant // nothing is sent from then on; 0: never
	seq      uint64
	space    *transfer.Space
	fresh    *transfer.RangeSet // ready, never sent
	seen     *transfer.RangeSet // ready, or was
	got      *transfer.RangeSet // landed
	// Both are nil until the first copy, failure or retransmission, see detail. With ten thousand
	// open transfers these are cold in the cache, and most flows never need more than the sets.
	again   *transfer.RangeSet // to be retransmitted; these precede fresh ones
	chunks  []chunk
	queued  heap.Item[*Flow] // in its queue, while something waits
	hedges  int              // chunks that may still be hedged
	flights int
	stopped bool
	closed  bool
	bad     [MaxRanks]uint8 // failures by rank, up to badFlow
	picky   bool            // a transport has reached badFlow
	rest    Instant         // until then the flow does not use such transports; 0: it may
	// A parked flow is out of its queue, and its chunks do not count as waiting: every usable
	// transport has refused it, and it rests, or its one trial is in flight.
	parked bool
}

// SetPlace sets the place of the flow's memory. Called before the first Ready.
func (f *Flow) SetPlace(at Place) { f.at = min(at, MaxPlaces-1) }

// Waiting counts chunks that wait for a lane.
func (f *Flow) Waiting() uint32 { return f.fresh.Count() + f.retries() }

// retries counts those of them that were sent before.
func (f *Flow) retries() uint32 {
	if f.again == nil {
		return 0
	}
	return f.again.Count()
}

// detail starts the records of single chunks. Until then they follow from the sets: a chunk that
// was ready and is not fresh was sent once, and is in flight until it has landed. Called for a flow
// that is not stopped, before its first copy, failure or retransmission.
func (f *Flow) detail() {
	if f.chunks != nil {
		return
	}
	// Run by run: of a transfer of 4 GiB these are 65,536 chunks, while lanes wait for the scheduler.
	all := make([]chunk, f.fresh.Len())
	fill := func(of *transfer.RangeSet, k chunk) {
		for r := range of.Ranges() {
			run := all[r.First:r.End()]
			for i := range run {
				run[i] = k
			}
		}
	}
	fill(f.seen, chunk{attempt: 1, copies: 1})
	fill(f.got, chunk{attempt: 1})
	fill(f.fresh, chunk{})
	f.chunks, f.again = all, transfer.NewRangeSet(uint32(len(all)))
}

// Flights counts slices in flight.
func (f *Flow) Flights() int { return f.flights }

// Open adds a flow to p, with no chunk ready. No chunk is sent from deadline on; 0: no deadline.
func (s *Scheduler) Open(p *Peer, prio Priority, deadline Instant, space *transfer.Space,
	owner any) *Flow {
	s.seq++
	n := space.NumChunks()
	f := &Flow{Owner: owner, peer: p, prio: min(prio, Background), deadline: deadline, seq: s.seq,
		space: space,
		fresh: transfer.NewRangeSet(n), seen: transfer.NewRangeSet(n), got: transfer.NewRangeSet(n),
		hedges: max(int(n)/hedgeShare, hedgeLeast)}
	f.queued.Value = f
	return f
}

// Ready lets chunks be sent. Chunks that were ready before are ignored.
func (f *Flow) Ready(r transfer.Range) {
	if f.stopped {
		return
	}
	end := min(r.End(), f.fresh.Len())
	for c := r.First; c < end; {
		// Usually the whole range is new.
		run := transfer.Range{First: c, Count: 1}
		for run.End() < end && !f.seen.Contains(run.End()) {
			run.Count++
		}
		c = run.End()
		if f.seen.Contains(run.First) {
			run.First, run.Count = run.First+1, run.Count-1
		}
		f.seen.Add(run)
		f.waits(int(f.fresh.Add(run)))
	}
	f.requeue()
}

// Stop ends the sending of chunks that wait, for good.
func (f *Flow) Stop() {
	f.park()
	f.stopped, f.parked = true, false
	f.fresh.Clear()
	if f.again != nil {
		f.again.Clear()
	}
}

// Close ends the flow. Slices in flight still end, without an effect.
func (f *Flow) Close() {
	if !f.closed {
		f.Stop()
		f.closed = true
	}
}

// requeue puts the flow into its queue if chunks wait, else removes it.
func (f *Flow) requeue() {
	q := &f.peer.queues[f.prio]
	switch wants := f.Waiting() > 0 && !f.stopped && !f.parked; {
	case wants && !f.queued.Queued():
		q.push(f)
	case !wants && f.queued.Queued():
		q.remove(f)
	}
}

// waits adds n, which may be negative, to the chunks that wait.
func (f *Flow) waits(n int) {
	if !f.parked && !f.stopped {
		f.peer.backlog[f.prio] += n
	}
}

// park takes the flow out of its queue.
func (f *Flow) park() {
	f.waits(-int(f.Waiting()))
	f.parked = true
	f.peer.queues[f.prio].remove(f)
}

// unpark puts the flow back into its queue.
func (f *Flow) unpark() {
	if f.parked {
		f.parked = false
		f.waits(int(f.Waiting()))
		f.requeue()
	}
}

// next is the first run that the flow would send, up to the longest slice, and the pair to avoid,
// as in chunk.
func (f *Flow) next() (r transfer.Range, avoid uint16) {
	if f.retries() > 0 {
		r = f.again.Peek(maxSliceChunks)
		return r, f.chunks[r.First].avoid
	}
	return f.fresh.Peek(maxSliceChunks), 0
}

// take removes up to limit chunks for one slice, fresh ones or those to be retransmitted, and
// returns the slice's attempt.
func (f *Flow) take(limit uint32, fresh bool) (transfer.Range, uint32) {
	var r transfer.Range
	if !fresh {
		r = f.again.Peek(limit)
		avoid := f.chunks[r.First].avoid
		for n := uint32(1); n < r.Count; n++ {
			if f.chunks[r.First+n].avoid != avoid {
				r.Count = n
			}
		}
		f.again.Remove(r)
	} else {
		r = f.fresh.Take(limit)
	}
	f.waits(-int(r.Count))
	f.requeue()
	return r, f.send(r)
}

// send counts one more copy of r in flight and returns its attempt.
func (f *Flow) send(r transfer.Range) uint32 {
	if f.chunks == nil {
		return 1 // of what was fresh
	}
	run := f.chunks[r.First:r.End()]
	var last uint16
	for i := range run {
		last = max(last, run[i].attempt)
	}
	if last < MaxAttempts {
		last++
	}
	for i := range run {
		run[i].attempt = last
		run[i].copies++
	}
	return uint32(last)
}

// free queues those chunks of r for retransmission that have not landed and do not wait. With
// copies in flight it does so only if spare is set, because these copies are doubted.
func (f *Flow) free(r transfer.Range, spare bool) {
	if f.stopped {
		return
	}
	f.detail()
	for c := r.First; c < r.End(); c++ {
		k := &f.chunks[c]
		if f.got.Contains(c) || k.copies > 0 && (!spare || k.copies >= MaxCopies) {
			continue
		}
		f.waits(int(f.again.Add(transfer.Range{First: c, Count: 1})))
	}
	if f.rest == 0 {
		f.unpark() // the trial has ended, or is late
	}
	f.requeue()
}

// land marks r as landed, removes it from what waits, and returns the number of new chunks.
func (f *Flow) land(r transfer.Range) (fresh uint32) {
	fresh = f.got.Add(r)
	if f.retries() > 0 {
		f.waits(-int(f.again.Remove(r)))
		f.requeue()
	}
	return fresh
}

// strike charges a failure to the chunks of r.
func (f *Flow) strike(r transfer.Range, pair *pair) {
	if f.stopped {
		return
	}
	f.detail()
	run := f.chunks[r.First:r.End()]
	for i := range run {
		run[i].avoid = uint16(pair.index + 1)
		if run[i].strikes < math.MaxUint8 {
			run[i].strikes++
		}
	}
}

// refused counts a refusal of the flow by a transport. After badFlow refusals other transports are
// preferred, and for a while the flow uses only them. Without the pause, two sidecars that have
// just connected would spend all strikes before the first lane of another transport is up.
func (s *Scheduler) refused(now Instant, f *Flow, rank int) {
	f.bad[rank] = min(f.bad[rank]+1, badFlow)
	if f.bad[rank] < badFlow {
		return
	}
	if f.rest == 0 {
		s.resting = append(s.resting, f)
	}
	f.picky, f.rest = true, now+refusalRest
}

// accepted resets the refusals of a transport after a slice has landed.
func (f *Flow) accepted(rank int) {
	if f.bad[rank] == 0 {
		return
	}
	f.bad[rank], f.picky = 0, false
	for _, n := range f.bad {
		f.picky = f.picky || n >= badFlow
	}
	f.unpark()
}

// rested puts flows back into their queues, and touches their peers: all that another transport can
// serve now, and a few whose rest is over, the oldest first, so that no healthy flow waits for the
// trials of many others.
func (s *Scheduler) rested(now Instant, touched func(*Peer)) {
	wake := wakeFlows
	s.resting = slices.DeleteFunc(s.resting, func(f *Flow) bool {
		over := f.stopped || now >= f.rest && wake > 0
		switch {
		case f.stopped:
		case over:
			wake--
		case !f.parked || !f.served():
			return false
		}
		if over {
			f.rest = 0
		}
		if !f.stopped {
			f.unpark()
			touched(f.peer)
		}
		return over
	})
}

// served reports whether a pair is usable whose transport has not refused the flow too often.
func (f *Flow) served() bool {
	for _, q := range f.peer.pairs {
		if q.usable() && f.class(q) < MaxRanks {
			return true
		}
	}
	return false
}

// exhausted reports whether a chunk of r that is no longer in flight has failed too often to be
// sent again.
func (f *Flow) exhausted(r transfer.Range, most int) bool {
	for c := r.First; c < r.End(); c++ {
		k := &f.chunks[c]
		if !f.got.Contains(c) && k.copies == 0 && (int(k.strikes) >= most || k.attempt >= MaxAttempts) {
			return true
		}
	}
	return false
}

// queue is flows by deadline, then age.
type queue struct{ heap.Heap[*Flow] }

func (q *queue) push(f *Flow) {
	k := heap.Key{At: f.deadline, Seq: f.seq}
	if k.At == 0 {
		k.At = math.MaxInt64 // no deadline
	}
	q.Set(&f.queued, k)
}

func (q *queue) remove(f *Flow) { q.Remove(&f.queued) }

// flow is the one at index i; the first is at 0.
func (q *queue) flow(i int) *Flow {
	_, it := q.At(i)
	return it.Value
}
