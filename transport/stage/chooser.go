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
// longer for each block.
const (
	Auto Executor = iota // learned
	Pack                 // a kernel packs in HBM, one copy crosses the link
	Copy                 // the copy engine alone, one descriptor per block
	numExecutors
)

var executorNames = [numExecutors]string{"auto", "pack", "copy"}

func (e Executor) String() string { return executorNames[e] }

// ParseExecutor reads a configured name.
func ParseExecutor(s string) (Executor, error) {
	for i, n := range executorNames {
		if s == n {
			return Executor(i), nil
		}
	}
	return 0, fmt.Errorf("stage: executor %q is unknown: use auto, pack or copy", s)
}

// probeEvery is how often the executor that is not in favour is tried, so that a change of the engine's load is noticed.
const probeEvery = 64

// learnWeight is the weight of one observation.
const learnWeight = 1.0 / 8

// chooser learns, under whatever load there is, which executor takes less time per byte. One per GPU and direction.
type chooser struct {
	fixed Executor // not Auto: the only answer

	mu    sync.Mutex // protects all below
	cost  [numExecutors]float64
	calls uint64
}

func (c *chooser) pick() Executor {
	if c.fixed != Auto {
		return c.fixed
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls++
	best, other := Pack, Copy
	if c.cost[Copy] < c.cost[Pack] {
		best, other = Copy, Pack
	}
	if c.cost[other] == 0 || c.calls%probeEvery == 0 {
		return other
	}
	return best
}

// took teaches it. Small pieces say more about latency than about the rate, and count as they are.
func (c *chooser) took(e Executor, bytes uint64, d time.Duration) {
	if c.fixed != Auto || bytes == 0 {
		return
	}
	per := max(float64(d)/float64(bytes), 1e-9)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cost[e] == 0 {
		c.cost[e] = per
		return
	}
	c.cost[e] += learnWeight * (per - c.cost[e])
}
