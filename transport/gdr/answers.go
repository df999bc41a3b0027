package gdr

import "fmt"

// say queues a frame for the socket.
func (l *lane) say(h *head, runs []run) {
	l.outMu.Lock()
	l.unsent++
	at := len(l.outBuf)
	l.outBuf = appendCells(appendHead(l.outBuf, h), runs)
	setCells(l.outBuf[at:])
	over := l.unsent > maxUnsent
	l.outMu.Unlock()
	if over {
		l.wake()
	}
	select {
	case l.outWake <- struct{}{}:
	default:
	}
}

// unread reports whether more frames wait than for a peer that reads.
func (l *lane) unread() bool {
	l.outMu.Lock()
	defer l.outMu.Unlock()
	return l.unsent > maxUnsent
}

// write sends the queued frames. Its bound: maxUnsent frames, each with the spans of a slice.
func (l *lane) write(over <-chan struct{}) {
	var buf []byte
	for {
		l.outMu.Lock()
		buf, l.outBuf, l.unsent = l.outBuf, buf[:0], 0
		l.outMu.Unlock()
		if len(buf) > 0 {
			if _, err := l.c.Write(buf); err != nil {
				l.fail(fmt.Errorf("gdr: lane %d: %w", l.id, err))
			}
			continue
		}
		select {
		case <-l.outWake:
		case <-over:
			return
		}
	}
}
