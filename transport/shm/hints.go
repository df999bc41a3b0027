package shm

import (
	"runtime"
	"time"
)

// hints is the state of a lane's wake-up hints. It is the reader's.
type hints struct {
	hinted bool // a hint came since the reader's last check
	asked  bool // the peer wants memory here to be written, since that check
	handed bool // some of that went to a copier or a mover

	since   time.Time // time of a hint without a pull since then
	ignored time.Time // hints are ignored until then
	used    time.Time // time of the last pulls, or of the last warming of the GPUs
}

// stayAwake makes the reader poll after a hint.
func (l *lane) stayAwake(in *inbox, now time.Time) {
	// too late
	if late := l.hints.since.Add(l.b.cfg.hinted); !l.hints.since.IsZero() && now.After(late) {
		l.hints.since, l.hints.ignored = time.Time{}, late.Add(ignoredFor)
	}
	if l.hints.asked {
		l.hints.since, l.hints.used = time.Time{}, now
		if in.polls() {
			in.pollUntil(now.Add(l.b.cfg.stay))
		}
	}
	if l.hints.hinted && !now.Before(l.hints.ignored) {
		if l.hints.since.IsZero() {
			l.hints.since = now
		}
		in.pollUntil(l.hints.since.Add(l.b.cfg.hinted))
		if in.polls() && now.Sub(l.hints.used) > l.b.cfg.cold {
			l.hints.used = now
			l.dst.warm()
		}
	}
	if l.hints.handed && in.polls() {
		// the woken goroutine starts on this thread; waking another thread takes longer
		runtime.Gosched()
	}
}
