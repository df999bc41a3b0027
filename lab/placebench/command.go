package placebench

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/ui/usage"
)

// Bounds of a run.
const (
	maxEngines  = 2000
	maxSeconds  = 4 * 3600
	maxRequests = 4_000_000
)

// NewCommand returns the `place` command.
func NewCommand() *cobra.Command {
	o := options{}
	var asJSON bool
	var only string
	c := &cobra.Command{
		Use:   "place",
		Short: "Compare routing policies on simulated clusters",
		Long: `Serves one trace on a simulated cluster once with each policy of a router, in virtual time:
least-loaded, models of the rules of SGLang's router (cache-aware) and llm-d's scheduler (weighted),
predictions of package placement without and with fetches and loads from a store, and an oracle
with the true state.

Shapes: conversation has conversations of several turns; in agent, prompts begin with one of a few
shared prefixes; in fanout, 64 requests ask about each document within a minute.
docs/bench/placement.md has their means.`,
		Example: `  kvspray-bench place --shape conversation --engines 64 --gbit 100
  kvspray-bench place --shape fanout --engines 8 --gbit 10 --load 2 --failures 60 --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.check(); err != nil {
				return err
			}
			rows, err := compare(o, only)
			if err != nil {
				return err
			}
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(map[string]any{"options": o, "rows": rows})
			}
			return table(cmd.OutOrStdout(), rows)
		},
	}
	f := c.Flags()
	f.StringVar(&o.Shape, "shape", "conversation", "conversation, agent or fanout")
	f.IntVar(&o.Engines, "engines", 64, "engines, one on each node")
	f.Float64Var(&o.Gbit, "gbit", 100, "rate of each node's link and direction, Gbit/s")
	f.Float64Var(&o.Load, "load", 0.9, "tokens of all prompts over what the engines prefill "+
		"without a cache")
	f.Float64Var(&o.Seconds, "seconds", 900, "length of the trace")
	f.Float64Var(&o.Rate, "prefill", 8000, "nominal prefill rate of an engine, tokens per second")
	f.Float64Var(&o.TokenBytes, "token-bytes", 131072, "KV cache of one token")
	f.IntVar(&o.CacheSize, "cache", 1<<20, "tokens of cache on each node")
	f.Float64Var(&o.Delay, "delay", 0.006, "fixed seconds of a transfer")
	f.Float64Var(&o.Failures, "failures", 0, "nodes that fail, per hour")
	f.Float64Var(&o.StoreGbit, "store-gbit", 0, "rate of the link of a store of all nodes; 0: there "+
		"is none")
	f.Float64Var(&o.StoreReady, "store-ready", 0.005, "seconds until the store can send")
	f.IntVar(&o.StoreSize, "store", 64<<20, "tokens of the store")
	f.Uint64Var(&o.Seed, "seed", 1, "of all that is drawn at random")
	f.StringVar(&only, "policy", "", "only policies whose names contain this")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

func (o *options) check() error {
	if _, ok := shapes[o.Shape]; !ok {
		return usage.Errorf("--shape %q: want one of %s", o.Shape,
			strings.Join(slices.Sorted(maps.Keys(shapes)), ", "))
	}
	for _, x := range []struct {
		flag         string
		is, min, max float64
	}{{"engines", float64(o.Engines), 1, maxEngines}, {"gbit", o.Gbit, 0.001, 1e5},
		{"load", o.Load, 0.001, 100}, {"seconds", o.Seconds, 1, maxSeconds},
		{"prefill", o.Rate, 1, 1e8}, {"token-bytes", o.TokenBytes, 1, 1e8},
		{"cache", float64(o.CacheSize), pageTokens, 1e9}, {"delay", o.Delay, 0, 10},
		{"failures", o.Failures, 0, 3600}, {"store-gbit", o.StoreGbit, 0, 1e5},
		{"store-ready", o.StoreReady, 0, 60}, {"store", float64(o.StoreSize), pageTokens, 1e10}} {
		if !(x.is >= x.min && x.is <= x.max) {
			return usage.Errorf("--%s %v: want %v to %v", x.flag, x.is, x.min, x.max)
		}
	}
	return nil
}

// compare runs one trace with each policy.
func compare(o options, only string) ([]Row, error) {
	trace := shapes[o.Shape](rand.New(rand.NewPCG(o.Seed, 1)), o.Seconds,
		o.Load*o.Rate*float64(o.Engines))
	if len(trace) == 0 || len(trace) > maxRequests {
		return nil, usage.Errorf("--seconds and --load give %d requests: want 1 to %d", len(trace),
			maxRequests)
	}
	tokens := 0.0
	for i := range trace {
		tokens += float64(trace[i].tokens())
	}
	var rows []Row
	for _, p := range policies() {
		if strings.Contains(p.name, only) && (o.StoreGbit > 0 || !strings.Contains(p.name, ", load")) {
			rows = append(rows, newSim(o, p.choose).run(trace).row(p.name, o, tokens))
		}
	}
	if len(rows) == 0 {
		return nil, usage.Errorf("--policy %q: no policy has such a name", only)
	}
	return rows, nil
}

func table(w io.Writer, rows []Row) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(t, "policy\tTTFT p50 s\tp99 s\tmean s\tTPOT ms\trequests/s\tcomputed\t"+
		"moved GB\tregret s\tagain\t")
	for _, r := range rows {
		_, _ = fmt.Fprintf(t, "%s\t%.3f\t%.3f\t%.3f\t%.1f\t%.2f\t%.1f%%\t%.1f\t%.4f\t%d\t\n", r.Policy,
			r.P50, r.P99, r.Mean, 1e3*r.TPOT, r.PerSec, 100*r.Computed, r.Moved/1e9, r.Regret, r.Again)
	}
	return t.Flush()
}
