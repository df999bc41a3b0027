package spray

import (
	"fmt"
)

// Tick checks the slices in flight, and calls touched for peers with new work or newly usable
// lanes.
func (s *Scheduler) Tick(now Instant, touched func(*Peer)) {
	if asleep := now - s.ticked - maxTickGap; asleep > 0 && s.live > 0 {
		s.forgive(now, asleep)
	}
	s.ticked = now
	for _, l := range s.busy {
		s.watch(now, l)
		touched(l.pair.peer)
	}
	for _, l := range s.busy {
		q := l.pair
		// A pair that waits for its probe was judged before: without a usable lane nothing new is
		// known.
		if q.live == 0 && len(q.lanes) > 0 && q.state <= Readmitted {
			s.lagging(now, q, Instant(lagFactor)*s.flights[l.head].predicted)
		}
	}
	s.rested(now, touched)
}

// forgive excludes the time in which this process did not run from all judgements: what arrived
// meanwhile has not been read yet.
func (s *Scheduler) forgive(now, asleep Instant) {
	for _, l := range s.busy {
		l.moved = min(l.moved+asleep, now)
		if l.doubted > 0 {
			l.doubted = min(l.doubted+asleep, now)
		}
		l.pair.moved = max(l.pair.moved, l.moved)
		for i := l.head; i >= 0; i = s.flights[i].next {
			s.flights[i].forgiven += asleep
		}
	}
}

// watch makes a silent lane suspect, and finds slices that are late while their lane moves.
func (s *Scheduler) watch(now Instant, l *laneState) {
	if !l.usable() && !s.retry(now, l) {
		return
	}
	q, i := l.pair, l.head
	for i >= 0 && s.flights[i].progress == flightPassed {
		i = s.flights[i].next
	}
	if i < 0 {
		if l.flights < l.limit(false) {
			return // only late slices are in flight, and their lateness was counted
		}
		i = l.head // late slices fill the lane: no other slice can show progress
	}
	fl := &s.flights[i]
	patience := max(s.cfg.Suspect, lateFactor*fl.predicted)
	if l.info.ReportsAcked && now-q.moved >= s.cfg.Suspect {
		// The pair has moved no byte. While other lanes of the pair move, it may be their turn.
		patience = s.cfg.Suspect
	}
	if silent := now - max(l.moved, l.doubted, fl.posted+fl.forgiven); silent >= patience {
		l.suspect, l.doubted = true, now
		q.recount()
		q.count.Suspicions++
		q.count.Doubled += s.release(l)
		if q.state == Probing || q.state == Readmitted {
			q.exclude(now, &s.cfg, fmt.Sprintf("on trial, and silent for %v", silent))
			q.silent = true
		}
		return
	}
	for ; i >= 0; i = s.flights[i].next {
		fl := &s.flights[i]
		if now-fl.posted-fl.forgiven < max(s.cfg.Attempt, stuckFactor*fl.predicted) {
			break // the other slices are younger
		}
		if fl.progress != onTime {
			continue
		}
		fl.progress = flightLate
		q.count.TimedOut++
		if fl.copy != probeCopy {
			s.double(fl)
		}
		if l.moved > fl.posted+fl.forgiven { // else the lane as a whole is silent
			fl.charged = true
			if fl.copy != probeCopy {
				fl.flow.strike(fl.r, q)
			}
			q.fault(now, &s.cfg, "slice timed out")
		}
	}
}

// retry makes a suspect lane usable again after Config.Attempt if its peer has no other path. The
// lane may be silent because nothing is sent, or because of one slice that never ends. Its slices
// in flight count again, so it gets what its window has room for, or one chunk if all are late.
func (s *Scheduler) retry(now Instant, l *laneState) bool {
	if l.broken || now-l.doubted < s.cfg.Attempt {
		return false
	}
	for _, q := range l.pair.peer.pairs {
		if q.usable() {
			return false
		}
	}
	l.suspect, l.doubted = false, now
	l.pair.recount()
	return true
}

// lagging excludes a pair that is silent while other pairs of its peer move. If all are silent, the
// peer or the network is the cause.
func (s *Scheduler) lagging(now Instant, q *pair, patience Instant) {
	silent := now - q.moved
	for _, l := range q.lanes {
		silent = min(silent, now-l.moved)
	}
	if silent >= max(s.cfg.Exclude, patience) && q.peer.moved > now-silent {
		q.exclude(now, &s.cfg, fmt.Sprintf("silent for %v while other rails to this peer moved", silent))
		q.silent = true
	}
}
