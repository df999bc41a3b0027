package gpu

import (
	"sync"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/policy"
)

// idleLimit is the longest time of an empty kernel on an idle GPU.
const idleLimit = 300 * time.Microsecond

// idleKernel runs an empty kernel to detect other work on a GPU.
type idleKernel struct {
	mu      sync.Mutex // protects all below
	queue   device.Queue
	done    device.Event
	pending bool // a kernel did not end in time, and may still wait
	closed  bool // no further kernel is launched
}

// newIdleProbe makes the only probe of a GPU: all kernels that share its result end before the next
// empty kernel runs, which would wait for them.
func (u *GPU) newIdleProbe() *policy.IdleProbe {
	return policy.NewIdleProbe(u.mappedMethod(), time.Now,
		func() bool { return u.isIdle(u.gpus.idleLimit) })
}

// isIdle reports whether an empty kernel ends within limit. It does not wait longer, as it would
// beside an engine. While one kernel is pending it launches no other.
func (u *GPU) isIdle(limit time.Duration) bool {
	k := &u.idleKernel
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return false
	}
	if k.pending {
		if done, err := k.done.Done(); !done || err != nil {
			return false
		}
	}
	start := time.Now()
	if u.dev.PackUniform(k.queue, u.arenaPtr, 0, u.staging, device.Align) != nil ||
		k.queue.Record(k.done) != nil {
		k.closed = true // without a mark the end of the kernel cannot be seen
		return false
	}
	done, err := device.DoneBy(k.done, start.Add(limit))
	k.pending = !done
	// A thread that was delayed may see the end of a kernel that waited.
	return done && err == nil && time.Since(start) < limit
}

// drain waits until no kernel is pending and forbids further ones. It returns false when late
// fires.
func (k *idleKernel) drain(late <-chan time.Time) bool {
	for {
		k.mu.Lock()
		if k.pending {
			done, err := k.done.Done()
			k.pending = !done && err == nil
		}
		pending := k.pending
		k.closed = k.closed || !pending
		k.mu.Unlock()
		if !pending {
			return true
		}
		select {
		case <-time.After(closePause):
		case <-late:
			return false
		}
	}
}
