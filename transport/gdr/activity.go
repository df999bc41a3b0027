package gdr

import (
	"fmt"
	"time"
)

// activity is what a lane has measured of its own progress. It is guarded by lane.mu.
type activity struct {
	progress time.Time
	sliceAt  time.Time     // when a slice was last armed or arrived
	pace     time.Duration // learned time from arming to arrival of the peer's slices
	doubted  time.Time     // the progress at which checkProgress has once found the lane silent
}

// arrived updates the pace with slices that have arrived at the time of the last progress. A gap
// longer than the silence was not caused by the path: one of the two processes was not running.
func (a *activity) arrived(slices int, silence time.Duration) {
	if took := a.progress.Sub(a.sliceAt); took < silence {
		a.pace += (took/time.Duration(slices) - a.pace) / paceWeight
	}
	a.sliceAt = a.progress
}

// patience is the time that a later attempt waits for a slice without progress, which the peer may
// write, before it stops the lane. With a fixed time below the time of a slice, each retry would
// end a healthy lane together with its other slices, which are then retried: lanes of a slow path
// would end each other for ever. A fence has less time, and no retries follow it.
func (a *activity) patience(cfg *Config) time.Duration {
	return max(cfg.Patience, min(patiencePaces*a.pace, cfg.Silence))
}

// checkProgress gives up a lane with posted writes and no completions. A slice that only waits for
// the peer's answer writes nothing, and may wait for a registration or another lane. A process that
// was suspended finds every lane silent and completions of all of them waiting, so a lane counts as
// silent only after two checks in a row with a poll of the follower between them.
func (l *lane) checkProgress(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil || now.Sub(l.activity.progress) < l.b.cfg.Silence {
		return
	}
	for i := range l.src.out {
		s := &l.src.out[i]
		limit := l.b.cfg.Silence
		if s.state < flight {
			limit *= patienceToAsk
		}
		if s.state != idle && now.Sub(s.at) > limit {
			if l.activity.doubted != l.activity.progress {
				l.activity.doubted = l.activity.progress
				l.wake()
				return
			}
			l.failLocked(fmt.Errorf("gdr: lane %d from rail %s to %s: no progress for %s", l.id,
				l.rail.cfg.Name, l.remote, now.Sub(l.activity.progress).Round(time.Millisecond)))
			return
		}
	}
}
