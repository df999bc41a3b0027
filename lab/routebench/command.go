package routebench

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/lab/machine"
)

type options struct {
	binary, python, packages, logs, json string
	cpus                                 string
	extra, only                          []string
	rounds, streams, tokens, engines     int
	prompt                               int
	every, idle                          time.Duration
	pd                                   bool
}

// NewCommand returns the `route` command.
func NewCommand() *cobra.Command {
	o := options{}
	cmd := &cobra.Command{
		Use:   "route",
		Short: "kvspray's router, vllm-router and sglang-router in front of the same engines",
		Long: `Measures routers in front of engines that stream tokens and compute nothing: the time that
a router adds to the first token, its CPU per request and per token, and its memory. The routers
take turns; "direct" is the engines without a router. --packages has a directory for each of the
other routers, as make bench-router makes it.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.run(cmd.Context(), cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.binary, "kvspray", "bin/kvspray", "the kvspray program")
	f.StringVar(&o.python, "python", ".build/venv/bin/python", "Python of the other routers")
	f.StringVar(&o.packages, "packages", ".build/routers", "directory with their packages")
	f.StringVar(&o.logs, "logs", os.TempDir(), "directory for the routers' logs")
	f.StringVar(&o.cpus, "cpus", "", "processors of the router, as for taskset -c (default all)")
	f.StringVar(&o.json, "json", "", "file for all results")
	f.StringArrayVar(&o.extra, "flag", nil, "one more argument of kvspray proxy; repeatable")
	f.StringSliceVar(&o.only, "only", names, "which of them")
	f.BoolVar(&o.pd, "pd", false, "half of the engines prefill, the others decode (not "+
		"sglang-router, whose engines need SGLang's protocol)")
	f.IntVar(&o.rounds, "rounds", 3, "rounds, in each of which all routers have a turn")
	f.IntVar(&o.streams, "streams", 2000, "streams at the same time")
	f.IntVar(&o.tokens, "tokens", 40, "tokens of a stream")
	f.IntVar(&o.engines, "engines", 4, "engines")
	f.IntVar(&o.prompt, "prompt", 2000, "bytes of a prompt")
	f.DurationVar(&o.every, "every", 100*time.Millisecond, "time between two tokens of a stream")
	f.DurationVar(&o.idle, "idle", 5*time.Second, "time without requests, for the CPU "+
		"of an idle router")
	return cmd
}

// result is one turn of one router. CPU is in microseconds, memory in bytes.
type result struct {
	Router    string  `json:"router"`
	P50       float64 `json:"first_p50_ms"`
	P99       float64 `json:"first_p99_ms"`
	Request   float64 `json:"request_us"`
	Token     float64 `json:"token_us"`
	Idle      float64 `json:"idle_us_per_s"`
	Memory    int64   `json:"memory_streams"`
	MemoryWas int64   `json:"memory_start"`
	Failed    int     `json:"failed"`
}

func (o *options) run(ctx context.Context, out io.Writer) error {
	for _, n := range o.only {
		if !slices.Contains(names, n) {
			return usage.Errorf("--only: %q is none of %v", n, names)
		}
	}
	if o.pd {
		o.only = slices.DeleteFunc(slices.Clone(o.only), func(n string) bool {
			return n == "sglang-router"
		})
	}
	if min(o.rounds, o.streams, o.engines) < 1 || o.tokens < 2 || o.every <= 0 {
		return usage.Errorf("--rounds, --streams and --engines have to be 1 or more, --tokens 2, and " +
			"--every more than 0")
	}
	e, err := startEngines(o.engines, o.every)
	if err != nil {
		return err
	}
	defer e.stop()
	fmt.Fprintf(out, "%s\n%d streams of %d tokens, one each %v; %d engines\n", machine.Here(),
		o.streams, o.tokens, o.every, o.engines)
	var all []result
	for i := range o.rounds {
		for _, name := range o.only {
			r, err := o.turn(ctx, name, e)
			if err != nil {
				return err
			}
			all = append(all, *r)
			fmt.Fprintf(out, "round %d %+v\n", i+1, *r)
		}
	}
	o.table(out, all)
	if o.json == "" {
		return nil
	}
	text, err := json.MarshalIndent(map[string]any{"machine": machine.Here(), "results": all}, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Clean(o.json), append(text, '\n'), 0o600)
}

func (o *options) turn(ctx context.Context, name string, e *engines) (*result, error) {
	res := &result{Router: name}
	streams := load{clients: o.streams, each: 2, tokens: o.tokens, prompt: o.prompt,
		spread: o.every * time.Duration(o.tokens)}
	short := load{clients: 32, each: 250, tokens: 1, prompt: o.prompt}
	var addresses []string
	for _, u := range e.urls {
		addresses = append(addresses, u[len("http://"):])
	}
	if name == names[0] {
		res.first(streams.run(addresses))
		return res, nil
	}
	r, err := o.start(ctx, name, e.urls)
	if err != nil {
		return nil, err
	}
	defer r.stop()
	short.run([]string{r.address}) // connections, and code that runs for the first time
	res.MemoryWas = r.memory()
	var cpu [4]time.Duration
	for i, phase := range []func(){
		func() { time.Sleep(o.idle) },
		func() {
			res.Memory = r.peak(func() { res.first(streams.run([]string{r.address})) })
		},
		func() { res.Failed += short.run([]string{r.address}).failed },
	} {
		if cpu[i], err = r.cpu(); err != nil {
			return nil, err
		}
		phase()
	}
	if cpu[3], err = r.cpu(); err != nil {
		return nil, err
	}
	us := func(i int) float64 { return float64((cpu[i+1] - cpu[i]).Microseconds()) }
	requests := float64(2 * o.streams)
	res.Idle = us(0) / o.idle.Seconds()
	res.Request = us(2) / float64(short.clients*short.each)
	res.Token = (us(1) - requests*res.Request) / (requests * float64(o.tokens-1))
	return res, nil
}

func (r *result) first(got *outcome) {
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	r.P50, r.P99 = ms(got.at(0.5)), ms(got.at(0.99))
	if r.Failed += got.failed; got.err != nil {
		fmt.Fprintln(os.Stderr, r.Router, got.failed, "requests failed:", got.err)
	}
}

// table prints the median of the rounds. Added times are those above the engines' of the round.
func (o *options) table(out io.Writer, all []result) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	defer func() { _ = w.Flush() }() // an error of the output shows elsewhere
	fmt.Fprintln(w, "router\tadded p50 ms\tadded p99 ms\trequest us\ttoken us\tidle us/s\tstart MiB\t"+
		"streams MiB\tfailed")
	of := func(name string, get func(r, direct result) float64) float64 {
		var list []float64
		var direct result
		for _, r := range all {
			if r.Router == names[0] {
				direct = r
			}
			if r.Router == name {
				list = append(list, get(r, direct))
			}
		}
		slices.Sort(list)
		return list[len(list)/2]
	}
	for _, name := range o.only {
		fmt.Fprintf(w, "%s\t%.2f\t%.2f\t%.1f\t%.2f\t%.0f\t%.1f\t%.1f\t%.0f\n", name,
			of(name, func(r, d result) float64 { return r.P50 - d.P50 }),
			of(name, func(r, d result) float64 { return r.P99 - d.P99 }),
			of(name, func(r, _ result) float64 { return r.Request }),
			of(name, func(r, _ result) float64 { return r.Token }),
			of(name, func(r, _ result) float64 { return r.Idle }),
			of(name, func(r, _ result) float64 { return float64(r.MemoryWas) / (1 << 20) }),
			of(name, func(r, _ result) float64 { return float64(r.Memory) / (1 << 20) }),
			of(name, func(r, _ result) float64 { return float64(r.Failed) }))
	}
}
