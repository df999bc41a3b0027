// SPDX-License-Identifier: Apache-2.0

package spray

import "fmt"

// Tick looks at what is in flight and calls touched for peers that have new work or a new choice.
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
		// One that waits for its probe has been judged: without a lane to probe on, nothing new is known
		// of it.
		if q.live == 0 && len(q.lanes) > 0 && q.state <= Readmitted {
			s.lagging(now, q, Instant(lagFactor)*s.flights[l.head].predicted)
		}
	}
	s.rested(now, touched)
}

// forgive takes the time in which this process did not run off every clock that a lane is judged
// by: we were silent, and what came meanwhile has not been looked at yet.
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

// watch finds silence on a lane, and a slice that others overtake without end.
func (s *Scheduler) watch(now Instant, l *laneState) {
	if !l.usable() && !s.retry(now, l) {
		return
	}
	q, i := l.pair, l.head
	for i >= 0 && s.flights[i].progress == flightPassed {
		i = s.flights[i].next
	}
	if i < 0 {
		if l.flights < l.most(false) {
			return // what is late has been judged: that nothing else comes back says nothing more
		}
		i = l.head // it has no place left for what would tell
	}
	fl := &s.flights[i]
	patience := max(s.cfg.Suspect, lateFactor*fl.predicted)
	if l.info.ReportsAcked && now-q.moved >= s.cfg.Suspect {
		// of what has not a byte to show for it; while other lanes of the pair have, it may be their turn
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
			break // the rest is younger
		}
		if fl.progress != onTime {
			continue
		}
		fl.progress = flightLate
		q.count.TimedOut++
		if fl.copy != probeCopy {
			s.double(fl)
		}
		if l.moved > fl.posted+fl.forgiven { // else it is the lane that is silent
			fl.charged = true
			if fl.copy != probeCopy {
				fl.flow.strike(fl.r, q)
			}
			q.fault(now, &s.cfg, "slice timed out")
		}
	}
}

// retry gives a suspect lane another chance once a slice should have ended, where there is no other
// path: it may be that nothing comes back because nothing is sent, and that what it was suspected
// for is one slice that never ends. What it has in flight counts again, so it is given no more than
// its window has room for, or one chunk, where all of that is late.
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

// lagging excludes a pair that is silent while its peers move. Where all are silent it is the other
// side, or the way there.
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
