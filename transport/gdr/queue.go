package gdr

import (
	"fmt"
	"sync"
)

// frameQueue holds the frames that wait for a lane's socket. Their bound: maxUnsent frames, each
// with the spans of a slice.
type frameQueue struct {
	wake chan struct{} // capacity 1: the writer has work

	mu     sync.Mutex // below lane.mu
	buf    []byte     // guarded by mu
	unsent int        // frames in it; guarded by mu
}

// send queues a frame for the socket.
func (l *lane) send(h *head, runs []run) {
	if l.frames.put(h, runs) {
		l.wake()
	}
}

// put queues a frame and reports whether too many wait.
func (f *frameQueue) put(h *head, runs []run) (over bool) {
	f.mu.Lock()
	f.unsent++
	at := len(f.buf)
	f.buf = appendCells(appendHead(f.buf, h), runs)
	setCells(f.buf[at:])
	over = f.unsent > maxUnsent
	f.mu.Unlock()
	select {
	case f.wake <- struct{}{}:
	default:
	}
	return over
}

// unread reports whether more frames wait than for a peer that reads.
func (f *frameQueue) unread() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.unsent > maxUnsent
}

// take returns the queued frames in exchange for an empty buffer.
func (f *frameQueue) take(empty []byte) (queued []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	queued, f.buf, f.unsent = f.buf, empty[:0], 0
	return queued
}

// write sends the queued frames.
func (l *lane) write(over <-chan struct{}) {
	var buf []byte
	for {
		if buf = l.frames.take(buf); len(buf) > 0 {
			if _, err := l.c.Write(buf); err != nil {
				l.fail(fmt.Errorf("gdr: lane %d: %w", l.id, err))
			}
			continue
		}
		select {
		case <-l.frames.wake:
		case <-over:
			return
		}
	}
}
