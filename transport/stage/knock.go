package stage

import (
	"sync"
	"time"
)

// knocker says whether kernels of ours have a GPU to themselves: a kernel that does nothing knocks before, and is back in 20 us where nobody else computes.
// [measured, H200] beside an engine it waits 1.7 ms for a slice of the GPU's time. Kernels that reach the host's memory move 30 to 50 GB/s alone; beside
// an engine they move 8 to 14, and it loses 12 to 45%. Under MPS nobody knocks (reaching).
type knocker struct {
	fixed Executor
	now   func() time.Time
	idle  func(h *hop) bool // knocks, with a hop of the caller's

	mu      sync.Mutex // protects all below
	changed sync.Cond  // nobody is inside, or has knocked
	inside  int        // hops under way
	knocks  bool       // somebody does
	heard   time.Time  // of the last knock's end
	pause   time.Duration
	until   time.Time // nobody knocks again
	calls   [2][numExecutors]uint64
	bytes   [2][numExecutors]uint64
}

// How often kernels knock. Once they are inside, a knock would wait for themselves: now and then all of them end before the next one.
const (
	knockIdle  = 300 * time.Microsecond
	knockGood  = time.Millisecond      // what was heard is taken to last so long
	knockEvery = 50 * time.Millisecond // while lists follow each other
	knockFirst = 20 * time.Millisecond // after one that found an engine, and twice as long after each more
	knockLast  = 2 * time.Second
)

func newKnocker(fixed Executor, now func() time.Time, idle func(*hop) bool) *knocker {
	k := &knocker{fixed: fixed, now: now, idle: idle}
	k.changed.L = &k.mu
	return k
}

// enter reports whether a hop may go by kernels; then leave says that it ended. Whoever comes while all are to end, or while somebody knocks, waits for
// that, which is a hop at most. h is the caller's: who is inside, or knocks, waits for no other one, and so nobody waits for them in vain.
func (k *knocker) enter(h *hop) bool {
	if k == nil {
		return false
	}
	if k.fixed != Auto {
		return k.fixed == Pack
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for {
		at := k.now()
		good := at.Sub(k.heard)
		switch {
		case at.Before(k.until):
			return false
		case !k.knocks && (k.inside > 0 && good < knockEvery || good < knockGood):
			k.inside++
			return true
		case k.knocks || k.inside > 0:
			k.changed.Wait()
			continue
		}
		k.knocks = true
		k.mu.Unlock()
		ok := k.idle(h)
		k.mu.Lock()
		k.knocks = false
		if k.heard, k.pause = k.now(), min(max(2*k.pause, knockFirst), knockLast); ok {
			k.pause = 0
		}
		k.until = k.heard.Add(k.pause)
		k.changed.Broadcast()
	}
}

func (k *knocker) leave() {
	if k.fixed != Auto {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.inside--; k.inside == 0 {
		k.changed.Broadcast()
	}
}

func (k *knocker) count(e Executor, dir Direction, bytes uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.calls[dir][e]++
	k.bytes[dir][e] += bytes
}

// state appends what went between the pages of the host and a GPU of that name.
func (k *knocker) state(out []WayState, gpu string) []WayState {
	k.mu.Lock()
	defer k.mu.Unlock()
	for dir, w := range [2]WayState{HostToDevice: {From: "pages", To: gpu}, DeviceToHost: {From: gpu, To: "pages"}} {
		for _, e := range []Executor{Pack, Copy} {
			if n := k.calls[dir][e]; n > 0 {
				w.Executors = append(w.Executors, ExecutorState{Executor: e.String(), Calls: n, Bytes: k.bytes[dir][e]})
			}
		}
		if w.Executors != nil {
			out = append(out, w)
		}
	}
	return out
}

// idle knocks: it reports whether a kernel that does nothing is back by then.
func (u *GPU) idle(h *hop, by time.Duration) bool {
	start := time.Now()
	if u.dev.PackUniform(h.queue, h.listPtr, 0, u.staging, packAlign) != nil || h.queue.Record(h.prompt) != nil || h.prompt.Sync() != nil {
		return false
	}
	return time.Since(start) < by
}

// knockerOf finds that of a GPU.
func (c *Copier) knockerOf(u *GPU) *knocker {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.knocks[u]
	if k == nil {
		k = newKnocker(u.reaching(), time.Now, func(h *hop) bool { return u.idle(h, c.shape.idle) })
		c.knocks[u] = k
	}
	return k
}
