// Package copybench is `kvspray-bench copy`: scattered blocks between two processes through a real
// backend, beside what the same machine does at best at the same moment.
//
// The command starts itself a second time: the parent is the source, the child the destination,
// each with a region of 512 MiB in a memfd. Blocks lie at random places on both sides. Each round
// moves everything once through the backend and once through the baseline, in turns, so that a
// noisy machine disturbs both alike; the ratio is the median of the rounds' own ratios. Content is
// checked after every round, outside the time.
//
// Baselines. tcp: a plain Go stream, writev of contiguous 256 KiB pieces from one memfd, readv of
// the same pieces into the other, over as many connections. shm: a C program that copies the same
// scattered blocks between the same memfds by memcpy with as many threads
// (lab/baseline/memcpy.c).
//
// Goroutines belong to one run and are joined before it ends.
package copybench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/lab/machine"
	"github.com/kvspray/kvspray/lab/progress"
	"github.com/kvspray/kvspray/lab/timeline"
)

// Sizes.
const (
	regionBytes = 512 << 20
	maxConns    = 64
	maxRounds   = 1000
	maxWindow   = 4096 // slices; lanes take fewer
	minBlock    = 512
	blockUnit   = 8 // bytes: the content is compared in words
)

// options are the flags.
type options struct {
	Transport string
	Blocks    []int
	Total     int
	Conns     int
	Window    int
	Slice     int
	Rounds    int
	Integrity string
	Baseline  string
	JSON      bool
	Role      string
}

// NewCopyCommand returns the `copy` command.
func NewCopyCommand() *cobra.Command {
	var o options
	var blocks, total, slice string
	c := &cobra.Command{
		Use:   "copy",
		Short: "Move scattered blocks between two processes and compare with what the machine can do",
		Long: `Moves scattered random blocks between two processes through a real transport, in turns with
a baseline: for tcp a plain Go stream with as many connections, for shm a C memcpy over the same
blocks with as many threads. Content is checked.`,
		Example: `  kvspray-bench copy
  kvspray-bench copy --transport shm --conns 4 --blocks 16KiB --json
  kvspray-bench copy --integrity crc32c --total 64MiB --rounds 3`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Role == roleSink {
				return runSink(cmd.Context(), os.Stdin, os.Stdout)
			}
			if err := o.parse(blocks, total, slice, cmd.Flags().Changed("slice")); err != nil {
				return usage.Of(err)
			}
			path := []string{cmd.Name()}
			for p := cmd.Parent(); p != nil && p.HasParent(); p = p.Parent() {
				path = append(path, p.Name())
			}
			slices.Reverse(path)
			rep, err := run(cmd.Context(), o, path, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if o.JSON {
				e := json.NewEncoder(cmd.OutOrStdout())
				e.SetIndent("", "  ")
				return e.Encode(rep)
			}
			return rep.print(cmd.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVar(&o.Transport, "transport", "tcp", "tcp or shm")
	f.StringVar(&blocks, "blocks", "656,4KiB,9KiB,16KiB,28KiB,64KiB,1MiB,16MiB",
		"block sizes, separated by commas; pages of real models have 656, 9KiB or 28KiB")
	f.StringVar(&total, "total", "256MiB", "bytes moved in one round, at most 512MiB")
	f.IntVar(&o.Conns, "conns", 1, "connections, or lanes and copying threads for shm")
	f.IntVar(&o.Window, "window", 16, "slices under way on each lane")
	f.StringVar(&slice, "slice", "", "bytes of a slice (default: what the transport suggests)")
	f.IntVar(&o.Rounds, "rounds", 9, "measured rounds for each block size")
	f.StringVar(&o.Integrity, "integrity", "off", "off, crc32c or aead (tcp)")
	f.StringVar(&o.Baseline, "baseline", "", "the C baseline of shm (default: kvspray-memcpy beside "+
		"this binary, or in bin)")
	f.BoolVar(&o.JSON, "json", false, "print JSON")
	f.StringVar(&o.Role, "role", "", "for the second process")
	_ = f.MarkHidden("role")
	return c
}

// parse reads the sizes and checks everything.
func (o *options) parse(blocks, total, slice string, sliced bool) (err error) {
	if o.Blocks, err = parseSizes(blocks); err != nil {
		return fmt.Errorf("--blocks: %w", err)
	}
	one := func(flag, s string) (int, error) {
		v, err := parseSizes(s)
		if err == nil && len(v) != 1 {
			err = fmt.Errorf("%q: one size is wanted", s)
		}
		if err != nil {
			return 0, fmt.Errorf("--%s: %w", flag, err)
		}
		return v[0], nil
	}
	if o.Total, err = one("total", total); err != nil {
		return err
	}
	if sliced {
		if o.Slice, err = one("slice", slice); err != nil {
			return err
		}
	}
	return o.check()
}

func (o *options) check() error {
	switch {
	case o.Transport != "tcp" && o.Transport != "shm":
		return fmt.Errorf("--transport %q: must be tcp or shm", o.Transport)
	case o.Integrity != "off" && o.Integrity != "crc32c" && o.Integrity != "aead":
		return fmt.Errorf("--integrity %q: must be off, crc32c or aead", o.Integrity)
	case o.Integrity != "off" && o.Transport != "tcp":
		return fmt.Errorf("--integrity %s: %s has no wire; use off", o.Integrity, o.Transport)
	case o.Conns < 1 || o.Conns > maxConns:
		return fmt.Errorf("--conns %d: must be 1 to %d", o.Conns, maxConns)
	case o.Window < 1 || o.Window > maxWindow:
		return fmt.Errorf("--window %d: must be 1 to %d", o.Window, maxWindow)
	case o.Rounds < 1 || o.Rounds > maxRounds:
		return fmt.Errorf("--rounds %d: must be 1 to %d", o.Rounds, maxRounds)
	case o.Total < chunk || o.Total > regionBytes || o.Total%chunk != 0:
		return fmt.Errorf("--total %s: must be a multiple of %s, at most %s", size(o.Total), size(chunk),
			size(regionBytes))
	case o.Slice%chunk != 0 || o.Slice > o.Total:
		return fmt.Errorf("--slice %s: must be a multiple of %s, at most --total %s", size(o.Slice),
			size(chunk), size(o.Total))
	}
	for _, b := range o.Blocks {
		switch {
		case b < minBlock || b%blockUnit != 0 || b > o.Total:
			return fmt.Errorf("--blocks %s: must be a multiple of %d bytes, from %s to --total %s",
				size(b), blockUnit, size(minBlock), size(o.Total))
		case blocks(b, o.Total) > regionBytes/b:
			return fmt.Errorf("--blocks %s and --total %s: %s have no room for that many blocks: use less "+
				"of --total",
				size(b), size(o.Total), size(regionBytes))
		}
	}
	return nil
}

func size(n int) string { return timeline.FormatSize(int64(n)) }

// parseSizes reads "4KiB,1MiB".
func parseSizes(s string) (out []int, err error) {
	for f := range strings.SplitSeq(s, ",") {
		n, err := timeline.ParseSize(strings.TrimSpace(f))
		if err != nil {
			return nil, err
		}
		out = append(out, int(n))
	}
	return out, nil
}

// Result is one block size.
type Result struct {
	Block         int        `json:"block_bytes"`
	GBps          float64    `json:"gb_per_s"`
	BaselineGBps  float64    `json:"baseline_gb_per_s"`
	Ratio         float64    `json:"ratio"`
	Ratios        []float64  `json:"ratios"`
	Spread        [2]float64 `json:"ratio_min_max"`
	SpreadGBps    [2]float64 `json:"gb_per_s_min_max"`
	CPUPerGB      float64    `json:"cpu_s_per_gb"`
	BaselineCPU   float64    `json:"baseline_cpu_s_per_gb"`
	ContentErrors int        `json:"content_errors"`
}

// Report is one run.
type Report struct {
	Transport string   `json:"transport"`
	Integrity string   `json:"integrity"`
	Conns     int      `json:"conns"`
	Window    int      `json:"window"`
	Slice     int      `json:"slice_bytes"`
	Total     int      `json:"total_bytes"`
	Rounds    int      `json:"rounds"`
	Baseline  string   `json:"baseline"`
	Copies    []string `json:"copies"` // which routine copies memory, by size, and what each reached
	Results   []Result `json:"results"`

	Machine machine.Machine `json:"machine"`
}

func (r *Report) print(w io.Writer) error {
	if _, err := fmt.Fprintf(w, "%s, integrity %s, %d connections, %s in slices of %s, %d rounds; "+
		"%s\nbaseline: %s\ncopies: %s\n\n",
		r.Transport, r.Integrity, r.Conns, size(r.Total), size(r.Slice), r.Rounds, r.Machine, r.Baseline,
		strings.Join(r.Copies, "; ")); err != nil {
		return err
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(t, "block\tGB/s\tbaseline\tratio\tmin\tmax\tCPU s/GB\tbaseline\t")
	for _, x := range r.Results {
		_, _ = fmt.Fprintf(t, "%s\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t\n",
			size(x.Block), x.GBps, x.BaselineGBps, x.Ratio, x.Spread[0], x.Spread[1], x.CPUPerGB,
			x.BaselineCPU)
	}
	return t.Flush()
}

func median(v []float64) float64 {
	s := slices.Clone(v)
	slices.Sort(s)
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

// run is the parent.
func run(ctx context.Context, o options, path []string, stderr io.Writer) (*Report, error) {
	here := machine.Here()
	line := progress.Start(stderr)
	defer line.Close()
	line.Phase("making two regions of %d MiB and the second process", regionBytes>>20)
	s, err := newSource(ctx, o, path)
	if err != nil {
		return nil, err
	}
	defer s.close()
	s.line = line
	rep := &Report{Transport: o.Transport, Integrity: o.Integrity, Conns: o.Conns, Window: s.window,
		Slice: s.slice, Total: o.Total,
		Rounds: o.Rounds, Baseline: s.baselineName(), Copies: s.copies, Machine: here}
	seeds := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	for _, b := range o.Blocks {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		res, err := s.measure(ctx, b, seeds)
		if err != nil {
			return nil, fmt.Errorf("copy: %s, blocks of %d bytes: %w", o.Transport, b, err)
		}
		rep.Results = append(rep.Results, *res)
		line.Print("%s %8d B: %.2f GB/s, baseline %.2f, ratio %.2f", o.Transport, b, res.GBps,
			res.BaselineGBps, res.Ratio)
	}
	return rep, nil
}

// measure alternates both ways over one block size.
func (s *source) measure(ctx context.Context, block int, seeds *rand.Rand) (*Result, error) {
	s.line.Phase(
		"%s, blocks of %d bytes: a warm-up and %d rounds of %s, each through %s and as the baseline",
		s.o.Transport, block, s.o.Rounds, size(s.o.Total),
		s.o.Transport)
	if err := s.layout(block, seeds.Uint64()); err != nil {
		return nil, err
	}
	res := &Result{Block: block}
	var ours, base, oursCPU, baseCPU []float64
	gb := float64(s.o.Total) / 1e9
	for round := range s.o.Rounds + 1 { // the first one warms up
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		s.line.Note("%d of %d", round, s.o.Rounds)
		var us, them sample
		var err error
		for turn := range 2 {
			if (turn+round)%2 == 0 {
				us, err = s.moveAll(ctx, seeds.Uint64())
			} else {
				them, err = s.baseline(seeds.Uint64())
			}
			if err != nil {
				return nil, err
			}
		}
		if round == 0 {
			continue
		}
		ours, base = append(ours, gb/us.wall.Seconds()), append(base, gb/them.wall.Seconds())
		oursCPU, baseCPU = append(oursCPU, us.cpu.Seconds()/gb), append(baseCPU, them.cpu.Seconds()/gb)
		res.Ratios = append(res.Ratios, them.wall.Seconds()/us.wall.Seconds())
	}
	res.GBps, res.BaselineGBps, res.Ratio = median(ours), median(base), median(res.Ratios)
	res.Spread = [2]float64{slices.Min(res.Ratios), slices.Max(res.Ratios)}
	res.SpreadGBps = [2]float64{slices.Min(ours), slices.Max(ours)}
	res.CPUPerGB, res.BaselineCPU = median(oursCPU), median(baseCPU)
	return res, nil
}

var errContent = errors.New("content differs after the round")
