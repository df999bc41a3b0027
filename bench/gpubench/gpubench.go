// Package gpubench measures what the sidecar does with GPU memory, each figure beside the physical ceiling taken in the same
// run: scattered blocks between two GPUs whose memory belongs to two other processes, and copies between host memory and one GPU
// over every GPU's PCIe link. Contents are checked.
package gpubench

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/cuda"
)

// Row is one measured line.
type Row struct {
	What    string  `json:"what"`
	Bytes   uint64  `json:"bytes"`          // of one repetition
	Block   uint64  `json:"block,omitzero"` // bytes of a scattered block
	GBps    float64 `json:"gb_per_s"`       // median
	Min     float64 `json:"min"`
	Max     float64 `json:"max"`
	Ceiling float64 `json:"ceiling_gb_per_s,omitzero"`
	Ratio   float64 `json:"ratio,omitzero"` // median of GBps / Ceiling, each pair taken one after the other
	Cores   float64 `json:"cpu_cores"`      // of this process meanwhile
}

// Report is what --json writes.
type Report struct {
	Devices []string `json:"devices"`
	Driver  int      `json:"cuda_version"`
	Rows    []Row    `json:"rows"`

	Threshold uint64 `json:"multipath_threshold_bytes,omitzero"`
}

type bench struct {
	drv    *cuda.Driver
	out    io.Writer
	repeat int
	report Report
}

// NewCommand makes `kvspray bench gpu`.
func NewCommand() *cobra.Command {
	var repeat int
	var jsonFile string
	cmd := &cobra.Command{
		Use:   "gpu nvlink|staged|multipath",
		Short: "GPU memory: NVLink between two processes' GPUs, and every PCIe link to one GPU, beside the ceilings",
		Long: `Measures the paths that the sidecar has to GPU memory. Needs a build with cgo, and but for staged two GPUs or more with peer access.

  nvlink      scattered blocks from GPU 0 to GPU 1, the memory belonging to two other processes: pack, copy engine, unpack
  staged      slices between GPU 0 and host memory, as tcp lanes take them, by each executor; moves as shm lanes take them
  multipath   host memory to and from GPU 0 over the PCIe links of 1, 2, ... all GPUs

Each repetition is paired with one of its ceiling (the contiguous copy, all links at once).`,
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		ValidArgs: []string{"nvlink", "staged", "multipath"},
		RunE: func(cmd *cobra.Command, args []string) error {
			if repeat < 1 || repeat > 1000 {
				return fmt.Errorf("--repeat %d: want 1 to 1000", repeat)
			}
			drv, err := cuda.Open()
			if err != nil {
				return err
			}
			if len(drv.Devices) < 2 && args[0] != "staged" {
				return fmt.Errorf("bench gpu %s: %d GPU here: want two or more", args[0], len(drv.Devices))
			}
			b := &bench{drv: drv, out: cmd.OutOrStdout(), repeat: repeat, report: Report{Driver: drv.Version}}
			for _, d := range drv.Devices {
				name, err := d.Name()
				if err != nil {
					return err
				}
				b.report.Devices = append(b.report.Devices, name)
			}
			fmt.Fprintf(b.out, "%d x %s\n%-58s %9s %9s %9s %9s %7s %6s\n", len(drv.Devices), b.report.Devices[0], "", "GB/s", "min", "max", "ceiling",
				"ratio", "cores")
			switch args[0] {
			case "nvlink":
				err = b.nvlink()
			case "staged":
				err = b.staged()
			default:
				err = b.multipath()
			}
			if err != nil {
				return err
			}
			if jsonFile == "" {
				return nil
			}
			raw, err := json.MarshalIndent(b.report, "", "  ")
			if err != nil {
				return err
			}
			return os.WriteFile(jsonFile, append(raw, '\n'), 0o644)
		},
	}
	cmd.Flags().IntVar(&repeat, "repeat", 20, "pairs of measurement and ceiling")
	cmd.Flags().StringVar(&jsonFile, "json", "", "also write the report to this file")
	cmd.AddCommand(newOwnerCommand())
	return cmd
}

// pair times f and ceiling alternately and records a row. ceiling moves ceilingBytes; nil: none.
func (b *bench) pair(r Row, f func() error, ceilingBytes uint64, ceiling func() error) error {
	if err := f(); err != nil { // warm-up
		return fmt.Errorf("%s: %w", r.What, err)
	}
	var rates, ceilings, ratios []float64
	var cpu, wall float64
	for range b.repeat {
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
	b.report.Rows = append(b.report.Rows, r)
	fmt.Fprintf(b.out, "%-58s %9.2f %9.2f %9.2f %9.2f %7.3f %6.2f\n", r.What, r.GBps, r.Min, r.Max, r.Ceiling, r.Ratio, r.Cores)
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
