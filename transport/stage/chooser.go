package stage

import (
	"fmt"
	"sync"
	"time"
)

// Executor is a way to rearrange scattered blocks between a GPU and a dense buffer.
type Executor uint8

// The executors. Which one is better depends on what the engine does: a kernel of another process is time-sliced against the
// engine's, so that pack waits for milliseconds beside a busy engine without MPS, while copy engines do not wait but take
// longer for each block. A kernel in the engine's own context is not sliced, and takes a way through the engine's process.
const (
	Auto     Executor = iota // learned
	Pack                     // a kernel packs in HBM, one copy crosses the link
	Copy                     // the copy engine alone, one descriptor per block
	InEngine                 // pack, with the kernel in the engine's own context
	numExecutors
)

var executorNames = [numExecutors]string{"auto", "pack", "copy", "engine"}

func (e Executor) String() string { return executorNames[e] }

// ParseExecutor reads a configured name.
func ParseExecutor(s string) (Executor, error) {
	for i, n := range executorNames {
		if s == n {
			return Executor(i), nil
		}
	}
	return 0, fmt.Errorf("stage: executor %q is unknown: use auto, pack, copy or engine", s)
}

// How often one of the executors that are not in favour is tried, so that a change of the engine's load is noticed: less and less often while
// they stay the worse ones. [measured, H200] beside a busy engine one pack in 64 slices cost the engine 9 to 13%: its kernel takes a
// time slice of the whole GPU.
const (
	probeFirst = 20 * time.Millisecond
	probeLast  = 2 * time.Second
)

// learnWeight is the weight of one observation.
const learnWeight = 1.0 / 8

// chooser learns, under whatever load there is, which executor takes less time per byte. One per GPU and direction, and one per
// pair of GPUs.
type chooser struct {
	fixed Executor // not Auto: the only answer

	mu    sync.Mutex // protects all below
	cost  [numExecutors]float64
	best  Executor
	tried Executor  // last of those that are not in favour
	probe time.Time // when one of them is tried next
	pause time.Duration
}

// probeBytes are enough to try the executor that is not in favour. [measured, 2 H200] a whole batch of 64 MiB by way of the host took as long as
// 30 of them over NVLink.
const probeBytes = 4 << 20

// pick names the executor, and says whether it is only tried. engine: there is one that would take it.
func (c *chooser) pick(now time.Time, engine bool) (e Executor, try bool) {
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
		if c.cost[e] != 0 && c.cost[e] < c.cost[best] {
			best = e
		}
	}
	if best != c.best && (engine || c.best != InEngine) { // an engine that is away for one hop changes nothing for the next
		c.best, c.pause, c.probe = best, probeFirst, now.Add(probeFirst)
	}
	if c.cost[best] == 0 {
		return best, false
	}
	for e := Pack; e <= last; e++ {
		if c.cost[e] == 0 {
			return e, true
		}
	}
	if now.Before(c.probe) {
		return best, false
	}
	c.pause = min(2*c.pause, probeLast)
	c.probe = now.Add(c.pause)
	for other := c.tried%last + 1; ; other = other%last + 1 { // in turns
		if other != best {
			c.tried = other
			return other, true
		}
	}
}

// took teaches it. Small pieces say more about latency than about the rate, and count as they are.
func (c *chooser) took(e Executor, bytes uint64, d time.Duration) {
	if c.fixed != Auto || bytes == 0 {
		return
	}
	per := max(float64(d)/float64(bytes), 1e-9)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.cost[e] == 0, e != c.best && per < c.cost[e]:
		// The other one is seldom tried: what it takes now says more than what it took then.
		c.cost[e] = per
	default:
		c.cost[e] += learnWeight * (per - c.cost[e])
	}
}
