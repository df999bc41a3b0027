package simbench

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/lab/chart"
	"github.com/kvspray/kvspray/lab/progress"
	"github.com/kvspray/kvspray/lab/timeline"
)

// maxResult bounds what is read of a file: an hour's samples of as many rails as there may be are
// half of it.
const maxResult = 512 << 20

// NewCommand returns the `sim` command.
func NewCommand() *cobra.Command {
	var nodes int
	var seed uint64
	var against string
	c := &cobra.Command{
		Use:   "sim",
		Short: "Move KV blocks over simulated rails between many nodes, while rails fail",
		Long: `Moves transfers between simulated nodes, with the production executors and schedulers, in
virtual time, while the faults happen: what 'kvspray-bench rails' does with two sidecars and the
kernel's rails, for up to thousands of nodes and without privileges. Half of the nodes send, each to
one of the others over rails of its own. The same flags and seed give the same run, down to the last
event.

What it prints: "moved" is the content of all transfers over the time from the first one's begin to
the last one's end, and its share of what plain streams over all of those links carry: 1 is all that
the links can do. "one transfer" is the rate of a single one, as a share of what the links of its
own sender carry together: the first one of each sender, whose scheduler has no history yet, and the
later ones (the median; with --duration two are wanted at a time).

With --against it runs the run of a result of 'kvspray-bench rails', on rails as they were measured
there, and compares.`,
		Example: `  kvspray-bench sim --rates 2gbit,1gbit,500mbit,500mbit --duration 8s \
      --fault 2s:rail0:down --fault 5s:rail0:up
  kvspray-bench sim --nodes 1000 --rates 25gbit,25gbit,25gbit,25gbit --block 64KiB --seed 7
  kvspray-bench sim --against rails.json`,
		Args: cobra.NoArgs,
	}
	flags := timeline.AddFlags(c)
	c.Flags().IntVar(&nodes, "nodes", 2, "simulated nodes, half of which send")
	c.Flags().Uint64Var(&seed, "seed", 1, "of all that is drawn at random")
	c.Flags().StringVar(&against, "against", "", "a JSON result of 'kvspray-bench rails' that is "+
		"run again and compared with")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		o, err := flags.Options()
		if err != nil {
			return err
		}
		if !cmd.Flags().Changed("total") {
			o.Total = granules(o.Total)
		}
		s := Setup{Options: o, Nodes: nodes, Seed: seed}
		var real *timeline.Result
		if against != "" {
			for _, f := range []string{"rates", "block", "total", "duration", "fault", "nodes"} {
				if cmd.Flags().Changed(f) {
					return usage.Errorf("--against %s and --%s: the result has its run; leave --%s out",
						against, f, f)
				}
			}
			if real, err = readResult(against); err != nil {
				return usage.Errorf("--against: %w: give the file that 'kvspray-bench rails --json FILE' wrote",
					err)
			}
			s = Predict(real, seed)
			s.Options.JSON, s.Options.HTML = o.JSON, o.HTML
			o = s.Options
		}
		s.Line = progress.Start(cmd.ErrOrStderr())
		res, err := Run(cmd.Context(), s)
		s.Line.Close()
		if err != nil {
			return err
		}
		if err := o.Save(res, cmd.OutOrStdout(), chart.Of("kvspray-bench sim")); err != nil {
			return err
		}
		if real != nil {
			return Compare(real, res, cmd.ErrOrStderr())
		}
		if res.Failed > 0 {
			return fmt.Errorf("%d of %d transfers failed", res.Failed, len(res.Transfers))
		}
		return nil
	}
	return c
}

func readResult(path string) (*timeline.Result, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	r, err := timeline.Read(io.LimitReader(f, maxResult))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	// It is a file: whatever stands there must be a run that can be made.
	o := &timeline.Options{Block: r.Block, Total: r.Total, Duration: r.Duration.D(), Faults: r.Faults}
	for _, x := range r.Rails {
		if x.Rate < timeline.MinRate || x.Rate > timeline.MaxRate || x.Alone < timeline.MinRate/2 ||
			x.Alone > timeline.MaxRate {
			return nil, fmt.Errorf("%s: %s, with a plain stream %s, is no rail", path, x.Rate, x.Alone)
		}
		o.Rates = append(o.Rates, x.Rate)
	}
	if r.Bench != "rails" || len(o.Rates) == 0 || r.Total <= 0 || r.Duration < 0 ||
		r.Together < timeline.MinRate/2 {
		return nil, fmt.Errorf("%s: no result of 'kvspray-bench rails'", path)
	}
	if err := o.Check(); err != nil {
		return nil, fmt.Errorf("%s: no result of 'kvspray-bench rails': %w", path, err)
	}
	r.Judge() // both runs are judged by one rule, whatever it was when the file was written
	return r, nil
}
