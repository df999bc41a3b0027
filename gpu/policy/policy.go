package policy

import (
	"sync"
	"time"
)

// How often an executor that is not in favour is tried, so that a change of the engine's load is noticed: less and less often from when it lost its
// favour. [measured, H200] beside a busy engine one pack in 64 slices cost the engine 9 to 13%: its kernel takes a time slice of the whole GPU.
// Thirty a second, because two others took turns in favour, cost 4%.
const (
	trialFirst = 20 * time.Millisecond
	trialLast  = 2 * time.Second
	trialWins  = 4 // in a row put it in favour
)

// learnWeight is the weight of one observation.
const learnWeight = 1.0 / 8

// kernelPrice is how much quicker kernels have to be than copy engines, which take nothing from the engine. [measured, H200, to a GPU that computes] 13% more
// by kernels in the engine's context cost it 7%.
const KernelPrice = 1.25

// chooser learns, under whatever load there is, which executor takes less time per byte. One per GPU and direction, and one per
// pair of GPUs.
type Policy struct {
	fixed CopyMethod // not Auto: the only answer
	price float64    // how much quicker kernels have to be than copies; 0: they need not be

	mu         sync.Mutex // protects all below
	calls      [numMethods]uint64
	bytes      [numMethods]uint64
	nanos      [numMethods]float64 // of late, ...
	size       [numMethods]float64 // ... for so many bytes
	cost       [numMethods]float64 // nanoseconds per byte: the one by the other; 0: unknown
	last       [numMethods]time.Time
	best       CopyMethod
	nextTrial  [numMethods]time.Time // when one that is not in favour is tried next
	trialPause [numMethods]time.Duration
	wins       [numMethods]int // tries in a row that were better than what is in favour
}

// newChooser makes a chooser. fixed: the answer, unless it is Auto. price: how much quicker kernels have to be than copies; 0: they need not be.
func New(fixed CopyMethod, price float64) *Policy { return &Policy{fixed: fixed, price: price} }

// Decided makes a chooser that has learned these nanoseconds per byte, and tries nothing else for an hour: for tests of those that use one.
func Decided(cost map[CopyMethod]float64) *Policy {
	c := &Policy{best: Pack}
	for e := Pack; e < numMethods; e++ {
		c.cost[e], c.nextTrial[e] = cost[e], time.Now().Add(time.Hour)
		if cost[e] != 0 && cost[e] < c.cost[c.best] {
			c.best = e
		}
	}
	return c
}

// probeBytes are enough to try the executor that is not in favour. [measured, 2 H200] a whole batch of 64 MiB by way of the host took as long as
// 30 of them over NVLink.
const TrialBytes = 4 << 20

// pick names the executor, and says whether it is only tried. engine: there is one that would take it.
func (c *Policy) Pick(now time.Time, engine bool) (e CopyMethod, try bool) {
	last := Copy
	if engine {
		last = InEngine
	}
	switch {
	case c.fixed == InEngine && !engine:
		return Copy, false
	case c.fixed != Auto:
		return c.fixed, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	best := Pack
	for e := Pack; e <= last; e++ {
		if c.cost[e] != 0 && c.priced(e, c.cost[e]) < c.priced(best, c.cost[best]) {
			best = e
		}
	}
	if best != c.best && (engine || c.best != InEngine) { // an engine that is away for one hop changes nothing for the next
		c.scheduleLocked(c.best, now, trialFirst)
		c.best = best
	}
	if c.cost[best] == 0 {
		return best, false
	}
	for e := Pack; e <= last; e++ {
		if c.cost[e] == 0 {
			c.scheduleLocked(e, now, trialFirst)
			return e, true
		}
	}
	try = false
	for x := Pack; x <= last; x++ {
		if x != best && !now.Before(c.nextTrial[x]) && (!try || c.nextTrial[x].Before(c.nextTrial[e])) {
			e, try = x, true
		}
	}
	if !try {
		return best, false
	}
	c.scheduleLocked(e, now, min(2*c.trialPause[e], trialLast))
	for x := Pack; x <= last; x++ { // one at a time: who waits for the first of a request must not wait for the second, too
		if c.nextTrial[x].Before(now.Add(trialFirst)) {
			c.nextTrial[x] = now.Add(trialFirst)
		}
	}
	return e, true
}

// priced is what e costs, with what its kernels take from the engine.
func (c *Policy) priced(e CopyMethod, cost float64) float64 {
	if e == Copy || c.price == 0 {
		return cost
	}
	return c.price * cost
}

// waitLocked says when e is tried next.
func (c *Policy) scheduleLocked(e CopyMethod, now time.Time, pause time.Duration) {
	c.trialPause[e], c.nextTrial[e] = pause, now.Add(pause)
}

// took counts what an executor moved, and learns from the time.
func (c *Policy) Observe(e CopyMethod, bytes uint64, start, end time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.countLocked(e, bytes)
	c.observeLocked(e, bytes, start, end)
}

// count counts what an executor moved in a time that teaches nothing.
func (c *Policy) Count(e CopyMethod, bytes uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.countLocked(e, bytes)
}

func (c *Policy) countLocked(e CopyMethod, bytes uint64) {
	c.calls[e]++
	c.bytes[e] += bytes
}

// wasted teaches it that one took so long to move nothing.
func (c *Policy) ObserveWasted(e CopyMethod, bytes uint64, start, end time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.observeLocked(e, bytes, start, end)
}

func (c *Policy) observeLocked(e CopyMethod, bytes uint64, start, end time.Time) {
	if bytes == 0 {
		return
	}
	alone := !start.Before(c.last[e])
	if !alone {
		start = c.last[e] // until then it moved others
	}
	if end.After(c.last[e]) {
		c.last[e] = end
	}
	nanos, size := float64(max(end.Sub(start), 0)), float64(bytes)
	per := max(nanos/size, 1e-9)
	better := c.fixed == Auto && e != c.best && alone && per < c.cost[e]
	switch {
	case better && c.priced(e, per) < c.priced(c.best, c.cost[c.best]) && c.wins[e]+1 < trialWins:
		// An engine that computes has moments in which it does not: it is asked again soon before it is believed.
		c.wins[e]++
		c.nextTrial[e] = c.nextTrial[e].Add(trialFirst - c.trialPause[e])
		c.trialPause[e] = max(c.trialPause[e]/2, trialFirst)
		return
	case c.cost[e] == 0, better:
		// The other one is seldom tried: what it takes now says more than what it took then.
		c.nanos[e], c.size[e] = nanos, size
	default:
		c.nanos[e] += learnWeight * (nanos - c.nanos[e])
		c.size[e] += learnWeight * (size - c.size[e])
	}
	c.wins[e] = 0
	c.cost[e] = max(c.nanos[e]/c.size[e], 1e-9)
}
