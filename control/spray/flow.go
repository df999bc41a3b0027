package spray

import (
	"math"
	"slices"

	"github.com/kvspray/kvspray/control/spray/internal/chunks"
	"github.com/kvspray/kvspray/internal/heap"
	"github.com/kvspray/kvspray/transfer"
)

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
	chunks   chunks.Set
	queued   heap.Item[*Flow] // in its queue, while something waits
	hedges   int              // chunks that may still be hedged
	flights  int
	stopped  bool
	closed   bool
	bad      [MaxRanks]uint8 // failures by rank, up to badFlow
	picky    bool            // a transport has reached badFlow
	rest     Instant         // until then the flow does not use such transports; 0: it may
	// A parked flow is out of its queue, and its chunks do not count as waiting: every usable
	// transport has refused it, and it rests, or its one trial is in flight.
	parked bool
}

// SetPlace sets the place of the flow's memory. Called before the first Ready.
func (f *Flow) SetPlace(at Place) { f.at = min(at, MaxPlaces-1) }

// Waiting counts chunks that wait for a lane.
func (f *Flow) Waiting() uint32 { return f.chunks.Waiting() }

// Flights counts slices in flight.
func (f *Flow) Flights() int { return f.flights }

// Open adds a flow to p, with no chunk ready. No chunk is sent from deadline on; 0: no deadline.
func (s *Scheduler) Open(p *Peer, prio Priority, deadline Instant, space *transfer.Space,
	owner any) *Flow {
	s.seq++
	n := space.NumChunks()
	f := &Flow{Owner: owner, peer: p, prio: min(prio, Background), deadline: deadline, seq: s.seq,
		space: space, chunks: chunks.New(n),
		hedges: max(int(n)/hedgeShare, hedgeMin)}
	f.queued.Value = f
	return f
}

// Ready lets chunks be sent. Chunks that were ready before are ignored.
func (f *Flow) Ready(r transfer.Range) {
	if f.stopped {
		return
	}
	f.waits(f.chunks.Ready(r))
	f.requeue()
}

// Stop ends the sending of chunks that wait, for good.
func (f *Flow) Stop() {
	f.park()
	f.stopped, f.parked = true, false
	f.chunks.Clear()
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

// take removes up to limit chunks for one slice, fresh ones or those to be retransmitted, and
// returns the slice's attempt.
func (f *Flow) take(limit uint32, fresh bool) (r transfer.Range, attempt uint32) {
	if fresh {
		r = f.chunks.TakeFresh(limit)
	} else {
		r = f.chunks.TakeAgain(limit)
	}
	f.waits(-int(r.Count))
	f.requeue()
	return r, f.chunks.Send(r)
}

// free queues chunks of r for retransmission. With copies in flight it does so only if spare is
// set, because these copies are doubted.
func (f *Flow) free(r transfer.Range, spare bool) {
	if f.stopped {
		return
	}
	f.waits(f.chunks.Free(r, spare))
	if f.rest == 0 {
		f.unpark() // the trial has ended, or is late
	}
	f.requeue()
}

// land marks r as landed, and returns the number of new chunks.
func (f *Flow) land(r transfer.Range) (fresh uint32) {
	fresh = f.chunks.Land(r)
	if f.chunks.Retries() > 0 {
		f.waits(-f.chunks.Drop(r))
		f.requeue()
	}
	return fresh
}

// strike charges a failure to the chunks of r.
func (f *Flow) strike(r transfer.Range, pair *pair) {
	if !f.stopped {
		f.chunks.Strike(r, pair.index)
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
