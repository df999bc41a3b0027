package sidecar

import (
	"testing"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/sidecar/internal/plans"
)

// asked counts how often planes are asked for: every division, proof and match begins with that.
type asked struct {
	parseblock.Strategy
	times *int
}

func (a asked) Planes(dst []layout.Plane, g *layout.Group, l *layout.Layer) ([]layout.Plane,
	error) {
	*a.times++
	return a.Strategy.Planes(dst, g, l)
}

// learn has a planner receive the layout of a peer's worker.
func learn(t *testing.T, p *plans.Planner, w *engines.Worker) {
	t.Helper()
	b, err := w.Layout.Marshal()
	if err == nil {
		err = p.Learn(w.Geometry, b)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestEnginesMeetOnce: what two engines' layouts cost is paid by their first prompt. The next ones,
// of any length and whichever of two equal ranks is busy, ask no strategy anything, at either end,
// and what the receiver allocates for one is under 64 KiB beside its block table.
func TestEnginesMeetOnce(t *testing.T) {
	times := 0
	var all []parseblock.Strategy
	for _, name := range parseblock.Default().Names() {
		s, _ := parseblock.Default().Get(name)
		all = append(all, asked{s, &times})
	}
	reg, err := parseblock.NewRegistry(all...)
	if err != nil {
		t.Fatal(err)
	}
	worker := func(l *layout.Layout) *engines.Worker {
		own, err := parseblock.NewMatch(reg, l, l, nil)
		if err != nil {
			t.Fatal(err)
		}
		return &engines.Worker{Layout: l, Geometry: l.Geometry(), Own: own}
	}
	d := worker(llama8B(t, "LBNHC", 16, 0, 1))
	receives, sends := plans.New(reg), plans.New(reg)
	var sources []*engines.Worker
	var ranks []exec.Rank
	for rank := range int64(2) {
		w := worker(llama8B(t, "LBHNC", 32, rank, 2))
		sources, ranks = append(sources, w), append(ranks, exec.Rank{Name: []string{"tp0", "tp1"}[rank],
			Geometry: w.Geometry})
		learn(t, receives, w)
	}
	learn(t, sends, d)
	prompt := func(tokens int, table [][]uint32) {
		parts, err := receives.Divide(d, &engines.Expect{Tokens: uint32(tokens), Skip: []uint32{0},
			Blocks: table}, ranks, func(string) uint64 { return uint64(times) })
		if err != nil || len(parts) != 2 || parts[0].Plan == nil || parts[1].Plan == nil {
			t.Fatal(parts, err)
		}
		for i, w := range sources {
			plan, err := sends.Send(w, &peerv1.Grant{Tokens: uint32(tokens), Skip: []uint32{0},
				Geometry: d.Geometry[:]}, &peerv1.Part{Share: parts[i].Share})
			if err != nil || plan.Space().TotalBytes() != parts[i].Plan.Space().TotalBytes() {
				t.Fatal(plan, err)
			}
		}
	}
	times = 0
	prompt(1024, scattered(d.Layout, 1024))
	met := times
	if met == 0 {
		t.Fatal("the first prompt asked nothing")
	}
	for _, tokens := range []int{32, 4096, 32768} {
		prompt(tokens, scattered(d.Layout, tokens))
	}
	if times != met {
		t.Errorf("the first prompt asked %d times for planes, the next three %d times", met, times-met)
	}
	table := scattered(d.Layout, 32768)
	x := &engines.Expect{Tokens: 32768, Skip: []uint32{0}, Blocks: table}
	if n := allocated(func() {
		if _, err := receives.Divide(d, x, ranks, func(string) uint64 { return 0 }); err != nil {
			t.Fatal(err)
		}
	}); n > 64<<10 {
		t.Errorf("a prompt between engines that have met allocates %d bytes at its receiver", n)
	} else {
		t.Logf("a prompt between engines that have met allocates %d bytes at its receiver", n)
	}
	// A planner that has not met them pays again: the count sees it.
	receives = plans.New(reg)
	for _, w := range sources {
		learn(t, receives, w)
	}
	met = times
	if prompt(32, scattered(d.Layout, 32)); times == met {
		t.Error("a division was made of nothing")
	}
}
