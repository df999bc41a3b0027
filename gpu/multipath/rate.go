package multipath

import (
	"time"
)

// What is learned of links.
const (
	rateWeight = 0.25                   // of the newest chunk
	rateSpan   = 5 * time.Second        // after which a rate is too old to judge a link by: it gets a chunk again,
	rateRetry  = 100 * time.Millisecond // so soon at first, and twice as long after each that was in vain: [measured, 2 H200] a driver that pinned
	// memory meanwhile made the first chunks of a link look 300 times too slow, and it was left out of all that came
	silentAfter = 60 * time.Millisecond // a link that brings none of its chunks for so long is expected to bring none
	leaveSlack  = 1.125                 // a chunk is left to another link that is so much sooner done
)

// leavesLocked reports whether another link, alone, would be done with all that waits before l is done with this chunk of it. Whoever is
// first done with the chunk never leaves it, so that somebody takes it.
func (l *link) leavesLocked(n uint64, now time.Time) bool {
	mine, known := l.expectLocked(n, now)
	if !known {
		return false // or nothing would ever be known
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

// oldLocked reports whether what is known of l is too old to judge it by.
func (l *link) oldLocked(now time.Time) bool {
	span := max(l.span, rateRetry)
	if l.inFlight > 0 {
		span = rateSpan
	}
	return now.Sub(l.last) > span
}

// expectLocked is in how many nanoseconds l would have moved n bytes more.
func (l *link) expectLocked(n uint64, now time.Time) (ns float64, known bool) {
	if l.took == 0 || l.oldLocked(now) {
		return 0, false
	}
	return float64(l.inFlight+n) * l.took / l.bytes, true
}

// silentLocked reports whether l has brought nothing of what it holds for long.
func (l *link) silentLocked(now time.Time) bool {
	return l.inFlight > 0 && now.Sub(l.last) > silentAfter
}

// learnLocked takes the time of a chunk that has been moved. Those of which it is noticed together that they have, are one to what is kept.
func (l *link) learnLocked(n uint64, issued, now time.Time) {
	if issued.Before(l.last) {
		issued = l.last // until then it moved others
	}
	weight := rateWeight
	if l.tried {
		weight, l.tried = 1, false
	}
	l.bytes += weight * (float64(n) - l.bytes)
	l.took += weight * (float64(now.Sub(issued)) - l.took)
	l.last = now
}
