package gpu

import (
	"sync"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/policy"
)

// knockIdle is the longest that a knock takes on an idle GPU.
const idleLimit = 300 * time.Microsecond

// door is where a GPU is knocked at.
type idleKernel struct {
	mu      sync.Mutex // protects all below
	queue   device.Queue
	done    device.Event
	pending bool // by a kernel that was not back in time, and may still wait
	closed  bool // nobody knocks any more
}

// idle knocks: it reports whether a kernel that does nothing is back by then. Nobody waits longer, as one beside an engine would be: while one has not come back
// there is no other.
func (u *GPU) isIdle(by time.Duration) bool {
	d := &u.idleKernel
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return false
	}
	if d.pending {
		if back, err := d.done.Done(); !back || err != nil {
			return false
		}
	}
	start := time.Now()
	if u.dev.PackUniform(d.queue, u.arenaPtr, 0, u.staging, device.Align) != nil || d.queue.Record(d.done) != nil {
		d.closed = true // of a kernel without a mark nobody knows when it is back
		return false
	}
	back, err := device.DoneBy(d.done, start.Add(by))
	d.pending = !back
	return back && err == nil && time.Since(start) < by // whoever looks late may find one that has waited
}

// quiet waits until no knock is under way, and ends them, or it is late.
func (d *idleKernel) drain(late <-chan time.Time) bool {
	for {
		d.mu.Lock()
		if d.pending {
			back, err := d.done.Done()
			d.pending = !back && err == nil
		}
		knocked := d.pending
		d.closed = d.closed || !knocked
		d.mu.Unlock()
		if !knocked {
			return true
		}
		select {
		case <-time.After(closePause):
		case <-late:
			return false
		}
	}
}

// knockerOf finds that of a GPU.
func (c *Copier) idleProbeOf(u *GPU) *policy.IdleProbe {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.probes[u]
	if k == nil {
		k = policy.NewIdleProbe(u.mappedMethod(), time.Now, func() bool { return u.isIdle(c.shape.idleLimit) })
		c.probes[u] = k
	}
	return k
}
