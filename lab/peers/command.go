package peers

import (
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/lab/machine"
	"github.com/kvspray/kvspray/lab/railsbench"
	"github.com/kvspray/kvspray/lab/timeline"
)

// NewCommand returns the `peers` command.
func NewCommand() *cobra.Command {
	var o options
	var rates, blocks, total, only, faults, sidecar string
	c := &cobra.Command{
		Use:   "peers",
		Short: "Compare with NIXL and Mooncake over the same rails, while rails fail",
		Long: `Moves the same scattered blocks over the same rails with kvspray and with other transfer
engines, in turns, healthy and while one rail fails. Needs root, and an environment with the other
engines, which 'make bench-peers' makes.`,
		Example: `  kvspray-bench peers
  kvspray-bench peers --rates 200mbit,100mbit --blocks 16KiB --total 32MiB --engines kvspray,nixl`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			o.machine = machine.Here()
			o.stdout, o.stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
			if err := o.parse(rates, blocks, total, only, faults); err != nil {
				return err
			}
			if o.sidecar, err = railsbench.FindSidecar(sidecar); err != nil {
				return err
			}
			return run(cmd.Context(), o)
		},
	}
	f := c.Flags()
	f.StringVar(&sidecar, railsbench.SidecarFlag, "", railsbench.SidecarUsage)
	f.StringVar(&o.python, "python", ".build/venv-peers/bin/python",
		"interpreter with nixl and mooncake-transfer-engine")
	f.StringVar(&o.driver, "driver", "lab/peers/driver.py", "the engines' driver")
	f.StringVar(&o.out, "out", ".build/bench/peers",
		"directory for results.json, table.txt and chart.html")
	f.IntVar(&o.turns, "turns", 2, "turns of every engine")
	f.StringVar(&rates, "rates", "2gbit,1gbit,500mbit,500mbit",
		"the rails' rates, separated by commas")
	f.StringVar(&blocks, "blocks", "16KiB,1MiB", "block sizes, separated by commas")
	f.StringVar(&total, "total", "256MiB", "bytes of one transfer, rounded down to whole blocks")
	f.StringVar(&only, "engines", "", "some of the engines, separated by commas (default: all)")
	f.StringVar(&faults, "faults", defaultFaults, "faults of the fastest rail, separated by commas: "+
		"kinds of kvspray-bench rails --fault; slowest:KIND for the slowest rail")
	f.DurationVar(&o.span, "span", 9*time.Second,
		"time of the transfers around a fault, which lasts a third of it")
	return c
}

// parse checks the flags. Its error is a usage error.
func (o *options) parse(rates, blocks, total, only, faults string) (err error) {
	o.unable = map[string]string{}
	for _, s := range strings.Split(rates, ",") {
		r, err := timeline.ParseRate(s)
		if err != nil {
			return usage.Errorf("--rates: %w", err)
		}
		o.rates = append(o.rates, r)
	}
	for _, s := range strings.Split(blocks, ",") {
		b, err := timeline.ParseSize(s)
		if err != nil {
			return usage.Errorf("--blocks: %w", err)
		}
		if err := timeline.CheckBlock(int(b)); err != nil {
			return usage.Errorf("--blocks: %w", err)
		}
		o.blocks = append(o.blocks, int(b))
	}
	if o.total, err = timeline.ParseSize(total); err != nil {
		return usage.Errorf("--total: %w", err)
	}
	if b := slices.Max(o.blocks); o.total < int64(b) {
		return usage.Errorf("--total %s: must be at least one block of %s", total,
			timeline.FormatSize(int64(b)))
	}
	if o.turns < 1 {
		return usage.Errorf("--turns %d: must be positive", o.turns)
	}
	if o.span < minSpan || o.span > maxSpan {
		return usage.Errorf("--span %s: must be from %s to %s", o.span, minSpan, maxSpan)
	}
	for _, name := range strings.Split(only, ",") {
		if only != "" && !slices.ContainsFunc(engines, func(e engine) bool { return e.name == name }) {
			return usage.Errorf("--engines %q: %q is none of %s", only, name, engineNames())
		}
	}
	for _, e := range engines {
		if only == "" || slices.Contains(strings.Split(only, ","), e.name) {
			o.engines = append(o.engines, e)
		}
	}
	o.scenarios = []scenario{{name: "healthy"}}
	if faults == "" {
		return nil
	}
	for _, f := range strings.Split(faults, ",") {
		s, err := o.scenario(f)
		if err != nil {
			return usage.Errorf("--faults: %w", err)
		}
		o.scenarios = append(o.scenarios, s)
	}
	return nil
}
