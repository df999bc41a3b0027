package gpu

import (
	"fmt"
	"maps"
	"slices"

	"github.com/kvspray/kvspray/gpu/policy"
)

// Routes reports which copy methods moved how much since this process began. Between two GPUs, the
// method copy is the way through host memory, whose bytes are in the routes to and from the host,
// too.
func (c *Copier) Routes() []policy.RouteState {
	return c.gpus.routes([]policy.RouteState{})
}

func gpuName(i int) string { return fmt.Sprintf("gpu%d", i) }

func (g *GPUs) routes(out []policy.RouteState) []policy.RouteState {
	if !g.mu.TryLock() { // a GPU is being opened, which takes long
		return out
	}
	defer g.mu.Unlock()
	for _, i := range slices.Sorted(maps.Keys(g.gpus)) {
		out = g.gpus[i].idleProbe.State(out, gpuName(i))
	}
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
