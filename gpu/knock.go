package gpu

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
	idle  func() bool // knocks

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
	knockGood  = time.Millisecond      // what was heard is taken to last so long
	knockEvery = 50 * time.Millisecond // while lists follow each other
	knockFirst = 20 * time.Millisecond // after one that found an engine, and twice as long after each more
	knockLast  = 2 * time.Second
)

func newKnocker(fixed Executor, now func() time.Time, idle func() bool) *knocker {
	k := &knocker{fixed: fixed, now: now, idle: idle}
	k.changed.L = &k.mu
	return k
}

// enter reports whether a hop may go by kernels; then leave says that it ended. Whoever comes while all are to end, or while somebody knocks, waits for
// that, which is a hop or knockIdle at most. A knock needs no hop: whoever waits for one has its own.
func (k *knocker) enter() bool {
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
		ok := k.idle()
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

// knockIdle is the longest that a knock takes on an idle GPU.
const knockIdle = 300 * time.Microsecond

// door is where a GPU is knocked at.
type door struct {
	mu      sync.Mutex // protects all below
	queue   Queue
	back    Event
	knocked bool // by a kernel that was not back in time, and may still wait
	closed  bool // nobody knocks any more
}

// idle knocks: it reports whether a kernel that does nothing is back by then. Nobody waits longer, as one beside an engine would be: while one has not come back
// there is no other.
func (u *GPU) idle(by time.Duration) bool {
	d := &u.door
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return false
	}
	if d.knocked {
		if back, err := d.back.Done(); !back || err != nil {
			return false
		}
	}
	start := time.Now()
	if u.dev.PackUniform(d.queue, u.arenaPtr, 0, u.staging, packAlign) != nil || d.queue.Record(d.back) != nil {
		d.closed = true // of a kernel without a mark nobody knows when it is back
		return false
	}
	back, err := backBy(d.back, start.Add(by))
	d.knocked = !back
	return back && err == nil && time.Since(start) < by // whoever looks late may find one that has waited
}

// quiet waits until no knock is under way, and ends them, or it is late.
func (d *door) quiet(late <-chan time.Time) bool {
	for {
		d.mu.Lock()
		if d.knocked {
			back, err := d.back.Done()
			d.knocked = !back && err == nil
		}
		knocked := d.knocked
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
func (c *Copier) knockerOf(u *GPU) *knocker {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.knocks[u]
	if k == nil {
		k = newKnocker(u.reaching(), time.Now, func() bool { return u.idle(c.shape.idle) })
		c.knocks[u] = k
	}
	return k
}
