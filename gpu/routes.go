package gpu

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/kvspray/kvspray/gpu/policy"
)

// Ways says which executors took what since this process began. Between two GPUs copy stands for the way by the host's memory, which
// is in the others, too.
func (c *Copier) Routes() []policy.RouteState {
	out := []policy.RouteState{}
	c.mu.Lock()
	for u, k := range c.probes {
		out = k.State(out, gpuName(u.index))
	}
	c.mu.Unlock()
	slices.SortFunc(out, func(a, b policy.RouteState) int { return cmp.Compare(a.From+a.To, b.From+b.To) })
	return c.gpus.routes(out)
}

func gpuName(i int) string { return fmt.Sprintf("gpu%d", i) }

func (g *GPUs) routes(out []policy.RouteState) []policy.RouteState {
	if !g.mu.TryLock() { // a GPU is being opened, which takes long
		return out
	}
	defer g.mu.Unlock()
	for i := range g.ids {
		if u := g.gpus[i]; u != nil {
			out = u.in.State(u.out.State(out, gpuName(i), "host"), "host", gpuName(i))
		}
	}
	for _, from := range slices.Sorted(maps.Keys(g.gpus)) {
		for _, to := range slices.Sorted(maps.Keys(g.gpus)) {
			if p := g.pairs[[2]int{from, to}]; p != nil {
				out = p.policy.State(out, gpuName(from), gpuName(to))
			}
		}
	}
	return out
}
