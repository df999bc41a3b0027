// Package policy chooses among copy methods by measurement: Policy learns the fastest method under
// the present load, IdleProbe detects whether kernels have a GPU to themselves, Table has what
// `kvspray calibrate` has measured.
//
// Each type guards its own state with its own mutex. The package copies nothing and owns no
// goroutine.
package policy

import (
	"sync"
	"time"
)

// How often the methods that are not the best one are tried, so that a change of load is noticed.
// The pauses grow. [measured, H200] Beside a busy engine, one pack in 64 slices slowed the engine
// down by 9 to 13%, because a kernel takes a time slice of the whole GPU. Thirty trials a second
// cost 4%.
const (
	trialFirst = 20 * time.Millisecond
	trialLast  = 2 * time.Second
	trialWins  = 4 // better trials in a row make a method the best one
)

// learnWeight is the weight of one call.
const learnWeight = 1.0 / 8

// KernelPrice is the factor by which kernels must be faster than copy engines, which take nothing
// from the engine.
const KernelPrice = 1.25

// Policy learns which method takes less time per byte under the present load. There is one per GPU
// and direction, and one per pair of GPUs.
type Policy struct {
	fixed CopyMethod // Auto, or the only answer
	price float64    // KernelPrice; 0: kernels and copies are compared without a factor

	mu         sync.Mutex // protects all below
	calls      [numMethods]uint64
	bytes      [numMethods]uint64
	nanos      [numMethods]float64 // recent mean time of a call
	size       [numMethods]float64 // recent mean bytes of a call
	cost       [numMethods]float64 // nanos/size; 0: unknown
	last       [numMethods]time.Time
	best       CopyMethod
	nextTrial  [numMethods]time.Time // of methods that are not the best one
	trialPause [numMethods]time.Duration
	wins       [numMethods]int // trials in a row that were better than the best method
}

// New makes a policy. fixed: Auto, or the only answer. price: the factor by which kernels must be
// faster than copies; 0: none.
func New(fixed CopyMethod, price float64) *Policy { return &Policy{fixed: fixed, price: price} }

// Decided makes a policy that has learned these nanoseconds per byte and makes no trial for an
// hour. It is for tests of callers.
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

// TrialBytes is enough for a trial. [measured, 2 H200] A batch of 64 MiB through host memory took
// as long as 30 of them over NVLink.
const TrialBytes = 4 << 20

// Pick returns the method for the next call. try: the call is only a trial.
func (c *Policy) Pick(now time.Time) (e CopyMethod, try bool) {
	if c.fixed != Auto {
		return c.fixed, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	best, other := Pack, Copy
	if c.cost[Copy] != 0 && c.priced(Copy, c.cost[Copy]) < c.priced(Pack, c.cost[Pack]) {
		best, other = Copy, Pack
	}
	if best != c.best {
		c.scheduleLocked(c.best, now, trialFirst)
		c.best = best
	}
	switch {
	case c.cost[best] == 0:
		return best, false
	case c.cost[other] == 0:
		c.scheduleLocked(other, now, trialFirst)
		return other, true
	case now.Before(c.nextTrial[other]):
		return best, false
	}
	c.scheduleLocked(other, now, min(2*c.trialPause[other], trialLast))
	return other, true
}

// priced is the cost of e including what its kernels take from the engine.
func (c *Policy) priced(e CopyMethod, cost float64) float64 {
	if e == Copy || c.price == 0 {
		return cost
	}
	return c.price * cost
}

// scheduleLocked sets the next trial of e.
func (c *Policy) scheduleLocked(e CopyMethod, now time.Time, pause time.Duration) {
	c.trialPause[e], c.nextTrial[e] = pause, now.Add(pause)
}

// Observe counts a call, and learns from its time.
func (c *Policy) Observe(e CopyMethod, bytes uint64, start, end time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.countLocked(e, bytes)
	c.observeLocked(e, bytes, start, end)
}

// Count counts a call whose time is not comparable.
func (c *Policy) Count(e CopyMethod, bytes uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.countLocked(e, bytes)
}

func (c *Policy) countLocked(e CopyMethod, bytes uint64) {
	c.calls[e]++
	c.bytes[e] += bytes
}

func (c *Policy) observeLocked(e CopyMethod, bytes uint64, start, end time.Time) {
	if bytes == 0 {
		return
	}
	alone := !start.Before(c.last[e])
	if !alone {
		start = c.last[e] // before, the method moved other bytes
	}
	if end.After(c.last[e]) {
		c.last[e] = end
	}
	nanos, size := float64(max(end.Sub(start), 0)), float64(bytes)
	per := max(nanos/size, 1e-9)
	better := c.fixed == Auto && e != c.best && alone && per < c.cost[e]
	switch {
	case better && c.priced(e, per) < c.priced(c.best, c.cost[c.best]) && c.wins[e]+1 < trialWins:
		// A busy GPU has idle moments: another trial follows soon, before the method counts as better.
		c.wins[e]++
		c.nextTrial[e] = c.nextTrial[e].Add(trialFirst - c.trialPause[e])
		c.trialPause[e] = max(c.trialPause[e]/2, trialFirst)
		return
	case c.cost[e] == 0, better:
		// Trials are rare: the newest one replaces older ones.
		c.nanos[e], c.size[e] = nanos, size
	default:
		c.nanos[e] += learnWeight * (nanos - c.nanos[e])
		c.size[e] += learnWeight * (size - c.size[e])
	}
	c.wins[e] = 0
	c.cost[e] = max(c.nanos[e]/c.size[e], 1e-9)
}
