package gdr

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/kvspray/kvspray/internal/sys/verbs"
)

// follow polls completions until the lane has failed and all posted requests have ended. If a
// device does not flush, follow destroys the queue pair; if that fails too, the lane stays stuck,
// with its claims and keys.
func (l *lane) follow() {
	buf := make([]verbs.Completion, pollBatch)
	var flush <-chan time.Time
	var dead <-chan struct{}
	for stopping := false; ; {
		looked := l.look(nil)
		n, err := l.cq.Poll(buf)
		if err != nil {
			l.fail(fmt.Errorf("gdr: lane %d: %w", l.id, err))
		}
		if l.unread() {
			l.fail(fmt.Errorf("gdr: lane %d: %d answers wait for the peer, which does not read", l.id, maxUnsent))
		}
		ended, failed := l.completed(buf[:n])
		if looked != nil {
			close(looked)
		}
		switch {
		case failed && !stopping:
			// Without a lock: a device may be slow, and code that fails a lane must not wait for
			// it.
			l.stopQueuePair()
			stopping, flush, dead = true, time.After(l.b.cfg.Drain), l.dev.dead
			continue
		case stopping && (ended || err != nil):
			l.settle()
			return
		case n > 0:
			continue
		}
		select {
		case <-l.cq.Ready():
			continue
		case <-l.kick:
			continue
		case <-flush:
		case <-dead: // it flushes nothing any more
		}
		l.settle()
		return
	}
}

// look replaces the channel that is closed after the follower's next poll, and returns the previous
// one.
func (l *lane) look(next chan struct{}) (before chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before, l.looked = l.looked, next
	return before
}

// lookAgain makes the follower poll completions. The result is closed afterwards; completions that
// it found count as progress.
func (l *lane) lookAgain() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.looked == nil {
		l.looked = make(chan struct{})
	}
	l.wake()
	return l.looked
}

// stopQueuePair moves it to the error state, which flushes it.
func (l *lane) stopQueuePair() {
	if err := l.q.ToError(); err != nil && !errors.Is(err, net.ErrClosed) {
		l.b.cfg.Log.Warn("queue pair does not enter the error state", "transport", Name, "lane", l.id, "rail", l.rail.cfg.Name, "err", err)
	}
}

// settle releases the queue pair, and returns whether it still touches memory.
func (l *lane) settle() {
	err := l.giveBack()
	if err != nil {
		l.b.cfg.Log.Warn("queue pair not released; tried again", "transport", Name, "lane", l.id, "rail", l.rail.cfg.Name, "err", err)
	}
	if err == nil || l.flushed() {
		close(l.drained)
	}
	l.mu.Lock()
	l.kept = err != nil
	l.mu.Unlock()
	close(l.settled)
}

// giveBack destroys the lane's queue pair and completion queue. Called by the follower, and after
// it by reap alone.
func (l *lane) giveBack() error {
	if err := l.q.Close(); err != nil {
		return err
	}
	if err := l.cq.Close(); err != nil {
		return err
	}
	l.dev.domains.leave(l.domain)
	return nil
}

// reap tries again to release the resources that the device kept when the lane ended. Called by one
// goroutine at a time.
func (l *lane) reap() {
	l.mu.Lock()
	due := l.kept && l.over
	l.mu.Unlock()
	if !due || l.giveBack() != nil {
		return
	}
	if !l.isDrained() {
		close(l.drained)
		l.letGo()
	}
	l.dev.keep(-1)
	l.b.mu.Lock()
	delete(l.b.lanes, l)
	l.b.mu.Unlock()
}

func (l *lane) isDrained() bool {
	select {
	case <-l.drained:
		return true
	default:
		return false
	}
}

// letGo releases the claims and keys of a lane that has ended. Its queue pair touches no memory.
func (l *lane) letGo() {
	for i := range l.out {
		l.out[i].release(l.b)
	}
	for i := range l.in {
		l.mu.Lock()
		l.in[i].g = nil
		l.changedLocked()
		l.mu.Unlock()
		l.in[i].release()
	}
}

// flushed reports whether all posted requests have ended, with a flushed receive: a flush comes
// after everything that arrives.
func (l *lane) flushed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sawFlush && l.done == l.posted && l.recvs == l.recvsDone
}

// completed processes completions. ended: no posted request is open.
func (l *lane) completed(batch []verbs.Completion) (ended, failed bool) {
	l.mu.Lock()
	came := 0
	for i := range batch {
		c := &batch[i]
		receive := c.ID&receiveMark != 0
		switch {
		case receive:
			l.recvsDone++
			if c.Status != verbs.OK {
				l.sawFlush = l.sawFlush || c.Status == verbs.Flushed
				break
			}
			came++
			l.verdicts <- c.Imm // has room: the lander posts the next receive
		case c.Status == verbs.OK:
			l.done = max(l.done, c.ID)
			l.good = max(l.good, c.ID)
		default:
			l.done = max(l.done, c.ID)
		}
		if c.Status != verbs.OK && c.Status != verbs.Flushed {
			l.failLocked(fmt.Errorf("gdr: lane %d from rail %s to %s: work request: %s (status %d)", l.id, l.rail.cfg.Name, l.remote, c.Status, c.Code))
		} else if c.Status == verbs.Flushed && l.err == nil {
			l.failLocked(fmt.Errorf("gdr: lane %d from rail %s to %s: the queue pair was flushed", l.id, l.rail.cfg.Name, l.remote))
		}
	}
	if len(batch) > 0 {
		l.progress = time.Now()
		if came > 0 {
			l.learnLocked(l.progress.Sub(l.heard), came)
			l.heard = l.progress
		}
	}
	l.pumpLocked()
	l.mu.Unlock()
	l.judge()
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.done == l.posted && l.recvs == l.recvsDone, l.err != nil
}

// learnLocked updates the pace with the time of the last slices. A gap longer than the silence was
// not caused by the path: one of the two processes was not running.
func (l *lane) learnLocked(took time.Duration, slices int) {
	if took < l.b.cfg.Silence {
		l.pace += (took/time.Duration(slices) - l.pace) / paceWeight
	}
}

// patienceLocked is the time that a later attempt waits for a slice without progress, which the
// peer may write, before it stops the lane. With a fixed time below the time of a slice, each retry
// would end a healthy lane together with its other slices, which are then retried: lanes of a slow
// path would end each other for ever. A fence has less time, and no retries follow it.
func (l *lane) patienceLocked() time.Duration {
	return max(l.b.cfg.Patience, min(patiencePaces*l.pace, l.b.cfg.Silence))
}

// checkProgress gives up a lane with posted writes and no completions. A slice that only waits for
// the peer's answer writes nothing, and may wait for a registration or another lane. A process that
// was suspended finds every lane silent and completions of all of them waiting, so a lane counts as
// silent only after two checks in a row with a poll of the follower between them.
func (l *lane) checkProgress(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil || now.Sub(l.progress) < l.b.cfg.Silence {
		return
	}
	for i := range l.out {
		s := &l.out[i]
		limit := l.b.cfg.Silence
		if s.state < flight {
			limit *= patienceToAsk
		}
		if s.state != idle && now.Sub(s.at) > limit {
			if l.doubted != l.progress {
				l.doubted = l.progress
				l.wake()
				return
			}
			l.failLocked(fmt.Errorf("gdr: lane %d from rail %s to %s: no progress for %s", l.id, l.rail.cfg.Name, l.remote, now.Sub(l.progress).Round(time.Millisecond)))
			return
		}
	}
}
