// Package chunks has the chunks of one transfer: which may be sent, are in flight, wait for a
// retransmission, and have landed. It counts copies and failures of each, and chooses no lane.
//
// Invariant: a chunk that was made ready and has not landed waits, is in flight, or both.
package chunks

import (
	"math"

	"github.com/kvspray/kvspray/transfer"
)

// Bounds.
const (
	MaxCopies   = 16        // of one chunk in flight at once, probes not counted
	MaxAttempts = 1<<16 - 1 // of one chunk, of every kind
)

// Set has the chunks of one transfer.
type Set struct {
	fresh *transfer.RangeSet // ready, never sent
	seen  *transfer.RangeSet // ready, or was
	got   *transfer.RangeSet // landed
	// Both are nil until the first copy, failure or retransmission, see Detail. With ten thousand
	// open transfers these are cold in the cache, and most transfers never need more than the sets.
	again   *transfer.RangeSet // to be retransmitted; these precede fresh ones
	records []Record
}

// Record is the record of one chunk, beside the sets that it is in.
type Record struct {
	Attempt uint16 // the last one that carried it
	Copies  uint8  // slices in flight that carry it, probes not counted
	Strikes uint8  // failures
	avoid   uint16 // one more than the index of the rail pair that failed it last; 0: none
}

// New returns a set of n chunks, none of them ready.
func New(n uint32) Set {
	return Set{fresh: transfer.NewRangeSet(n), seen: transfer.NewRangeSet(n),
		got: transfer.NewRangeSet(n)}
}

// Len counts the chunks.
func (s *Set) Len() uint32 { return s.fresh.Len() }

// Landed counts the chunks that have landed.
func (s *Set) Landed() uint32 { return s.got.Count() }

// HasLanded reports whether a chunk has landed.
func (s *Set) HasLanded(c uint32) bool { return s.got.Contains(c) }

// Waiting counts chunks that wait for a lane.
func (s *Set) Waiting() uint32 { return s.fresh.Count() + s.Retries() }

// Fresh counts those of them that were never sent.
func (s *Set) Fresh() uint32 { return s.fresh.Count() }

// Retries counts those of them that were sent before.
func (s *Set) Retries() uint32 {
	if s.again == nil {
		return 0
	}
	return s.again.Count()
}

// Detail starts the records of single chunks. Until then they follow from the sets: a chunk that
// was ready and is not fresh was sent once, and is in flight until it has landed. Called before the
// first copy, failure or retransmission, and not after Clear.
func (s *Set) Detail() {
	if s.records != nil {
		return
	}
	// Run by run: of a transfer of 4 GiB these are 65,536 chunks, while lanes wait for the scheduler.
	all := make([]Record, s.fresh.Len())
	fill := func(of *transfer.RangeSet, k Record) {
		for r := range of.Ranges() {
			run := all[r.First:r.End()]
			for i := range run {
				run[i] = k
			}
		}
	}
	fill(s.seen, Record{Attempt: 1, Copies: 1})
	fill(s.got, Record{Attempt: 1})
	fill(s.fresh, Record{})
	s.records, s.again = all, transfer.NewRangeSet(uint32(len(all)))
}

// Ready lets chunks be sent. Chunks that were ready before are ignored.
func (s *Set) Ready(r transfer.Range) (added int) {
	end := min(r.End(), s.fresh.Len())
	for c := r.First; c < end; {
		// Usually the whole range is new.
		run := transfer.Range{First: c, Count: 1}
		for run.End() < end && !s.seen.Contains(run.End()) {
			run.Count++
		}
		c = run.End()
		if s.seen.Contains(run.First) {
			run.First, run.Count = run.First+1, run.Count-1
		}
		s.seen.Add(run)
		added += int(s.fresh.Add(run))
	}
	return added
}

// Clear drops what waits, for good.
func (s *Set) Clear() {
	s.fresh.Clear()
	if s.again != nil {
		s.again.Clear()
	}
}

// Next is the first run that would be sent, up to a limit, and the rail pair to avoid, as in
// Record.
func (s *Set) Next(limit uint32) (r transfer.Range, avoid uint16) {
	if s.Retries() > 0 {
		r = s.again.Peek(limit)
		return r, s.records[r.First].avoid
	}
	return s.fresh.Peek(limit), 0
}

// NextFresh is the first run that was never sent.
func (s *Set) NextFresh(limit uint32) transfer.Range { return s.fresh.Peek(limit) }

// TakeFresh removes up to limit chunks that were never sent. Send follows.
func (s *Set) TakeFresh(limit uint32) transfer.Range { return s.fresh.Take(limit) }

// TakeAgain removes up to limit chunks that are to be retransmitted. Send follows.
func (s *Set) TakeAgain(limit uint32) transfer.Range {
	r := s.again.Peek(limit)
	avoid := s.records[r.First].avoid
	for n := uint32(1); n < r.Count; n++ {
		if s.records[r.First+n].avoid != avoid {
			r.Count = n
		}
	}
	s.again.Remove(r)
	return r
}

// Send counts one more copy of r in flight and returns its attempt.
func (s *Set) Send(r transfer.Range) uint32 {
	if s.records == nil {
		return 1 // of what was fresh
	}
	return s.send(r)
}

func (s *Set) send(r transfer.Range) uint32 {
	run := s.records[r.First:r.End()]
	var last uint16
	for i := range run {
		last = max(last, run[i].Attempt)
	}
	if last < MaxAttempts {
		last++
	}
	for i := range run {
		run[i].Attempt = last
		run[i].Copies++
	}
	return uint32(last)
}

// Ended counts one copy of r less in flight.
func (s *Set) Ended(r transfer.Range) {
	if s.records != nil {
		s.ended(r)
	}
}

func (s *Set) ended(r transfer.Range) {
	run := s.records[r.First:r.End()]
	for i := range run {
		run[i].Copies--
	}
}

// Free queues those chunks of r for retransmission that have not landed and do not wait. With
// copies in flight it does so only if spare is set, because these copies are doubted.
func (s *Set) Free(r transfer.Range, spare bool) (added int) {
	s.Detail()
	for c := r.First; c < r.End(); c++ {
		k := &s.records[c]
		if s.got.Contains(c) || k.Copies > 0 && (!spare || k.Copies >= MaxCopies) {
			continue
		}
		added += int(s.again.Add(transfer.Range{First: c, Count: 1}))
	}
	return added
}

// Land marks r as landed, and returns the number of new chunks. Drop follows if chunks are to be
// retransmitted.
func (s *Set) Land(r transfer.Range) (fresh uint32) { return s.got.Add(r) }

// Drop removes r from what is to be retransmitted.
func (s *Set) Drop(r transfer.Range) (removed int) { return int(s.again.Remove(r)) }

// Strike charges a failure to the chunks of r, and to the rail pair with an index.
func (s *Set) Strike(r transfer.Range, pair int) {
	s.Detail()
	run := s.records[r.First:r.End()]
	for i := range run {
		run[i].avoid = uint16(pair + 1)
		if run[i].Strikes < math.MaxUint8 {
			run[i].Strikes++
		}
	}
}

// Exhausted reports whether a chunk of r that is no longer in flight has failed too often to be
// sent again. Called after Detail.
func (s *Set) Exhausted(r transfer.Range, limit int) bool {
	for c := r.First; c < r.End(); c++ {
		k := &s.records[c]
		if !s.got.Contains(c) && k.Copies == 0 &&
			(int(k.Strikes) >= limit || k.Attempt >= MaxAttempts) {
			return true
		}
	}
	return false
}

// State is what is known of a chunk, recorded or not: for tests.
func (s *Set) State(c uint32) (k Record, fresh, again, recorded bool) {
	fresh, again = s.fresh.Contains(c), s.again != nil && s.again.Contains(c)
	switch {
	case s.records != nil:
		return s.records[c], fresh, again, true
	case s.seen.Contains(c) && !fresh:
		k.Attempt = 1
		if !s.got.Contains(c) {
			k.Copies = 1
		}
	}
	return k, fresh, again, false
}
