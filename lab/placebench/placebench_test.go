package placebench

import (
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
)

func within(t *testing.T, what string, got, want, tolerance float64) {
	t.Helper()
	if got < want*(1-tolerance) || got > want*(1+tolerance) {
		t.Errorf("%s: %.4g, want %.4g", what, got, want)
	}
}

// Shapes have the means that docs/bench/placement.md states: tokens of a prompt and of an
// answer, and the share of pages that an unbounded cache had seen before.
func TestShapesHaveThePublishedMeans(t *testing.T) {
	for name, want := range map[string]struct{ tokens, output, seen float64 }{
		"conversation": {12_035, 343, 0.38}, "agent": {8596, 182, 0.59}} {
		const seconds, perSecond = 3600, 40_000
		list := shapes[name](rand.New(rand.NewPCG(1, 1)), seconds, perSecond)
		known := map[uint64]bool{}
		var tokens, output, pages, hits float64
		for _, r := range list {
			n := 0
			for n < len(r.pages) && known[r.pages[n]] {
				n++
			}
			for _, p := range r.pages {
				known[p] = true
			}
			tokens, output = tokens+float64(r.tokens()), output+float64(r.output)
			pages, hits = pages+float64(len(r.pages)), hits+float64(n)
		}
		n := float64(len(list))
		within(t, name+": tokens of a prompt", tokens/n, want.tokens, 0.1)
		within(t, name+": tokens of an answer", output/n, want.output, 0.1)
		within(t, name+": pages seen before", hits/pages, want.seen, 0.1)
		within(t, name+": tokens per second", tokens/seconds, perSecond, 0.15)
	}
}

var small = options{Engines: 8, Gbit: 100, Load: 0.9, Seconds: 300, Rate: 8000, TokenBytes: 131072,
	CacheSize: 1 << 20, Delay: 0.006, Seed: 1}

func rowsOf(t *testing.T, shape string, change func(*options)) map[string]Row {
	t.Helper()
	o := small
	o.Shape = shape
	if change != nil {
		change(&o)
	}
	rows, err := compare(o, "")
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]Row{}
	for _, r := range rows {
		by[r.Policy] = r
	}
	return by
}

const all, runOnly = "predict: run, fetch", "predict: run only"

// Predictions are better than rules, near to the oracle, and use the links if these are fast.
func TestPredictionsWin(t *testing.T) {
	for _, shape := range []string{"conversation", "agent"} {
		by := rowsOf(t, shape, nil)
		ours, oracle := by[all], by["oracle"]
		for _, rule := range []string{"least-loaded", "cache-aware (SGLang's rule)",
			"weighted (llm-d's rule)"} {
			if x := by[rule]; ours.Mean >= x.Mean || ours.Regret >= x.Regret {
				t.Errorf("%s: %+v is not better than %+v", shape, ours, x)
			}
		}
		if ours.Mean > 1.15*oracle.Mean || oracle.Regret > 1e-9 || ours.Moved == 0 ||
			by[runOnly].Moved != 0 {
			t.Errorf("%s: %+v beside the oracle's %+v", shape, ours, oracle)
		}
		slow := rowsOf(t, shape, func(o *options) { o.Gbit = 0.01 })
		if slow[all].Moved > ours.Moved/10 || slow[all].Mean > 1.1*slow[runOnly].Mean {
			t.Errorf("%s over slow links: %+v, without moves %+v", shape, slow[all], slow[runOnly])
		}
	}
}

// A store has what nodes have given up: small caches cost less with it.
func TestLoadsFromAStore(t *testing.T) {
	by := rowsOf(t, "conversation", func(o *options) {
		o.CacheSize = 1 << 17
		o.StoreGbit, o.StoreReady, o.StoreSize = 100, 0.005, 64<<20
	})
	load, oracle := by["predict: run, fetch, load"], by["oracle"]
	if load.Mean > 0.9*by[all].Mean || load.Computed > 0.9*by[all].Computed ||
		load.Mean > 1.15*oracle.Mean || by["predict: run, load"].Mean > by[runOnly].Mean {
		t.Errorf("%+v", by)
	}
	slow := rowsOf(t, "conversation", func(o *options) {
		o.CacheSize, o.StoreGbit, o.StoreReady, o.StoreSize = 1<<17, 0.01, 5, 64<<20
	})
	if slow["predict: run, load"].Mean > 1.1*slow[runOnly].Mean {
		t.Errorf("a slow store: %+v", slow)
	}
}

// Nodes fail, and every request gets its first token once.
func TestFailures(t *testing.T) {
	o := small
	o.Shape, o.Failures, o.Load = "fanout", 900, 2
	trace := fanout(rand.New(rand.NewPCG(1, 1)), o.Seconds, o.Load*o.Rate*float64(o.Engines))
	for _, p := range policies() {
		s := newSim(o, p.choose)
		r := s.run(trace)
		if len(r.ttft) != len(trace) || r.again == 0 {
			t.Errorf("%s: %d of %d requests, %d dispatched again", p.name, len(r.ttft), len(trace), r.again)
		}
		for i, n := range s.nodes {
			if len(n.queue) > 0 || n.busy != nil || len(n.in.flows) > 0 || len(n.out.flows) > 0 ||
				n.queued > 1e-6 || len(n.cache.of) > n.cache.limit {
				t.Errorf("%s: node %d is not empty at the end", p.name, i)
			}
		}
	}
}

func TestOneSeedGivesOneRun(t *testing.T) {
	a, b := rowsOf(t, "fanout", nil), rowsOf(t, "fanout", nil)
	if !reflect.DeepEqual(a, b) {
		t.Errorf("%+v\n%+v", a, b)
	}
}

func TestCommand(t *testing.T) {
	run := func(args ...string) (string, error) {
		c := NewCommand()
		var out strings.Builder
		c.SetArgs(args)
		c.SetOut(&out)
		c.SilenceErrors, c.SilenceUsage = true, true
		err := c.Execute()
		return out.String(), err
	}
	out, err := run("--engines", "4", "--seconds", "60", "--policy", "predict")
	if err != nil || strings.Count(out, "predict") != 2 {
		t.Errorf("%v: %s", err, out)
	}
	for _, bad := range [][2]string{{"--shape", "x"}, {"--engines", "0"}, {"--gbit", "NaN"},
		{"--policy", "x"}, {"--load", "101"}, {"--seconds", "1e9"}} {
		if out, err := run(bad[0], bad[1]); err == nil || !strings.Contains(err.Error(), bad[0]) {
			t.Errorf("%v: %v, %s", bad, err, out)
		}
	}
}
