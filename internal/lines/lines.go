// SPDX-License-Identifier: Apache-2.0

// Package lines writes lines to a file or pipe from a goroutine of its own, so that a disk that
// stalls, or a reader that does not read, holds up no caller.
package lines

import (
	"io"
	"sync"
	"time"
)

// Bounds of a Writer.
const (
	MaxQueued = 4 << 20         // bytes that wait, beside as many that are being written
	FlushTime = 2 * time.Second // of Close
)

// Writer is an io.Writer whose Write does not wait for the destination. Each Write has one or more
// whole lines, which stay together. Lines for which the queue has no room are lost and counted.
type Writer struct {
	w      io.Writer
	onLost func(lines int) // follows when the destination takes lines again
	onErr  func(error)     // the first error of the destination
	failed bool            // of the goroutine

	mu      sync.Mutex // protects all below
	changed sync.Cond  // queue, busy or closed have changed
	queue   []byte
	lost    int
	busy    bool // lines are being written
	closed  bool
}

// New starts a Writer. onLost and onErr may be nil. They run on the Writer's goroutine, and may
// write to it.
func New(w io.Writer, onLost func(lines int), onErr func(error)) *Writer {
	l := &Writer{w: w, onLost: onLost, onErr: onErr}
	l.changed.L = &l.mu
	go l.run()
	return l
}

// Write queues p, or counts it as lost. It returns no error.
func (l *Writer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || len(l.queue)+len(p) > MaxQueued {
		l.lost++
		return len(p), nil
	}
	l.queue = append(l.queue, p...)
	l.changed.Broadcast()
	return len(p), nil
}

func (l *Writer) run() {
	var spare []byte
	for {
		l.mu.Lock()
		l.busy = false
		l.changed.Broadcast()
		for len(l.queue) == 0 && !l.closed {
			l.changed.Wait()
		}
		if len(l.queue) == 0 {
			l.mu.Unlock()
			return
		}
		batch, lost := l.queue, l.lost
		l.queue, l.lost, l.busy = spare[:0], 0, true
		l.mu.Unlock()
		_, err := l.w.Write(batch)
		spare = batch
		if err != nil && !l.failed {
			l.failed = true
			if l.onErr != nil {
				l.onErr(err)
			}
		}
		if lost > 0 && l.onLost != nil {
			l.onLost(lost)
		}
	}
}

// Flush waits until everything that was written before is with the destination, at most for a time.
// It reports whether it is. Flush(0) does not wait.
func (l *Writer) Flush(atMost time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.idle() || atMost <= 0 {
		return l.idle()
	}
	over := false
	t := time.AfterFunc(atMost, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		over = true
		l.changed.Broadcast()
	})
	defer t.Stop()
	for !over && !l.idle() {
		l.changed.Wait()
	}
	return l.idle()
}

// idle reports whether nothing waits, with mu held.
func (l *Writer) idle() bool { return len(l.queue) == 0 && !l.busy }

// Close ends the Writer, after FlushTime at most. Lines that the destination has not taken by then
// are lost. The destination stays open.
func (l *Writer) Close() error {
	l.mu.Lock()
	l.closed = true
	l.changed.Broadcast()
	l.mu.Unlock()
	l.Flush(FlushTime)
	return nil
}
