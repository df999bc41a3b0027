// Package lines writes lines to a file or pipe from a goroutine of its own, so that a disk that
// stalls, or a reader that does not read, holds up no caller.
package lines

import (
	"bytes"
	"io"
	"sync"
	"time"
)

// Bounds of a Writer.
const (
	// MaxQueued bytes wait, beside those that are being written. A Write that is larger alone has
	// room in an empty queue.
	MaxQueued = 4 << 20
	FlushTime = 2 * time.Second // of Close
)

// Writer is an io.Writer whose Write does not wait for the destination. Each Write has one or more
// whole lines, which stay together. Lines for which the queue has no room, and those that the
// destination refuses, are lost and counted.
type Writer struct {
	w      io.Writer
	onLost func(lines int) // follows when the destination takes lines again
	onErr  func(error)     // the first error of the destination since it took lines

	mu      sync.Mutex // protects all below
	changed sync.Cond  // queue, done or closed have changed
	queue   []byte
	queued  uint64 // bytes that were in the queue, all in all
	done    uint64 // of those, written or lost
	lost    int
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

// Write queues p, or counts its lines as lost. It returns no error.
func (l *Writer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || len(l.queue) > 0 && len(l.queue)+len(p) > MaxQueued {
		l.lost += bytes.Count(p, newline)
		return len(p), nil
	}
	l.queue = append(l.queue, p...)
	l.queued += uint64(len(p))
	l.changed.Broadcast()
	return len(p), nil
}

var newline = []byte("\n")

func (l *Writer) run() {
	var spare []byte
	failed, torn := false, false // the last Write failed; it ended within a line
	for {
		l.mu.Lock()
		for len(l.queue) == 0 && !l.closed {
			l.changed.Wait()
		}
		if len(l.queue) == 0 {
			l.mu.Unlock()
			return
		}
		batch, lost := l.queue, l.lost
		l.queue, l.lost = spare[:0], 0
		l.mu.Unlock()
		var err error
		if torn {
			_, err = l.w.Write(newline)
			torn = err != nil
		}
		n := 0
		if err == nil {
			n, err = l.w.Write(batch)
			torn = n > 0 && batch[n-1] != newline[0]
		}
		switch {
		case err == nil && lost > 0 && l.onLost != nil:
			l.onLost(lost)
		case err != nil && !failed && l.onErr != nil:
			l.onErr(err)
		}
		failed = err != nil
		l.mu.Lock()
		if failed {
			l.lost += lost + bytes.Count(batch[n:], newline)
		}
		l.done += uint64(len(batch))
		l.changed.Broadcast()
		l.mu.Unlock()
		if spare = batch; cap(spare) > MaxQueued {
			spare = nil // of one large Write
		}
	}
}

// Flush waits until all that was written before is with the destination or lost, at most for a
// time. It reports whether it is. Flush(0) does not wait.
func (l *Writer) Flush(limit time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	target := l.queued
	if l.done >= target || limit <= 0 {
		return l.done >= target
	}
	over := false
	t := time.AfterFunc(limit, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		over = true
		l.changed.Broadcast()
	})
	defer t.Stop()
	for !over && l.done < target {
		l.changed.Wait()
	}
	return l.done >= target
}

// Close ends the Writer, after FlushTime at most. Lines that the destination has not taken by then
// are lost. The destination stays open.
func (l *Writer) Close() error {
	start := time.Now()
	l.Flush(FlushTime) // what onLost writes then is still taken
	l.mu.Lock()
	l.closed = true
	l.changed.Broadcast()
	l.mu.Unlock()
	l.Flush(FlushTime - time.Since(start))
	return nil
}
