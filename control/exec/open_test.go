package exec

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// threadCPU is the CPU time of this thread, without the collector's.
func threadCPU() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		panic(err)
	}
	return time.Duration(ts.Nano())
}

// cost is the thread's time per slice, and per end of a transfer with the begin of the next one.
func (x *loadedExec) cost(slices int) (slice, end float64) {
	began, ends, ending := threadCPU(), 0, time.Duration(0)
	for range slices {
		if dst, full := x.slice(); full {
			from := threadCPU()
			x.end(dst)
			ending += threadCPU() - from
			ends++
		}
	}
	return float64(threadCPU()-began-ending) / float64(slices), float64(ending) / float64(max(ends, 1))
}

// quantile is the nearest value that this share of all values does not exceed.
func quantile(v []float64, q float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[int(q*float64(len(v)-1)+0.5)]
}

// BenchmarkOpen compares slices, and ends of transfers with the begin of the next one, with 10,000
// open transfers and with few, in turns: the medians, and the quartiles of the ratios.
func BenchmarkOpen(b *testing.B) {
	const round = 20000 // slices of either side
	for _, x := range []struct {
		few    int
		tokens uint32
	}{{100, 1 << 10}, {10, 1 << 16}} { // enough to fill the windows, at 4 MiB and at 256 MiB
		b.Run(fmt.Sprintf("%d and 10000 of %d MiB", x.few, x.tokens>>8), func(b *testing.B) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			sides := [2]*loadedExec{newLoaded(b, x.few, x.tokens), newLoaded(b, 10000, x.tokens)}
			for _, x := range sides {
				x.cost(round)
			}
			var ratios, few, many [2][]float64 // of slices and of ends
			for i := 0; b.Loop(); i++ {
				var c [2][2]float64
				for k := range sides { // the sides take turns in going first
					k ^= i % 2
					c[k][0], c[k][1] = sides[k].cost(round)
				}
				for what := range ratios {
					few[what], many[what] = append(few[what], c[0][what]), append(many[what], c[1][what])
					ratios[what] = append(ratios[what], c[1][what]/c[0][what])
				}
			}
			for what, name := range []string{"slice", "transfer"} {
				b.ReportMetric(quantile(few[what], 0.5), name+"-few-ns")
				b.ReportMetric(quantile(many[what], 0.5), name+"-many-ns")
				for _, q := range []float64{0.25, 0.5, 0.75} {
					b.ReportMetric(quantile(ratios[what], q), fmt.Sprintf("%s-ratio-%.0f%%", name, 100*q))
				}
			}
			runtime.KeepAlive(sides)
		})
	}
}
