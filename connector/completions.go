package connector

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector/internal/eventfd"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
)

// completions writes the completion ring of a worker. Its fields are guarded by worker.mu.
type completions struct {
	w       *worker
	ring    *board.Producer
	event   int          // CQ eventfd, which wakes the shim; -1 once closed
	queue   []completion // wait for room in the ring
	retry   *time.Timer  // runs while queue is not empty
	retryIn time.Duration
}

type completion struct {
	typ, status uint16
	lease       uint64
	body        []byte
}

func encodeCompletion(c engines.Completion) completion {
	if c.Received {
		m := msg.Received{Bytes: c.Bytes, TookUS: uint64(max(c.Took, 0).Microseconds()),
			Transport: c.Transport, Reason: c.Reason, Recompute: c.Recompute,
			Pages: c.Pages, Entries: c.Entries}
		return completion{board.RecReceived, c.Status, c.Lease.ID, m.Append(nil)}
	}
	m := msg.Sent{Grants: uint32(max(c.Grants, 0)), Bytes: c.Bytes, Reason: c.Reason}
	return completion{board.RecSent, c.Status, c.Lease.ID, m.Append(nil)}
}

// postLocked writes a completion, or queues it behind those that wait for room in the ring.
func (c *completions) postLocked(next completion) {
	if len(c.queue) >= 2*c.w.s.opt.Limits.Leases {
		c.w.breakLocked(fmt.Errorf("the shim does not read its completion ring: %d completions wait",
			len(c.queue)))
		c.w.submissions.wakeLocked()
		return
	}
	c.queue = append(c.queue, next)
	if len(c.queue) == 1 {
		c.flushLocked()
	}
}

// flushLocked moves completions from the queue to the ring, and retries later if the ring is full:
// the protocol has no wake-up for room, and retries are enough for a shim that does not read.
func (c *completions) flushLocked() {
	if c.w.closed || c.w.broken != nil {
		return
	}
	wake := false
	sent := 0
	var full bool
	for _, next := range c.queue {
		wk, err := c.ring.Push(next.typ, next.status, next.lease, 0, next.body)
		if errors.Is(err, board.ErrTooBig) { // a long list of ranges; no list means everything
			next.body = encodeCompletion(engines.Completion{Received: next.typ == board.RecReceived,
				Reason: "too many ranges"}).body
			wk, err = c.ring.Push(next.typ, next.status, next.lease, 0, next.body)
		}
		if errors.Is(err, board.ErrFull) {
			full = true
			break
		}
		if err != nil {
			c.w.breakLocked(fmt.Errorf("completion ring: %w", err))
			c.w.submissions.wakeLocked()
			return
		}
		wake = wake || wk
		sent++
	}
	c.queue = slices.Delete(c.queue, 0, sent)
	if wake {
		eventfd.Signal(c.event)
	}
	if !full {
		c.retryIn = 0
		return
	}
	c.retryIn = min(max(2*c.retryIn, retryFirst), retryLast)
	if sent > 0 {
		c.retryIn = retryFirst
	}
	if c.retry == nil {
		c.retry = time.AfterFunc(c.retryIn, func() {
			c.w.mu.Lock()
			defer c.w.mu.Unlock()
			c.flushLocked()
		})
	} else {
		c.retry.Reset(c.retryIn)
	}
}

// stopLocked drops what is queued.
func (c *completions) stopLocked() {
	if c.retry != nil {
		c.retry.Stop()
	}
	c.queue = nil
	c.closeEventLocked()
}

func (c *completions) closeEventLocked() {
	_ = unix.Close(c.event)
	c.event = -1
}
