package multipath

import (
	"time"
)

// How rates of links are learned.
const (
	rateWeight = 0.25            // weight of the newest chunk
	rateSpan   = 5 * time.Second // longest validity of a rate; then the link gets a chunk again
	// first validity; it doubles. [measured, 2 H200] While the driver pinned memory,.
	rateRetry = 100 * time.Millisecond
	// the first chunks of a link were 300 times slower, and the link was not used again.
	// without an end of a chunk for so long, a link is expected to hang.
	silentAfter = 60 * time.Millisecond
	leaveSlack  = 1.125 // by this factor another link must be faster to get the chunk
)

// leavesLocked reports whether another link alone would move all waiting bytes before l moves this
// chunk. The fastest link never leaves a chunk, so that one link always takes it.
func (l *link) leavesLocked(n uint64, now time.Time) bool {
	mine, known := l.expectLocked(n, now)
	if !known {
		return false // a rate is only learned from chunks
	}
	m := l.m
	waiting := uint64(0)
	for _, j := range m.jobs {
		waiting += j.n - j.next
		for _, s := range j.again {
			waiting += s.n
		}
	}
	for _, o := range m.links {
		if o == l || o.failed || o.yields && m.direct || o.silentLocked(now) {
			continue
		}
		if theirs, known := o.expectLocked(waiting, now); known && leaveSlack*theirs < mine {
			return true
		}
	}
	return false
}

// takenLocked counts a chunk that l takes.
func (l *link) takenLocked(n uint64, now time.Time) {
	switch {
	case l.took > 0 && l.oldLocked(now):
		l.span, l.tried = min(2*max(l.span, rateRetry), rateSpan), true
	case !l.tried:
		l.span = 0
	}
	if l.inFlight == 0 {
		l.last = now
	}
	l.inFlight += n
}

// oldLocked reports whether the rate of l is too old.
func (l *link) oldLocked(now time.Time) bool {
	span := max(l.span, rateRetry)
	if l.inFlight > 0 {
		span = rateSpan
	}
	return now.Sub(l.last) > span
}

// expectLocked estimates the nanoseconds until l has moved n more bytes.
func (l *link) expectLocked(n uint64, now time.Time) (ns float64, known bool) {
	if l.took == 0 || l.oldLocked(now) {
		return 0, false
	}
	return float64(l.inFlight+n) * l.took / l.bytes, true
}

// silentLocked reports whether l holds chunks and has finished none for long.
func (l *link) silentLocked(now time.Time) bool {
	return l.inFlight > 0 && now.Sub(l.last) > silentAfter
}

// learnLocked learns from a chunk that has been moved. Chunks whose ends are seen together share
// the time since the previous end.
func (l *link) learnLocked(n uint64, issued, now time.Time) {
	if issued.Before(l.last) {
		issued = l.last // before, it moved other chunks
	}
	weight := rateWeight
	if l.tried {
		weight, l.tried = 1, false
	}
	l.bytes += weight * (float64(n) - l.bytes)
	l.took += weight * (float64(now.Sub(issued)) - l.took)
	l.last = now
}
