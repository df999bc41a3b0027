// Package gpubench measures what the sidecar does with GPU memory, each figure beside the physical
// ceiling taken in the same run: scattered blocks between two GPUs whose memory belongs to two
// other processes, and copies between host memory and one GPU over every GPU's PCIe link. Contents
// are checked.
package gpubench

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/lab/machine"
	"github.com/kvspray/kvspray/lab/progress"
	"github.com/kvspray/kvspray/lab/timeline"
)

// Row is one measured line.
type Row struct {
	Bench   string  `json:"bench"`
	What    string  `json:"what"`
	Bytes   uint64  `json:"bytes"`          // of one repetition
	Block   uint64  `json:"block,omitzero"` // bytes of a scattered block
	GBps    float64 `json:"gb_per_s"`       // median
	Min     float64 `json:"min"`
	Max     float64 `json:"max"`
	Ceiling float64 `json:"ceiling_gb_per_s,omitzero"`
	// median of GBps / Ceiling, each pair taken one after the other
	Ratio float64 `json:"ratio,omitzero"`
	Cores float64 `json:"cpu_cores"` // of this process meanwhile
}

// Report is what --json writes.
type Report struct {
	Machine machine.Machine `json:"machine"`

	Devices []string `json:"devices"`
	Driver  int      `json:"cuda_version"`
	Rows    []Row    `json:"rows"`

	Threshold uint64 `json:"multipath_threshold_bytes,omitzero"`
}

type bench struct {
	drv    *cuda.Driver
	out    io.Writer
	line   *progress.Line
	repeat int
	name   string // of the bench that runs
	report Report

	interrupted func() error // the error with which to end, once a signal has asked for that
}

// NewCommand makes `kvspray-bench gpu`.
func NewCommand() *cobra.Command {
	var repeat int
	var jsonFile, htmlFile string
	cmd := &cobra.Command{
		Use: "gpu [staged] [within] [nvlink] [multipath]",
		Short: "GPU memory: NVLink between two processes' GPUs, and every PCIe link to one GPU, beside " +
			"the ceilings",
		Long: `Measures the paths that the sidecar has to GPU memory, all that this host can or those that
are named. Needs a build with cgo; nvlink and multipath need two GPUs or more with peer access.

  staged      slices between GPU 0 and host memory, as tcp lanes take them, by each copy method;
              moves as shm lanes take them
  within      scattered blocks within GPU 0, in memory of two other processes: one kernel, as the
              sidecar copies there, and pack, copy engine, unpack
  nvlink      scattered blocks from GPU 0 to GPU 1, in memory of two other processes: pack, copy
              engine, unpack
  multipath   host memory to and from GPU 0 over the PCIe links of 1, 2, ... all GPUs

Each repetition is paired with one of its ceiling (the contiguous copy, all links at once).`,
		Args:      cobra.OnlyValidArgs,
		ValidArgs: benches,
		RunE: func(cmd *cobra.Command, args []string) error {
			if repeat < 1 || repeat > 1000 {
				return usage.Errorf("--repeat %d: want 1 to 1000", repeat)
			}
			for _, out := range []struct{ flag, path string }{{"--json", jsonFile}, {"--html", htmlFile}} {
				if out.path == "-" { // where the table goes
					return usage.Errorf("%s -: name a file; standard output has the table", out.flag)
				}
				if err := timeline.Writable(out.path); err != nil {
					return usage.Errorf("%s: %w", out.flag, err)
				}
			}
			drv, err := cuda.Open()
			if err != nil {
				return err
			}
			if args, err = choose(args, len(drv.Devices)); err != nil {
				return err
			}
			line := progress.Start(cmd.ErrOrStderr())
			defer line.Close()
			b := &bench{drv: drv, out: cmd.OutOrStdout(), line: line, repeat: repeat,
				report: Report{Machine: machine.Here(), Driver: drv.Version}, interrupted: cmd.Context().Err}
			for _, d := range drv.Devices {
				name, err := d.Name()
				if err != nil {
					return err
				}
				b.report.Devices = append(b.report.Devices, name)
			}
			fmt.Fprintf(b.out, "%d x %s\n%-58s %9s %9s %9s %9s %7s %6s\n", len(drv.Devices),
				b.report.Devices[0], "", "GB/s", "min", "max", "ceiling",
				"ratio", "cores")
			for _, name := range args {
				// Results are kept, whatever becomes of the next. What fails after a signal fails for
				// that: it reaches processes of ours, too.
				if err = errors.Join(b.run(name), b.interrupted(), b.write(jsonFile, htmlFile)); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().IntVar(&repeat, "repeat", 20, "pairs of measurement and ceiling")
	cmd.Flags().StringVar(&jsonFile, "json", "", "also write the report to this file")
	cmd.Flags().StringVar(&htmlFile, "html", "", "also draw the report to this file")
	cmd.AddCommand(newOwnerCommand())
	return cmd
}

// benches are in the order in which they run.
var benches = []string{"staged", "within", "nvlink", "multipath"}

// choose returns the benches that run on that many GPUs: those asked for, or all that can.
func choose(asked []string, gpus int) (out []string, err error) {
	for _, name := range benches {
		if len(asked) > 0 && !slices.Contains(asked, name) {
			continue
		}
		need := 2
		if name == "staged" || name == "within" {
			need = 1
		}
		switch {
		case gpus >= need:
			out = append(out, name)
		case len(asked) > 0:
			return nil, fmt.Errorf("gpu %s: %d GPUs here, it takes %d or more", name, gpus, need)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("gpu: the driver shows no GPU; look at `kvspray doctor`")
	}
	return out, nil
}

func (b *bench) run(name string) error {
	b.name = name
	b.line.Phase("%s: filling memory of hosts and GPUs", name)
	defer b.line.End()
	switch name {
	case "nvlink":
		return b.nvlink()
	case "within":
		return b.within()
	case "staged":
		return b.staged()
	default:
		return b.multipath()
	}
}

// write leaves the report in the files that were asked for.
func (b *bench) write(jsonFile, htmlFile string) error {
	if len(b.report.Rows) == 0 {
		return nil
	}
	if jsonFile != "" {
		raw, err := json.MarshalIndent(b.report, "", "  ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(jsonFile, append(raw, '\n'), 0o644); err != nil {
			return err
		}
	}
	if htmlFile != "" {
		var page bytes.Buffer
		if err := b.report.HTML(&page); err != nil {
			return err
		}
		return os.WriteFile(htmlFile, page.Bytes(), 0o644)
	}
	return nil
}

// pair times f and ceiling alternately and records a row. ceiling moves ceilingBytes; nil: none.
func (b *bench) pair(r Row, f func() error, ceilingBytes uint64, ceiling func() error) error {
	b.line.Phase("%s: %s", b.name, r.What)
	if err := f(); err != nil { // warm-up
		return fmt.Errorf("%s: %w", r.What, err)
	}
	var rates, ceilings, ratios []float64
	var cpu, wall float64
	for i := range b.repeat {
		b.line.Note("%d of %d", i+1, b.repeat)
		if err := b.interrupted(); err != nil {
			return fmt.Errorf("%s: %w", r.What, err)
		}
		if ceiling != nil {
			t := time.Now()
			if err := ceiling(); err != nil {
				return fmt.Errorf("%s: ceiling: %w", r.What, err)
			}
			ceilings = append(ceilings, float64(ceilingBytes)/time.Since(t).Seconds()/1e9)
		}
		c, t := cpuSeconds(), time.Now()
		if err := f(); err != nil {
			return fmt.Errorf("%s: %w", r.What, err)
		}
		d := time.Since(t).Seconds()
		cpu, wall = cpu+cpuSeconds()-c, wall+d
		rates = append(rates, float64(r.Bytes)/d/1e9)
		if ceiling != nil {
			ratios = append(ratios, rates[len(rates)-1]/ceilings[len(ceilings)-1])
		}
	}
	r.GBps, r.Min, r.Max, r.Cores = median(rates), slices.Min(rates), slices.Max(rates), cpu/wall
	if ceiling != nil {
		r.Ceiling, r.Ratio = median(ceilings), median(ratios)
	}
	r.Bench = b.name
	b.report.Rows = append(b.report.Rows, r)
	b.line.End()
	fmt.Fprintf(b.out, "%-58s %9.2f %9.2f %9.2f %9.2f %7.3f %6.2f\n", r.What, r.GBps, r.Min, r.Max,
		r.Ceiling, r.Ratio, r.Cores)
	return nil
}

func median(v []float64) float64 {
	v = slices.Clone(v)
	slices.Sort(v)
	return (v[len(v)/2] + v[(len(v)-1)/2]) / 2
}

func cpuSeconds() float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return float64(u.Utime.Sec+u.Stime.Sec) + float64(u.Utime.Usec+u.Stime.Usec)/1e6
}
