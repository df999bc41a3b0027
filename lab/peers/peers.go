// Package peers is `kvspray-bench peers`: it compares kvspray with other transfer engines, NIXL
// over UCX and Mooncake's transfer engine, as their wheels are published. All move the same
// scattered blocks over the same rails of the kernel, healthy and with one rail that fails in each
// way, in turns with two kvspray sidecars and with plain streams. The results are one table, one
// chart, and a JSON file with every result (`make bench-peers`). An engine that cannot be started
// here is left out, with the reason in the table.
//
// Configuration of the engines: NIXL gets all devices, once with its own choice of how many to use
// and once with all of them forced; Mooncake gets one address, as it accepts no more. Their
// descriptor lists are made before the clock starts; kvspray's clock runs from the engine's request
// to the engine's completion, checksums included.
//
// Goroutines: one reader per driver process, one that samples counters and one that applies the
// faults. All end with the command.
package peers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kvspray/kvspray/lab/chart"
	"github.com/kvspray/kvspray/lab/machine"
	"github.com/kvspray/kvspray/lab/railsbench"
	"github.com/kvspray/kvspray/lab/timeline"
)

// How a comparison is made up.
const (
	healthyCount = 4 // transfers of one turn, the first of which is cold
	streamSpan   = 1500 * time.Millisecond
	minSpan      = 3 * time.Second
	maxSpan      = time.Minute
)

// When a fault happens, and when it is healed, of the time that a turn takes.
const (
	faultAt = 2.0 / 9
	healAt  = 5.0 / 9
)

type options struct {
	sidecar, python, driver, out string
	stdout, stderr               io.Writer
	turns                        int
	rates                        []timeline.Rate
	blocks                       []int
	total                        int64
	span                         time.Duration
	engines                      []engine
	scenarios                    []scenario
	machine                      machine.Machine
	unable                       map[string]string // engines that cannot be started here, and why
}

// engine is one contestant.
type engine struct {
	name   string
	title  string
	driver string   // "" is kvspray
	env    []string // of its processes
}

var engines = []engine{
	{name: "kvspray", title: "kvspray"},
	{name: "nixl", title: "NIXL 1.5.1, UCX tcp, all devices", driver: "nixl",
		env: []string{"UCX_TLS=tcp", "UCX_NET_DEVICES=all"}},
	{name: "nixl4", title: "NIXL 1.5.1, UCX tcp, all rails forced", driver: "nixl",
		env: []string{"UCX_TLS=tcp", "UCX_NET_DEVICES=all", "UCX_MAX_RNDV_RAILS=4",
			"UCX_MAX_RMA_RAILS=4"}},
	{name: "mooncake", title: "Mooncake 0.3.13, tcp", driver: "mooncake",
		env: []string{"MC_TCP_ENABLE_CONNECTION_POOL=1", "GLOG_minloglevel=2"}},
}

func engineNames() string {
	var s []string
	for _, e := range engines {
		s = append(s, e.name)
	}
	return strings.Join(s, ", ")
}

// scenario is what happens to the rails.
type scenario struct {
	name   string
	faults []timeline.Fault // one, and its healing; none where all is well
}

// defaultFaults is each way in which a rail can die.
const defaultFaults = "down,drop,ackdrop,rate=1/20,flap=300ms,blackhole,slowest:down"

// scenario is one of --faults.
func (o *options) scenario(what string) (scenario, error) {
	which, kind, rail := "fastest", what, 0
	better := func(a, b timeline.Rate) bool { return a > b }
	if rest, ok := strings.CutPrefix(what, "slowest:"); ok {
		which, kind, better = "slowest", rest, func(a, b timeline.Rate) bool { return a < b }
	}
	for i, r := range o.rates {
		if better(r, o.rates[rail]) {
			rail = i
		}
	}
	at := func(share float64) time.Duration {
		return time.Duration(share * float64(o.span)).Round(time.Millisecond)
	}
	s := scenario{name: fmt.Sprintf("the %s rail: %s for %s", which, kind, at(healAt)-at(faultAt))}
	for _, text := range []string{fmt.Sprintf("%s:rail%d:%s", at(faultAt), rail, kind),
		fmt.Sprintf("%s:rail%d:%s", at(healAt), rail, timeline.Heal)} {
		f, err := timeline.ParseFault(text)
		if err != nil {
			return s, err
		}
		s.faults = append(s.faults, f)
	}
	if k := s.faults[0].Kind; k == timeline.Up || k == timeline.Heal {
		return s, fmt.Errorf("%q: nothing fails by that: want a kind that breaks a rail", what)
	}
	return s, nil
}

// order is the order of turns: every engine begins as often as the others, as far as the
// turns go.
func (o *options) order(turn int) []engine {
	k := turn % len(o.engines)
	return append(slices.Clone(o.engines[k:]), o.engines[:k]...)
}

// outcome is one engine's turn.
type outcome struct {
	Engine   string           `json:"engine"`
	Scenario string           `json:"scenario"`
	Block    int              `json:"block_bytes"`
	Turn     int              `json:"turn"`
	Result   *timeline.Result `json:"result"`
	// Of a fault: what the rails to which nothing happened brought while it lasted, of what they
	// carry; and the longest time without a byte.
	During float64          `json:"share_during_fault,omitempty"`
	Stall  timeline.Seconds `json:"longest_stall_seconds,omitempty"`
	Error  string           `json:"error,omitempty"` // the turn did not end in order
}

func run(ctx context.Context, o options) error {
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return err
	}
	var all []*outcome
	// Results from before an interruption are worth something, too.
	err := o.turnsOf(ctx, o.turn, func(x *outcome) { all = append(all, x) })
	if len(all) == 0 {
		for name, why := range o.unable {
			err = errors.Join(err, fmt.Errorf("%s: %s", name, why))
		}
		return err
	}
	return errors.Join(err, o.write(all))
}

// turnsOf gives all engines their turns. One that cannot be started is left out from then on; one
// that could before has an outcome with the error.
func (o *options) turnsOf(ctx context.Context, take func(context.Context, engine, scenario,
	int) (*outcome, error), done func(*outcome)) error {
	ran := map[string]bool{}
	for _, block := range o.blocks {
		for i, s := range o.scenarios {
			for turn := range o.turns {
				for _, e := range o.order(turn + i) {
					if err := ctx.Err(); err != nil {
						return err
					}
					if o.unable[e.name] != "" {
						continue
					}
					x, err := take(ctx, e, s, block)
					no := (*unableError)(nil)
					switch {
					case errors.As(err, &no) && ctx.Err() == nil && ran[e.name]:
						x = &outcome{Engine: e.name, Scenario: s.name, Block: block,
							Result: &timeline.Result{Faults: s.faults}, Error: "not started: " + no.Error()}
					case errors.As(err, &no) && ctx.Err() == nil:
						_, _ = fmt.Fprintf(o.stderr, "%-8s is left out: %v\n", e.name, no)
						o.unable[e.name] = no.Error()
						continue
					case err != nil:
						return fmt.Errorf("%s, %s, blocks of %s: %w", e.title, s.name,
							timeline.FormatSize(int64(block)), err)
					}
					ran[e.name], x.Turn = true, turn
					done(x)
					_, _ = fmt.Fprintf(o.stderr, "%-8s %-36s %8s: %s of %s, %d failed, during the fault %.2f, "+
						"stall %v %s\n", e.name, s.name, timeline.FormatSize(int64(block)),
						x.Result.Goodput, x.Result.Together, x.Result.Failed, x.During,
						x.Stall.D().Round(10*time.Millisecond), x.Error)
				}
			}
		}
	}
	return nil
}

// turn lets one engine do one thing, on rails of its own.
func (o *options) turn(ctx context.Context, e engine, s scenario, block int) (*outcome, error) {
	f, err := railsbench.Open(ctx, railsbench.Setup{Rates: o.rates, Kvspray: o.sidecar})
	if err != nil {
		return nil, err
	}
	defer f.Close()
	opt := &timeline.Options{Rates: o.rates, Block: block, Total: timeline.Whole(o.total, block)}
	if len(s.faults) > 0 {
		opt.Faults, opt.Duration = s.faults, o.span
	}
	res := &timeline.Result{Bench: "rails", Version: o.machine.Version, Host: o.machine.String(),
		Block: block, Total: opt.Total, Duration: timeline.Seconds(opt.Duration), Faults: opt.Faults}
	if res.Rails, res.Together, err = f.Plain(ctx, streamSpan); err != nil {
		return nil, err
	}
	x := &outcome{Engine: e.name, Scenario: s.name, Block: block, Result: res}
	if e.driver == "" {
		err = o.ours(ctx, f, opt, res)
	} else {
		x.Error, err = o.theirs(ctx, f, e, opt, res)
	}
	if err != nil {
		return nil, err
	}
	res.Judge()
	if len(opt.Faults) > 0 {
		from, to := opt.Faults[0].At, opt.Faults[1].At
		begun := from
		if len(res.Dips) > 0 {
			begun = res.Dips[0].At.D()
		}
		x.During = res.Surviving(from, begun, to)
		x.Stall = timeline.Seconds(stall(res))
	}
	return x, nil
}

// stall is the longest time in which next to nothing came over any rail, between the beginning and
// the end of the transfers.
func stall(r *timeline.Result) (longest time.Duration) {
	// keepalives and retransmissions are nothing
	const window, nothing = 50 * time.Millisecond, 16 << 10
	var end time.Duration
	for _, t := range r.Transfers {
		end = max(end, t.Began.D()+t.Took.D())
	}
	begin := time.Duration(-1)
	for at := time.Duration(0); at+window <= end; at += timeline.SampleEvery {
		switch quiet := r.Samples.Between(at, at+window) < nothing; {
		case quiet && begin < 0:
			begin = at
		case !quiet:
			begin = -1
		}
		if begin >= 0 {
			longest = max(longest, at+window-begin)
		}
	}
	return longest
}

// ours moves with two sidecars.
func (o *options) ours(ctx context.Context, f *railsbench.Field, opt *timeline.Options,
	res *timeline.Result) error {
	p, err := f.Engines(ctx, opt.Block, opt.Total, 2)
	if err != nil {
		return err
	}
	if err := f.Meet(ctx, p); err != nil {
		return err
	}
	if opt.Duration == 0 {
		// As many as the others, one after the other.
		opt = &timeline.Options{Rates: opt.Rates, Block: opt.Block, Total: opt.Total}
		return f.MoveCount(ctx, p, healthyCount, res)
	}
	return f.Move(ctx, p, opt, 1, res)
}

// write writes results, table and chart.
func (o *options) write(all []*outcome) error {
	b, err := json.MarshalIndent(all, "", " ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(o.out, "results.json"), append(b, '\n'), 0o644); err != nil {
		return err
	}
	var text strings.Builder
	o.table(&text, all)
	if err := os.WriteFile(filepath.Join(o.out, "table.txt"), []byte(text.String()),
		0o644); err != nil {
		return err
	}
	if _, err := io.WriteString(o.stdout, text.String()); err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(o.out, "chart.html"))
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	var panels []chart.Panel
	for _, x := range all {
		// Of each engine and fault the first turn: that is what a reader compares.
		if x.Turn == 0 && len(x.Result.Faults) > 0 && x.Block == o.blocks[0] &&
			len(x.Result.Samples.Bytes) > 0 {
			panels = append(panels, chart.Panel{Title: title(x.Engine) + ": " + x.Scenario,
				Result: x.Result})
		}
	}
	if len(panels) == 0 {
		return nil
	}
	return chart.HTML(f, "A rail fails: kvspray and other engines", panels...)
}

func title(name string) string {
	for _, e := range engines {
		if e.name == name {
			return e.title
		}
	}
	return name
}

// table has for each engine and block what was reached, worst and median over all turns, and of
// who had none why.
func (o *options) table(w *strings.Builder, all []*outcome) {
	fmt.Fprintf(w, "kvspray %s; %s\nrails %s; transfers of %s; %d turns each; shares of what plain "+
		"streams over all rails carried in the same turn\n\n", o.machine.Version, o.machine,
		join(o.rates), timeline.FormatSize(o.total), o.turns)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "engine\tblock\tcold, worst\twarm, worst\twarm, "+
		"median\tfault\tfailed\tof the other rails meanwhile, worst\tat 95% of them after, "+
		"worst\tlongest stall")
	for _, block := range o.blocks {
		for _, e := range o.engines {
			if why := o.unable[e.name]; why != "" {
				_, _ = fmt.Fprintf(t, "%s\t%s\tleft out\t\t\t\t\t\t\t\n", e.title,
					timeline.FormatSize(int64(block)))
				continue
			}
			var cold, warm []float64
			for _, x := range all {
				if x.Engine == e.name && x.Block == block && len(x.Result.Faults) == 0 {
					cold = append(cold, x.Result.Cold)
					warm = append(warm, x.Result.Warm)
				}
			}
			_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t\t\t\t\t\n", e.title,
				timeline.FormatSize(int64(block)), worst(cold), worst(warm), mid(warm))
			for _, s := range o.scenarios[1:] {
				o.row(t, s, slices.DeleteFunc(slices.Clone(all), func(x *outcome) bool {
					return x.Engine != e.name || x.Block != block || x.Scenario != s.name
				}))
			}
		}
	}
	_ = t.Flush()
	for _, e := range o.engines {
		if why := o.unable[e.name]; why != "" {
			fmt.Fprintf(w, "\n%s is left out: %s\n", e.title, why)
		}
	}
}

// row is what one engine made of one fault, in all of its turns.
func (o *options) row(w io.Writer, s scenario, turns []*outcome) {
	if len(turns) == 0 {
		return // interrupted before
	}
	var during, stalls []float64
	failed, transfers, note, window := 0, 0, "", "0 s"
	var longest time.Duration
	for _, x := range turns {
		during, stalls = append(during, x.During), append(stalls, x.Stall.D().Seconds())
		failed, transfers = failed+x.Result.Failed, transfers+len(x.Result.Transfers)
		switch d := x.Result.Dips; {
		case len(d) == 0 || d[0].Recovered == timeline.Never || window == "never":
			window = "never"
		case d[0].Recovered.D() >= longest:
			longest = d[0].Recovered.D()
			window = fmt.Sprintf("%.2f s", longest.Seconds())
		}
		if x.Error != "" {
			note = " (" + x.Error + ")"
		}
	}
	_, _ = fmt.Fprintf(w, "\t\t\t\t\t%s\t%d of %d%s\t%s\t%s\t%.2f s\n", s.name, failed, transfers,
		note, worst(during), window, slices.Max(stalls))
}

func join(r []timeline.Rate) string {
	var s []string
	for _, x := range r {
		s = append(s, x.String())
	}
	return strings.Join(s, " + ")
}

func worst(v []float64) string {
	if len(v) == 0 {
		return "-"
	}
	return fmt.Sprintf("%.3f", slices.Min(v))
}

func mid(v []float64) string {
	if len(v) == 0 {
		return "-"
	}
	s := slices.Clone(v)
	slices.Sort(s)
	return fmt.Sprintf("%.3f", s[len(s)/2])
}
