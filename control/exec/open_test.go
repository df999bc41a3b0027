package exec

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// threadCPU is what this thread has used: without what others collect meanwhile.
func threadCPU() time.Duration {
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &r); err != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// BenchmarkOpen is what a slice costs with 10,000 transfers open beside what it costs with 10, in turns: the median of the pairs' ratios, and the
// quarter and three quarters of them. A round is so many slices on each side, of transfers of 256 MiB, of which one in some thousands ends one.
func BenchmarkOpen(b *testing.B) {
	const few, many, round = 10, 10000, 20000
	for _, tokens := range []uint32{1 << 10, 1 << 16} {
		b.Run(fmt.Sprint(tokens/simBlock, "blocks"), func(b *testing.B) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			sides := [2]*loadedExec{newLoaded(b, few, tokens), newLoaded(b, many, tokens)}
			step := func(x *loadedExec) float64 {
				began := threadCPU()
				for range round {
					if dst, full := x.slice(); full {
						x.end(dst)
					}
				}
				return float64(threadCPU()-began) / round
			}
			for _, x := range sides {
				step(x)
			}
			var ratios []float64
			var cost [2][]float64
			for i := 0; b.Loop(); i++ {
				var c [2]float64
				for k := range sides { // who goes first changes
					k ^= i % 2
					c[k] = step(sides[k])
					cost[k] = append(cost[k], c[k])
				}
				ratios = append(ratios, c[1]/c[0])
			}
			at := func(v []float64, q float64) float64 {
				v = slices.Sorted(slices.Values(v))
				return v[int(q*float64(len(v)-1))]
			}
			b.ReportMetric(at(cost[0], 0.5), "few-ns")
			b.ReportMetric(at(cost[1], 0.5), "many-ns")
			b.ReportMetric(at(ratios, 0.25), "ratio-25%")
			b.ReportMetric(at(ratios, 0.5), "ratio-50%")
			b.ReportMetric(at(ratios, 0.75), "ratio-75%")
			runtime.KeepAlive(sides)
		})
	}
}
