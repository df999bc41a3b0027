package peer

import (
	"fmt"
	"sync"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/delivery"
)

// loop delivers the frames that this process sends to itself: in order, from one goroutine, like
// those of a peer.
type loop struct {
	*core

	mu    sync.Mutex // protects all below
	queue []*peerv1.ControlFrame
	busy  bool // deliver runs
}

func (l *loop) send(f *peerv1.ControlFrame) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if limit, _ := delivery.Limits(f); len(l.queue) >= limit {
		return fmt.Errorf("peer: send to this process: %w", ErrQueueFull)
	}
	l.queue = append(l.queue, f)
	if !l.busy {
		l.busy = l.tasks.run(l.deliver)
	}
	return nil
}

func (l *loop) deliver() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.queue) > 0 && l.tasks.ctx.Err() == nil {
		f := l.queue[0]
		l.queue = l.queue[1:]
		l.mu.Unlock()
		l.opt.Handler.Control(l.opt.Boot, f)
		l.mu.Lock()
	}
	l.busy, l.queue = false, nil
}
