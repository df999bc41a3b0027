package connector

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvspray/kvspray/connector/internal/watch"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
)

// A destination lease or a copy whose record names a stream mark is held until the engine's stream
// has passed that mark. Earlier steps of the engine may still write the blocks: a step in flight
// may compute an aborted request whose blocks the engine has already given to this one. The control
// layer does not receive a held lease, so nothing can be granted or written.
type held struct {
	mark  uint64
	begin func(left time.Duration)
	due   time.Duration // in the time of watch.Now
	timer *time.Timer   // checks at due if no flag moves
	// of a destination lease
	expect *engines.Expect
}

// beginLocked has begin open l, at once or when the stream has passed the mark. begin receives the
// rest of the deadline, which counts from the record: the shim waits no longer for a held lease.
func (w *worker) beginLocked(l *lease, mark uint64, deadline time.Duration,
	begin func(left time.Duration)) {
	if mark <= w.flags.Mark() {
		begin(deadline)
		return
	}
	l.held = &held{mark: mark, begin: begin, due: watch.Now() + deadline,
		timer: time.AfterFunc(deadline, w.pump)}
	w.held[l.id] = l
	w.publishWaitingLocked()
}

// followHeldLocked opens the leases whose mark the stream has passed, in order, and ends those past
// their deadline.
func (w *worker) followHeldLocked() {
	if len(w.held) == 0 || w.closed || w.broken != nil {
		return
	}
	at, mark := watch.Now(), w.flags.Mark()
	for _, id := range slices.Sorted(maps.Keys(w.held)) {
		l := w.held[id]
		switch h := l.held; {
		case h.due <= at:
			w.endHeldLocked(l, board.Expired, fmt.Sprintf(
				"the engine's stream did not pass mark %d before the deadline (it is at %d): its GPU is "+
					"stuck or overloaded", h.mark, mark))
		case h.mark <= mark:
			w.unholdLocked(l)
			h.begin(h.due - at)
		}
	}
}

// endHeldLocked completes a lease that the control layer has not received.
func (w *worker) endHeldLocked(l *lease, status uint16, reason string) {
	w.completions.postLocked(encodeCompletion(engines.Completion{Lease: w.leaseID(l), Received: true,
		Status: status, Reason: reason}))
	if x := l.held.expect; x != nil {
		w.eventLocked(engines.Event{Kind: engines.DestRefused, Expect: x, Reason: reason})
	}
	w.closeLeaseLocked(l)
}

func (w *worker) unholdLocked(l *lease) {
	l.held.timer.Stop()
	l.held = nil
	delete(w.held, l.id)
	w.publishWaitingLocked()
}
