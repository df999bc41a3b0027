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
		if l.frames.unread() {
			l.fail(fmt.Errorf("gdr: lane %d: %d answers wait for the peer, which does not read",
				l.id, maxUnsent))
		}
		ended, failed := l.completed(buf[:n], stopping)
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
		l.b.cfg.Log.Warn("queue pair does not enter the error state", "transport", Name, "lane", l.id,
			"rail", l.rail.cfg.Name, "err", err)
	}
}

// settle releases the queue pair, and returns whether it still touches memory.
func (l *lane) settle() {
	err := l.releaseQueues()
	if err != nil {
		l.b.cfg.Log.Warn("queue pair not released; tried again", "transport", Name, "lane", l.id, "rail",
			l.rail.cfg.Name, "err", err)
	}
	if err == nil || l.flushed() {
		close(l.drained)
	}
	l.mu.Lock()
	l.kept = err != nil
	l.mu.Unlock()
	close(l.settled)
}

// releaseQueues destroys the lane's queue pair and completion queue. Called by the follower, and
// after it by reap alone.
func (l *lane) releaseQueues() error {
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
	if !due || l.releaseQueues() != nil {
		return
	}
	if !l.isDrained() {
		close(l.drained)
		l.releaseSlices()
	}
	l.trimStages(time.Time{}, true)
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

// releaseSlices releases the claims and keys of a lane that has ended. Its queue pair touches no
// memory.
func (l *lane) releaseSlices() {
	for i := range l.src.out {
		l.src.out[i].release(l.b)
	}
	for i := range l.dst.in {
		l.mu.Lock()
		l.dst.in[i].g = nil
		l.dst.changedLocked()
		l.mu.Unlock()
		l.dst.in[i].release()
	}
}

// flushed reports whether all posted requests have ended, with a flushed receive: a flush comes
// after everything that arrives.
func (l *lane) flushed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dst.sawFlush && l.src.done == l.src.posted && l.dst.recvs == l.dst.recvsDone
}

// completed processes completions. stopped: this end has stopped the queue pair. ended: no posted
// request is open.
func (l *lane) completed(batch []verbs.Completion, stopped bool) (ended, failed bool) {
	l.mu.Lock()
	came := 0
	for i := range batch {
		c := &batch[i]
		receive := c.ID&receiveMark != 0
		switch {
		case receive:
			l.dst.recvsDone++
			if c.Status != verbs.OK {
				l.dst.sawFlush = l.dst.sawFlush || c.Status == verbs.Flushed
				break
			}
			came++
			l.dst.verdicts <- c.Imm // has room: the lander posts the next receive
		case c.Status == verbs.OK:
			l.src.done = max(l.src.done, c.ID)
			l.src.good = max(l.src.good, c.ID)
		default:
			l.src.done = max(l.src.done, c.ID)
		}
		if l.cause == verbs.OK && !stopped {
			l.cause = c.Status
		}
		if c.Status != verbs.OK && c.Status != verbs.Flushed {
			l.failLocked(fmt.Errorf("gdr: lane %d from rail %s to %s: work request: %s (status %d)", l.id,
				l.rail.cfg.Name, l.remote, c.Status, c.Code))
		} else if c.Status == verbs.Flushed && l.err == nil {
			l.failLocked(fmt.Errorf("gdr: lane %d from rail %s to %s: the queue pair was flushed", l.id,
				l.rail.cfg.Name, l.remote))
		}
	}
	if len(batch) > 0 {
		l.activity.progress = time.Now()
		if came > 0 {
			l.activity.arrived(came, l.b.cfg.Silence)
		}
	}
	l.src.pumpLocked()
	l.mu.Unlock()
	l.src.judge()
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.src.done == l.src.posted && l.dst.recvs == l.dst.recvsDone, l.err != nil
}
