//go:build !race

package exec

import (
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
)

// Bounds for the cost of a slice, from its confirmation to the next one, and for the ratio of this
// cost with 10,000 open transfers and with few. The ratio is 1.3 (docs/bench/executor.md): ten
// transfers stay in the core's caches, and ten thousand do not. Other processes may use these
// caches, too.
const (
	sliceGoal  = 2 * time.Microsecond
	sliceRatio = 1.75
	// bytes on the heap: one transfer ends in some 250 slices, and its key is remembered.
	sliceLeaves = 32
)

// TestMeasureTenThousandOpen checks that a slice costs the same with ten open transfers and with
// ten thousand, and that it leaves almost nothing on the heap. Both take turns on one thread, of
// which the CPU time counts; the test judges the median of the ratios, because other load affects
// both alike. Left out under the race detector; make test-measure runs it.
func TestMeasureTenThousandOpen(t *testing.T) {
	testutil.Measures(t)
	// turns, the additional ones if they miss the bound, and slices of either side in each
	const turns, maxTurns, round = 15, 60, 5000
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// of 256 MiB: few of them fill every window, too
	sides := [2]*loadedExec{newLoaded(t, 10, 1<<16), newLoaded(t, 10000, 1<<16)}
	for _, x := range sides {
		x.cost(4 * round)
	}
	before := heapBytes()
	var costs [2][]float64
	var ratios []float64
	for turn := 0; turn < turns || turn < maxTurns && quantile(ratios, 0.5) > sliceRatio; turn++ {
		var c [2]float64
		for k := range sides { // the sides take turns in going first
			k ^= turn % 2
			c[k], _ = sides[k].cost(round)
			costs[k] = append(costs[k], c[k])
		}
		ratios = append(ratios, c[1]/c[0])
	}
	grew, moved := int64(heapBytes())-int64(before), int64(2*len(ratios)*round)
	runtime.KeepAlive(sides) // and all that they move: else this would be measured without
	ratio, fastest := quantile(ratios, 0.5), time.Duration(slices.Min(costs[1]))
	t.Logf("a slice: %.0f ns with 10 open, %.0f ns with 10,000, the fastest %v; of the ratios of "+
		"turns %.2f, a quarter to three %.2f to %.2f; the heap grew by %d KiB in %d slices",
		quantile(costs[0], 0.5), quantile(costs[1], 0.5), fastest, ratio, quantile(ratios, 0.25),
		quantile(ratios, 0.75), grew>>10, moved)
	if ratio > sliceRatio {
		t.Errorf("a slice costs %.2f times with 10,000 open what it does with 10, want %g at most: %.2f",
			ratio, sliceRatio, ratios)
	}
	if fastest > sliceGoal {
		t.Errorf("a slice costs %v with 10,000 open, want %v at most", fastest, sliceGoal)
	}
	if grew > sliceLeaves*moved {
		t.Errorf("the heap grew by %d bytes in %d slices, want %d for each at most", grew, moved,
			sliceLeaves)
	}
}
