package spray

import (
	"math"
	"slices"

	"github.com/kvspray/kvspray/internal/heap"
	"github.com/kvspray/kvspray/transfer"
)

// chunk is what is known about one chunk of a flow, beside the sets that it is in.
type chunk struct {
	attempt uint16 // the last one that carried it
	avoid   uint16 // one more than the index of the pair that failed it last; 0: none
	copies  uint8  // slices in flight that carry it, probes not counted
	strikes uint8  // failures that were charged
}

// Flow is the sending side of one transfer to one peer: which of its chunks may be sent, which are
// on their way, which landed.
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
	// Only once something has not gone as it should, see detail. With ten thousand transfers open all
	// of this is cold when its turn comes, and most of them never need more than the sets.
	again   *transfer.RangeSet // sent, and free for another lane; these go first
	chunks  []chunk
	queued  heap.Item[*Flow] // in its queue, while something waits
	hedges  int              // chunks that may still be hedged
	flights int
	stopped bool
	closed  bool
	bad     [MaxRanks]uint8 // failures by rank, up to badFlow
	picky   bool            // one of them is at that
	rest    Instant         // until when it does without the transports that are at that; 0: not
	// parked flows are out of their queue, and their chunks do not count as waiting: every
	// transport that is usable has refused the flow, and it rests, or has its one trial in flight.
	parked bool
}

// SetPlace says where the memory of the flow lies; before anything of it is ready.
func (f *Flow) SetPlace(at Place) { f.at = min(at, MaxPlaces-1) }

// Waiting counts chunks that may be sent and wait for a lane.
func (f *Flow) Waiting() uint32 { return f.fresh.Count() + f.retries() }

// retries counts those of them that were sent before.
func (f *Flow) retries() uint32 {
	if f.again == nil {
		return 0
	}
	return f.again.Count()
}

// detail keeps what is known of each chunk from now on. Until something goes wrong that follows
// from the sets: what was ready and is not fresh was sent once, and is on its way until it has
// landed. Called for a flow that is not stopped, before the first copy, failure or retry.
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

// Open adds a flow towards p, with nothing ready. Nothing of it is sent from deadline on; 0 is
// none.
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

// Ready lets chunks be sent. What was ready before is ignored.
func (f *Flow) Ready(r transfer.Range) {
	if f.stopped {
		return
	}
	end := min(r.End(), f.fresh.Len())
	for c := r.First; c < end; {
		// Mostly all of it is new.
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

// Stop keeps everything that waits from being sent, for good.
func (f *Flow) Stop() {
	f.park()
	f.stopped, f.parked = true, false
	f.fresh.Clear()
	if f.again != nil {
		f.again.Clear()
	}
}

// Close ends the flow. Slices in flight still end, and change nothing then.
func (f *Flow) Close() {
	if !f.closed {
		f.Stop()
		f.closed = true
	}
}

// requeue puts the flow in its queue, or takes it out, by what it has.
func (f *Flow) requeue() {
	q := &f.peer.queues[f.prio]
	switch wants := f.Waiting() > 0 && !f.stopped && !f.parked; {
	case wants && !f.queued.Queued():
		q.push(f)
	case !wants && f.queued.Queued():
		q.remove(f)
	}
}

// waits counts chunks that wait now, or with a negative n that wait no longer.
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

// next is the first run that the flow would send, as far as a slice can reach, and the pair that it
// must avoid, as in chunk.
func (f *Flow) next() (r transfer.Range, avoid uint16) {
	if f.retries() > 0 {
		r = f.again.Peek(maxSliceChunks)
		return r, f.chunks[r.First].avoid
	}
	return f.fresh.Peek(maxSliceChunks), 0
}

// take removes up to limit chunks for one slice, of those that were never sent or of those that
// were, and returns the attempt that it is.
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

// free makes what of r has neither landed nor waits sendable again; only where no copy is left,
// unless spare says that the copies in flight are doubted.
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

// land takes the receiver's word for r and returns how many of its chunks are new. A copy that
// waits is not sent.
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

// refused remembers that a transport has refused the flow: after some times the others come first,
// and for a while only they. Where there is none yet, at the beginning of two sidecars'
// acquaintance, all strikes would be spent before its first lane is up.
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

// accepted takes a slice that landed: the transport serves the flow after all.
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

// rested puts flows back into their queues, and touches their peers: a few whose rest is over, the
// oldest first, so that a healthy flow never waits for the trials of many, and those that another
// transport can serve now.
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

// exhausted reports whether a chunk of r that no slice carries any more has failed too often to be
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

// flow is the one at place i: the first at 0.
func (q *queue) flow(i int) *Flow {
	_, it := q.At(i)
	return it.Value
}
