package connector

import (
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/connector/internal/watch"
	"github.com/kvspray/kvspray/connector/msg"
)

// signals is the side of a worker that the watcher reads without its lock.
type signals struct {
	w *worker

	waiting atomic.Int32 // leases that wait for steps or for a stream mark
	holding atomic.Bool  // some of them wait for a stream mark
	matched atomic.Bool  // last argument of Follow
	// in the time of watch.Now: watch.Fresh after the last source lease was opened
	fresh atomic.Int64

	// highest flags that the watcher saw; only the watcher uses it and the next field
	seen     []uint64
	seenMark uint64

	later *time.Timer // pending check of flags that nothing awaits; guarded by worker.mu
}

var _ watch.Worker = (*signals)(nil)

// Waiting implements watch.Worker.
func (s *signals) Waiting() bool { return s.waiting.Load() > 0 }

// Awaited implements watch.Worker: another sidecar waits for the layers or will soon, or a lease
// waits for the stream mark.
func (s *signals) Awaited(at time.Duration) bool {
	return s.matched.Load() || s.holding.Load() || at < time.Duration(s.fresh.Load())
}

// Moved implements watch.Worker. It compares the flags with the highest values that the watcher
// saw; flags of replays fall when a step begins, which is no change. Three loads per flag at most,
// no lock.
func (s *signals) Moved() int {
	moved := 0
	for i := range s.seen {
		if v := s.w.flags.Layer(i); v > s.seen[i] {
			s.seen[i] = v
			moved++
		}
	}
	if v := s.w.flags.Mark(); v > s.seenMark {
		s.seenMark = v
		moved++
	}
	return moved
}

// Pump implements watch.Worker.
func (s *signals) Pump() { s.w.pump() }

// LookLater implements watch.Worker.
func (s *signals) LookLater() {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	if s.w.closed || s.later != nil {
		return
	}
	s.later = time.AfterFunc(watch.Alone, func() {
		s.w.mu.Lock()
		s.later = nil
		s.w.mu.Unlock()
		s.w.pump()
	})
}

// Follow sets whether a source lease of w has a matching receiver. Without one, checking layers
// with each record of the ring and every watch.Alone is early enough; following each layer would
// take most of an idle sidecar's CPU budget.
func (w *worker) Follow(matched bool) {
	w.signals.matched.Store(matched)
	if matched && w.signals.Waiting() {
		w.s.watch.Add(&w.watched) // its first check covers earlier changes
	}
}

// HeldOn sends HELD. If the socket is closed, the engine ends the lease at its own deadline.
func (w *worker) HeldOn(lease uint64) {
	w.mu.Lock()
	c := w.session
	w.mu.Unlock()
	if c != nil {
		c.send(&msg.Held{Lease: lease})
	}
}
