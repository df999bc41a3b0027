package gpu

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/kvspray/kvspray/gpu/peercopy"
	"github.com/kvspray/kvspray/gpu/policy"
)

// errNoPeer: copies between two GPUs go through host memory.
var errNoPeer = errors.New("stage: no peer access")

// pair moves bytes from one GPU to another, or within one GPU.
type pair struct {
	pipelines []*peercopy.Pipeline
	policy    *policy.Policy // beside engines that compute
	// idle admits kernels as long as no engine computes on either GPU. Without it, learn would go on
	// with what it has learned beside an engine, and would take the way through host memory for an
	// idle GPU. nil: no probe works here, and learn has it all.
	idleProbe *policy.IdleProbe
	within    bool // source and destination are one GPU
}

// choice is how a list is moved.
type choice struct {
	how  policy.CopyMethod
	try  bool // only with a part of the list, to learn how long it takes
	idle bool // no engine computes, so that it teaches nothing about the time beside one
	// alone: an engine computes on the one GPU, and no hop through host memory may use a kernel, either.
	copyEngineOnly bool
}

// pick chooses for the next list. The caller calls done when that has been moved.
func (p *pair) pick(now time.Time) (c choice, done func()) {
	if p.idleProbe != nil && p.idleProbe.Enter() {
		return choice{how: policy.Pack, idle: true}, p.idleProbe.Leave
	}
	if p.idleProbe != nil && p.within {
		// The engine pays for kernels that run beside it, and learn sees only their own time. Copy
		// engines take nothing from it.
		return choice{how: policy.Copy, copyEngineOnly: true}, func() {}
	}
	c.how, c.try = p.policy.Pick(now, false)
	return c, func() {}
}

// run gives moves to the pipeline that has the fewest runs.
func (p *pair) run(moves []peercopy.Move) error {
	if len(p.pipelines) == 0 {
		return net.ErrClosed
	}
	least := p.pipelines[0]
	for _, q := range p.pipelines[1:] {
		if q.IdleRuns() > least.IdleRuns() {
			least = q
		}
	}
	return least.Run(moves)
}

func (g *GPUs) pair(from, to *GPU) (*pair, error) {
	if g.cfg.PeerDisable {
		return nil, errNoPeer
	}
	key := [2]int{from.index, to.index}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, net.ErrClosed
	}
	if p, ok := g.pairs[key]; ok {
		if p == nil {
			return nil, errNoPeer
		}
		return p, nil
	}
	if from != to {
		for _, k := range [][2]*GPU{{from, to}, {to, from}} {
			ok, err := g.plat.CanAccess(k[0].index, k[1].index)
			if err == nil && ok {
				err = k[0].card.Reach(k[1].card)
			}
			if !ok || err != nil {
				g.cfg.Log.Warn("no peer access; copies go through host memory", "from", k[0].index, "to", k[1].index, "err", err)
				g.pairs[key] = nil
				return nil, errNoPeer
			}
		}
	}
	fixed := g.cfg.Method
	if fixed == policy.InEngine {
		fixed = policy.Copy // by way of the host, in hops, which engines pack
	}
	p := &pair{policy: policy.New(fixed, 0), within: from == to}
	if from.mappedMethod() == policy.Auto && to.mappedMethod() == policy.Auto {
		p.idleProbe = g.pairProbe(from, to)
	}
	for range PeerPipelines {
		q, err := g.newPipeline(from, to)
		if err != nil {
			// One pipeline is slower than two and better than none; with none the host's memory serves.
			g.cfg.Log.Warn("gpu pipeline not made", "from", from.index, "to", to.index, "have", len(p.pipelines), "err", err)
			break
		}
		p.pipelines = append(p.pipelines, q)
	}
	if len(p.pipelines) == 0 {
		g.pairs[key] = nil
		return nil, errNoPeer
	}
	g.pairs[key] = p
	g.cfg.Log.Info("gpu pipeline", "from", from.index, "to", to.index, "gpu_bytes_each", uint64(len(p.pipelines))*peercopy.Bytes(g.cfg.PeerStage))
	return p, nil
}

// newPeer is called with g.mu held, so that nobody else takes what is found to be left.
func (g *GPUs) newPipeline(from, to *GPU) (*peercopy.Pipeline, error) {
	need := peercopy.Bytes(g.cfg.PeerStage)
	sides := []*GPU{from, to}
	for _, u := range sides {
		n := need
		if from == to {
			n = 2 * need
		}
		if err := u.budget.fits(n); err != nil {
			return nil, fmt.Errorf("GPU %d: %w", u.index, err)
		}
	}
	src, err := from.card.NewPacker()
	if err != nil {
		return nil, err
	}
	dst, err := to.card.NewPacker()
	if err != nil {
		return nil, errors.Join(err, src.Close())
	}
	p, err := peercopy.NewSized(min(peercopy.MinStage, max(g.cfg.PeerStage/2, 1)), g.cfg.PeerStage, src, dst)
	if err != nil {
		return nil, err
	}
	for _, u := range sides {
		u.budget.pipelines.Add(need)
	}
	return p, nil
}
