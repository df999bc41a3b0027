package spray

import (
	"github.com/kvspray/kvspray/transfer"
)

// flight is a slice in flight.
type flight struct {
	flow       *Flow
	lane       *laneState
	r          transfer.Range
	bytes      uint64
	use        uint32 // how often this entry was given out
	prev, next int32  // on its lane, by age

	posted    Instant
	predicted Instant
	forgiven  Instant // part of its age in which this process did not run

	progress progress
	copy     copyKind
	charged  bool // its lateness was counted as a failure

	path pathSample
	rail railSample
}

// progress is how a slice stands. Every slice ends through End, from any state.
//
//	state         meaning                               leaves when                    to
//	unused        the entry holds no slice              post                           onTime
//	onTime        counts as in flight                   it takes too long (watch)      flightLate
//	flightLate    counts as in flight; its chunks       its lane brings something      flightPassed
//	              wait for other lanes, too             (alive)
//	flightPassed  fills no window: it may never end
//
// On one lane the slices that are late or passed are the oldest ones.
type progress uint8

const (
	unused progress = iota
	onTime
	flightLate
	flightPassed
)

// copyKind is the part that a slice plays among the copies of its chunks.
//
//	kind         meaning                                       may become
//	soleCopy     no other lane may carry its chunks            doubledCopy (hedge, double)
//	doubledCopy  other lanes may carry its chunks, too
//	hedgeCopy    is the second copy of another slice
//	probeCopy    tests an excluded pair, as attempt 0, and
//	             is not counted among the copies
type copyKind uint8

const (
	soleCopy copyKind = iota
	doubledCopy
	hedgeCopy
	probeCopy
)

// pathSample is what a slice found on its rail pair when it was posted.
type pathSample struct {
	begin     Instant // of the busy period that counts for its rate sample
	delivered uint64  // bytes of the pair
	ahead     uint64  // bytes in flight on the pair, or waiting at the local rail
	limited   bool    // the pair was not kept busy: the slice's rate proves little
	clean     bool    // next to nothing: the time of the slice is the delay of the path
}

// railSample is what a slice found at its local rail when it was posted. It is zero where no other
// pair shares the rail.
type railSample struct {
	mark      uint64  // egressQueue.posted, with the slice
	delivered uint64  // egressQueue.delivered
	leaves    Instant // when the slice would have left the rail
	busy      bool    // it found a queue
	clean     bool    // it found nothing
}

// post gives r of f to l. A probe has attempt 0 and does not count as a copy.
func (s *Scheduler) post(now Instant, l *laneState, f *Flow, r transfer.Range,
	attempt uint32) Slice {
	var i int32
	if n := len(s.unused); n > 0 {
		i = s.unused[n-1]
		s.unused = s.unused[:n-1]
	} else {
		i = int32(len(s.flights))
		s.flights = append(s.flights, flight{})
	}
	q := l.pair
	bytes, err := f.space.Bytes(r)
	if err != nil {
		bytes = 0 // impossible: r comes from a set of that space's size
	}
	fl := &s.flights[i]
	*fl = flight{flow: f, lane: l, r: r, bytes: bytes, use: fl.use + 1, prev: l.tail, next: -1,
		posted: now, predicted: Instant(q.expectAt(now, bytes)), progress: onTime,
		path: pathSample{delivered: q.delivered, ahead: q.ahead(now)}}
	if attempt == 0 {
		fl.copy = probeCopy
	}
	load := q.load() + bytes
	fl.path.limited = load <= uint64(q.holds())+q.cut(f.prio) && load+q.cut(f.prio) <= q.limit(f.prio)
	if fl.path.clean = fl.path.ahead <= q.shallow(); fl.path.clean {
		q.drained(now)
	}
	if q.load() == 0 {
		q.delivAt = now
	}
	fl.path.begin = q.delivAt
	q.leaves(now, fl)
	if l.tail >= 0 {
		s.flights[l.tail].next = i
	} else {
		l.head, l.moved = i, now
		l.busy = len(s.busy)
		s.busy = append(s.busy, l)
	}
	l.tail = i
	l.inflight += bytes
	l.flights++
	q.inflight += bytes
	if l.usable() {
		q.flights++
	} else {
		q.stalled += bytes
	}
	q.tally()
	q.peer.flights++
	f.flights++
	if s.live++; s.live == 1 {
		s.ticked = now
	}
	return Slice{Lane: l.info.ID, Flow: f, Range: r, Bytes: bytes, Attempt: attempt,
		Cookie: uint64(fl.use)<<32 | uint64(uint32(i))}
}

// find returns the flight of a cookie, or nil if it has ended or never existed.
func (s *Scheduler) find(cookie uint64) (*flight, int32) {
	i := uint32(cookie)
	if int64(i) >= int64(len(s.flights)) {
		return nil, 0
	}
	f := &s.flights[i]
	if f.progress == unused || f.use != uint32(cookie>>32) {
		return nil, 0
	}
	return f, int32(i)
}

// Flight describes a slice in flight.
func (s *Scheduler) Flight(cookie uint64) Flight {
	fl, _ := s.find(cookie)
	if fl == nil {
		return Flight{}
	}
	return Flight{Path: &fl.lane.pair.path, Posted: fl.posted}
}

// End ends a slice. False: no slice in flight has this cookie, and nothing changes.
func (s *Scheduler) End(now Instant, cookie uint64, v Verdict) (Ended, bool) {
	fl, i := s.find(cookie)
	if fl == nil {
		return Ended{}, false
	}
	s.unlink(fl, i)
	l, q, f := fl.lane, fl.lane.pair, fl.flow
	out := Ended{Flow: f, Range: fl.r, Bytes: fl.bytes, Rank: q.rank}
	s.judge(now, fl, v)
	if fl.copy == probeCopy {
		switch v {
		case Confirmed, Superseded:
			q.count.ProbesPassed++
		case Failed, Lost:
			q.count.ProbesFailed++
		}
		if v == Confirmed && !f.stopped {
			f.chunks.Detail() // it has landed, and another copy is still in flight
			out.Fresh = f.land(fl.r)
		}
	} else {
		if v != Confirmed && !f.stopped {
			f.chunks.Detail()
		}
		f.chunks.Ended(fl.r)
		switch {
		case f.stopped:
		case v == Confirmed:
			out.Fresh = f.land(fl.r)
			f.accepted(q.rank)
		default:
			if v == Refused {
				s.refused(now, f, q.rank)
			}
			if (v == Failed || v == Refused) && !fl.charged {
				f.strike(fl.r, q)
			}
			out.Exhausted = f.chunks.Exhausted(fl.r, s.cfg.MaxStrikes)
			f.free(fl.r, false)
		}
	}
	if l.broken && v == Lost {
		s.release(l)
	}
	fl.progress, fl.flow, fl.lane = unused, nil, nil
	s.unused = append(s.unused, i)
	return out, true
}

// unlink removes a flight from its lane and from every sum.
func (s *Scheduler) unlink(fl *flight, i int32) {
	l, q := fl.lane, fl.lane.pair
	if fl.prev >= 0 {
		s.flights[fl.prev].next = fl.next
	} else {
		l.head = fl.next
	}
	if fl.next >= 0 {
		s.flights[fl.next].prev = fl.prev
	} else {
		l.tail = fl.prev
	}
	l.inflight -= fl.bytes
	l.flights--
	q.inflight -= fl.bytes
	if l.usable() {
		q.flights--
	}
	if fl.progress == flightPassed || !l.usable() {
		q.stalled -= fl.bytes
	}
	if fl.progress == flightPassed {
		l.passed -= fl.bytes
	}
	q.tally()
	if q.out != nil && fl.rail.mark > 0 {
		q.out.flights[fl.flow.prio]--
	}
	q.peer.flights--
	fl.flow.flights--
	if fl.copy == hedgeCopy {
		q.peer.hedged -= fl.bytes
	}
	s.live--
	if l.flights == 0 {
		last := len(s.busy) - 1
		s.busy[l.busy] = s.busy[last]
		s.busy[l.busy].busy = l.busy
		s.busy[last] = nil
		s.busy = s.busy[:last]
		l.busy = -1
	}
}

// judge updates the health and estimates of a path from the end of a flight.
func (s *Scheduler) judge(now Instant, fl *flight, v Verdict) {
	l, q := fl.lane, fl.lane.pair
	q.count.ended(v)
	if v == Lost {
		if !l.broken {
			l.broken = true
			q.recount()
			q.fault(now, &s.cfg, "lane lost")
		}
		return
	}
	s.alive(now, l)
	switch v {
	case Confirmed, Superseded:
		q.delivered += fl.bytes
		rate := q.railRate(now, fl)
		if v == Confirmed {
			q.learn(now, fl, rate)
		}
		q.delivAt = now
		q.peer.moved = now
		q.stirs(now)
		if q.state != Healthy && fl.posted >= q.since {
			q.proven(now)
		}
	case Failed:
		if !fl.charged {
			q.fault(now, &s.cfg, "slice failed")
		}
	}
}

// alive records progress of a lane. If the lane was suspect, other lanes have its chunks already,
// and the time of suspicion makes none of its slices late.
func (s *Scheduler) alive(now Instant, l *laneState) {
	if l.suspect {
		for i := l.head; i >= 0; i = s.flights[i].next {
			s.flights[i].forgiven = now - s.flights[i].posted
		}
		l.suspect = false
		l.pair.recount()
	}
	for i := l.head; i >= 0 && !l.broken; i = s.flights[i].next {
		if s.flights[i].progress < flightLate {
			break
		}
		// Later slices arrive, and this one may never end.
		if fl := &s.flights[i]; fl.progress == flightLate {
			fl.progress = flightPassed
			l.passed += fl.bytes
			l.pair.stalled += fl.bytes
		}
	}
	l.pair.tally()
	l.moved, l.pair.moved = now, now
}

// release lets other lanes send what this lane has in flight, and returns the number of its slices
// for which this is new.
func (s *Scheduler) release(l *laneState) (n uint64) {
	for i := l.head; i >= 0; i = s.flights[i].next {
		if s.double(&s.flights[i]) {
			n++
		}
	}
	return n
}

// double lets other lanes send the chunks of a slice, too. False: they could already.
func (s *Scheduler) double(fl *flight) bool {
	if fl.copy != soleCopy {
		return false
	}
	fl.copy = doubledCopy
	fl.flow.free(fl.r, true)
	return true
}
