package gpu

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/kvspray/kvspray/gpu/peercopy"
	"github.com/kvspray/kvspray/gpu/policy"
)

// errNoPeer means that copies between two GPUs go through host memory.
var errNoPeer = errors.New("gpu: no peer access")

// retryPair is the time until a direction is tried again for which memory was missing, or whose
// check of peer access failed.
const retryPair = 30 * time.Second

// pair moves bytes from one GPU to another, or within one GPU.
type pair struct {
	from, to  *GPU
	pipelines []*peercopy.Pipeline
	policy    *policy.Policy // learns beside engines that compute
	// probed: kernels run as long as no engine computes on either GPU. Without the probe, the policy
	// would apply to an idle GPU what it has learned beside an engine, and copy through host memory.
	probed bool
}

// refusal is a direction that has no pipeline.
type refusal struct {
	retry time.Time // zero: never
}

// choice is the method for a list.
type choice struct {
	how  policy.CopyMethod
	try  bool // a trial with a part of the list
	idle bool // no engine computes: the time is not comparable
	// copyEngineOnly: an engine computes on the only GPU, so that staging slots use no kernel, either.
	copyEngineOnly bool
}

// enter reports whether both GPUs are idle. Then leave ends the use of their kernels.
func (p *pair) enter() (leave func(), idle bool) {
	first, second := p.from, p.to
	if first == second {
		return first.idleProbe.Leave, first.idleProbe.Enter()
	}
	if first.index > second.index { // one order for all pairs: Enter may wait for users of a GPU
		first, second = second, first
	}
	if !first.idleProbe.Enter() {
		return nil, false
	}
	if !second.idleProbe.Enter() {
		first.idleProbe.Leave()
		return nil, false
	}
	return func() {
		second.idleProbe.Leave()
		first.idleProbe.Leave()
	}, true
}

// pick chooses the method for the next list. The caller calls done when the list has been moved.
func (p *pair) pick(now time.Time) (c choice, done func()) {
	if p.probed {
		if leave, idle := p.enter(); idle {
			return choice{how: policy.Pack, idle: true}, leave
		}
		if p.from == p.to {
			// Kernels slow the engine down, and the policy measures only their own time. Copy engines
			// take nothing from the engine.
			return choice{how: policy.Copy, copyEngineOnly: true}, func() {}
		}
	}
	c.how, c.try = p.policy.Pick(now)
	return c, func() {}
}

// run gives moves to the pipeline that has the fewest runs.
func (p *pair) run(moves []peercopy.Move) error {
	if len(p.pipelines) == 0 {
		return net.ErrClosed
	}
	best := p.pipelines[0]
	for _, q := range p.pipelines[1:] {
		if q.IdleRuns() > best.IdleRuns() {
			best = q
		}
	}
	return best.Run(moves)
}

// pair returns the pipelines of one direction, which it makes at the first use.
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
		return p, nil
	}
	r, refused := g.refused[key]
	if refused && (r.retry.IsZero() || g.now().Before(r.retry)) {
		return nil, errNoPeer
	}
	p, final := g.newPairLocked(from, to, refused)
	if p == nil {
		if r = (refusal{}); !final {
			r.retry = g.now().Add(retryPair)
		}
		g.refused[key] = r
		return nil, errNoPeer
	}
	delete(g.refused, key)
	g.pairs[key] = p
	g.cfg.Log.Info("gpu pipeline", "from", from.index, "to", to.index,
		"gpu_bytes_each", p.bytesEach(g.cfg.PeerStage))
	return p, nil
}

// bytesEach is what the pipelines take on each of their GPUs.
func (p *pair) bytesEach(maxStage uint64) uint64 {
	if p.from == p.to {
		return uint64(len(p.pipelines)) * peercopy.WithinBytes()
	}
	return uint64(len(p.pipelines)) * peercopy.Bytes(maxStage)
}

// newPairLocked makes the pipelines of a direction, or returns nil. final: another attempt will not
// help. quiet: the reason is in the log already.
func (g *GPUs) newPairLocked(from, to *GPU, quiet bool) (_ *pair, final bool) {
	level := slog.LevelWarn
	if quiet {
		level = slog.LevelDebug
	}
	if from != to {
		for _, k := range [][2]*GPU{{from, to}, {to, from}} {
			ok, err := g.plat.CanAccess(k[0].index, k[1].index)
			if err == nil && ok {
				err = k[0].card.Reach(k[1].card)
			}
			if !ok || err != nil {
				g.cfg.Log.Log(context.Background(), level, "no peer access; copies go through host memory",
					"from", k[0].index, "to", k[1].index, "err", err)
				return nil, err == nil
			}
		}
	}
	newPipeline := g.newPipelineLocked
	if from == to {
		newPipeline = func(u, _ *GPU) (*peercopy.Pipeline, error) { return u.newWithin() }
	}
	p := &pair{from: from, to: to, policy: policy.New(g.cfg.Method, 0),
		probed: from.mappedMethod() == policy.Auto && to.mappedMethod() == policy.Auto}
	for range PeerPipelines {
		q, err := newPipeline(from, to)
		if err != nil {
			// One pipeline is slower than two; without one, copies go through host memory.
			g.cfg.Log.Log(context.Background(), level, "gpu pipeline not made",
				"from", from.index, "to", to.index, "have", len(p.pipelines), "err", err)
			break
		}
		p.pipelines = append(p.pipelines, q)
	}
	if len(p.pipelines) == 0 {
		return nil, false
	}
	return p, false
}

// newWithin makes one pipeline within u, and within its budget.
func (u *GPU) newWithin() (_ *peercopy.Pipeline, err error) {
	need := peercopy.WithinBytes()
	if err := u.budget.take(forPipelines, need); err != nil {
		return nil, fmt.Errorf("GPU %d: %w", u.index, err)
	}
	defer func() {
		if err != nil {
			u.budget.release(forPipelines, need)
		}
	}()
	dev, err := u.card.NewPacker()
	if err != nil {
		return nil, err
	}
	return peercopy.NewWithin(dev)
}

// newPipelineLocked makes one pipeline between two GPUs within the budgets of both GPUs.
func (g *GPUs) newPipelineLocked(from, to *GPU) (_ *peercopy.Pipeline, err error) {
	need := peercopy.Bytes(g.cfg.PeerStage)
	var taken []*GPU
	defer func() {
		if err != nil {
			for _, u := range taken {
				u.budget.release(forPipelines, need)
			}
		}
	}()
	for _, u := range []*GPU{from, to} {
		if err := u.budget.take(forPipelines, need); err != nil {
			return nil, fmt.Errorf("GPU %d: %w", u.index, err)
		}
		taken = append(taken, u)
	}
	src, err := from.card.NewPacker()
	if err != nil {
		return nil, err
	}
	dst, err := to.card.NewPacker()
	if err != nil {
		return nil, errors.Join(err, src.Close())
	}
	minStage := min(peercopy.MinStage, max(g.cfg.PeerStage/2, 1))
	return peercopy.NewSized(minStage, g.cfg.PeerStage, src, dst)
}
