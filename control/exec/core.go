package exec

import (
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// core is what every part of an executor uses: configuration, timers, the slice scheduler, and the
// actions of the current event.
type core struct {
	cfg       Config
	agenda    agenda
	spray     *spray.Scheduler
	draining  bool
	out       []Action
	late      []Action // follow what the event sends; emptied by assign
	outSlices []transport.Slice
}

// emit appends an action and returns it for its fields to be set.
func (c *core) emit(k Kind) *Action {
	c.out = append(c.out, Action{Kind: k})
	return &c.out[len(c.out)-1]
}

func (c *core) send(to transfer.Boot, f *peerv1.ControlFrame) {
	a := c.emit(Send)
	a.Peer, a.Frame = to, f
}

func (c *core) span(d time.Duration) time.Duration {
	if d <= 0 {
		return c.cfg.Deadline
	}
	return min(d, MaxDeadline)
}

// sendLate emits the actions that follow what this event moves.
func (c *core) sendLate() {
	if len(c.late) > 0 {
		c.out = append(c.out, c.late...)
		clear(c.late)
		c.late = c.late[:0]
	}
}

// Drain moves the actions of the last events into b, overwrites its former content, and reports
// whether there are any.
func (c *core) Drain(b *Batch) bool {
	if len(c.out) == 0 {
		b.Actions = b.Actions[:0]
		return false
	}
	clear(b.Actions)
	b.Actions, c.out = c.out, b.Actions[:0]
	b.slices, c.outSlices = c.outSlices, b.slices[:0]
	for i := range b.Actions {
		if a := &b.Actions[i]; a.Kind == Move {
			a.Slices = b.slices[a.first : a.first+a.count : a.first+a.count]
		}
	}
	return true
}
