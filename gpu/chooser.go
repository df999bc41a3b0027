package gpu

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
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
	Copy                     // the copy engine alone, a descriptor for each block or two
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

// How often an executor that is not in favour is tried, so that a change of the engine's load is noticed: less and less often from when it lost its
// favour. [measured, H200] beside a busy engine one pack in 64 slices cost the engine 9 to 13%: its kernel takes a time slice of the whole GPU.
// Thirty a second, because two others took turns in favour, cost 4%.
const (
	probeFirst = 20 * time.Millisecond
	probeLast  = 2 * time.Second
	probeWins  = 4 // in a row put it in favour
)

// learnWeight is the weight of one observation.
const learnWeight = 1.0 / 8

// kernelPrice is how much quicker kernels have to be than copy engines, which take nothing from the engine. [measured, H200, to a GPU that computes] 13% more
// by kernels in the engine's context cost it 7%.
const kernelPrice = 1.25

// chooser learns, under whatever load there is, which executor takes less time per byte. One per GPU and direction, and one per
// pair of GPUs.
type chooser struct {
	fixed Executor // not Auto: the only answer
	price float64  // how much quicker kernels have to be than copies; 0: they need not be

	mu    sync.Mutex // protects all below
	calls [numExecutors]uint64
	bytes [numExecutors]uint64
	nanos [numExecutors]float64 // of late, ...
	size  [numExecutors]float64 // ... for so many bytes
	cost  [numExecutors]float64 // nanoseconds per byte: the one by the other; 0: unknown
	last  [numExecutors]time.Time
	best  Executor
	probe [numExecutors]time.Time // when one that is not in favour is tried next
	pause [numExecutors]time.Duration
	wins  [numExecutors]int // tries in a row that were better than what is in favour
}

// newChooser makes a chooser. fixed: the answer, unless it is Auto. price: how much quicker kernels have to be than copies; 0: they need not be.
func newChooser(fixed Executor, price float64) *chooser { return &chooser{fixed: fixed, price: price} }

// Decided makes a chooser that has learned these nanoseconds per byte, and tries nothing else for an hour: for tests of those that use one.
func Decided(cost map[Executor]float64) *chooser {
	c := &chooser{best: Pack}
	for e := Pack; e < numExecutors; e++ {
		c.cost[e], c.probe[e] = cost[e], time.Now().Add(time.Hour)
		if cost[e] != 0 && cost[e] < c.cost[c.best] {
			c.best = e
		}
	}
	return c
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
		if c.cost[e] != 0 && c.priced(e, c.cost[e]) < c.priced(best, c.cost[best]) {
			best = e
		}
	}
	if best != c.best && (engine || c.best != InEngine) { // an engine that is away for one hop changes nothing for the next
		c.waitLocked(c.best, now, probeFirst)
		c.best = best
	}
	if c.cost[best] == 0 {
		return best, false
	}
	for e := Pack; e <= last; e++ {
		if c.cost[e] == 0 {
			c.waitLocked(e, now, probeFirst)
			return e, true
		}
	}
	try = false
	for x := Pack; x <= last; x++ {
		if x != best && !now.Before(c.probe[x]) && (!try || c.probe[x].Before(c.probe[e])) {
			e, try = x, true
		}
	}
	if !try {
		return best, false
	}
	c.waitLocked(e, now, min(2*c.pause[e], probeLast))
	for x := Pack; x <= last; x++ { // one at a time: who waits for the first of a request must not wait for the second, too
		if c.probe[x].Before(now.Add(probeFirst)) {
			c.probe[x] = now.Add(probeFirst)
		}
	}
	return e, true
}

// priced is what e costs, with what its kernels take from the engine.
func (c *chooser) priced(e Executor, cost float64) float64 {
	if e == Copy || c.price == 0 {
		return cost
	}
	return c.price * cost
}

// waitLocked says when e is tried next.
func (c *chooser) waitLocked(e Executor, now time.Time, pause time.Duration) {
	c.pause[e], c.probe[e] = pause, now.Add(pause)
}

// took counts what an executor moved, and learns from the time.
func (c *chooser) took(e Executor, bytes uint64, start, end time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.countLocked(e, bytes)
	c.learnLocked(e, bytes, start, end)
}

// count counts what an executor moved in a time that teaches nothing.
func (c *chooser) count(e Executor, bytes uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.countLocked(e, bytes)
}

func (c *chooser) countLocked(e Executor, bytes uint64) {
	c.calls[e]++
	c.bytes[e] += bytes
}

// wasted teaches it that one took so long to move nothing.
func (c *chooser) wasted(e Executor, bytes uint64, start, end time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.learnLocked(e, bytes, start, end)
}

func (c *chooser) learnLocked(e Executor, bytes uint64, start, end time.Time) {
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
	case better && c.priced(e, per) < c.priced(c.best, c.cost[c.best]) && c.wins[e]+1 < probeWins:
		// An engine that computes has moments in which it does not: it is asked again soon before it is believed.
		c.wins[e]++
		c.probe[e] = c.probe[e].Add(probeFirst - c.pause[e])
		c.pause[e] = max(c.pause[e]/2, probeFirst)
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

// ExecutorState is what is known of one executor on one way.
type ExecutorState struct {
	Executor string  `json:"executor"`
	Calls    uint64  `json:"calls"`
	Bytes    uint64  `json:"bytes"`
	Rate     float64 `json:"bytes_per_second"` // of all calls under way together, as it is learned beside engines; 0: not learned
}

// WayState is how scattered blocks go from a GPU to a buffer of the host ("gpu0", "host"), back, or to a GPU, where any executor would do. Between a
// GPU and pinned memory that is scattered itself ("pages") copy stands for the way by buffers, which is in the others, too, and no rate is learned.
type WayState struct {
	From      string          `json:"from"`
	To        string          `json:"to"`
	Executors []ExecutorState `json:"executors"` // those that were used
}

// state appends the way from a to b, if anything went there.
func (c *chooser) state(out []WayState, from, to string) []WayState {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := WayState{From: from, To: to}
	for e := Pack; e < numExecutors; e++ {
		if c.calls[e] > 0 {
			x := ExecutorState{Executor: e.String(), Calls: c.calls[e], Bytes: c.bytes[e]}
			if c.cost[e] > 0 {
				x.Rate = 1e9 / c.cost[e]
			}
			w.Executors = append(w.Executors, x)
		}
	}
	if w.Executors == nil {
		return out
	}
	return append(out, w)
}

// Ways says which executors took what since this process began. Between two GPUs copy stands for the way by the host's memory, which
// is in the others, too.
func (c *Copier) Ways() []WayState {
	out := []WayState{}
	c.mu.Lock()
	for u, k := range c.knocks {
		out = k.state(out, gpuName(u.index))
	}
	c.mu.Unlock()
	slices.SortFunc(out, func(a, b WayState) int { return cmp.Compare(a.From+a.To, b.From+b.To) })
	return c.gpus.ways(out)
}

func gpuName(i int) string { return fmt.Sprintf("gpu%d", i) }

func (g *GPUs) ways(out []WayState) []WayState {
	if !g.mu.TryLock() { // a GPU is being opened, which takes long
		return out
	}
	defer g.mu.Unlock()
	for i := range g.ids {
		if u := g.gpus[i]; u != nil {
			out = u.in.state(u.out.state(out, gpuName(i), "host"), "host", gpuName(i))
		}
	}
	for _, from := range slices.Sorted(maps.Keys(g.gpus)) {
		for _, to := range slices.Sorted(maps.Keys(g.gpus)) {
			if p := g.peers[[2]int{from, to}]; p != nil {
				out = p.learn.state(out, gpuName(from), gpuName(to))
			}
		}
	}
	return out
}
