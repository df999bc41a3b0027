//go:build !race

package spray

import (
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
)

// pullGoal bounds the cost of the decision about one slice with 32 candidate pairs. If the other
// thread of its core is busy, a core takes almost twice as long, so the test fails from twice the
// goal; the log has the value.
const pullGoal = 500 * time.Nanosecond

// TestMeasurePull checks that the decision is cheap with many pairs, including the pull that finds
// nothing at the end of each round. Left out under the race detector; make test-measure runs it.
func TestMeasurePull(t *testing.T) {
	testutil.Measures(t)
	const rounds, confirmed = 100, 16
	end, pull := loaded(t, 32)
	pull()
	best, whole := time.Hour, time.Hour
	for range 300 { // the best one was not disturbed
		var pulls int
		var pulling time.Duration
		began := time.Now()
		for range rounds {
			for range confirmed {
				end()
			}
			from := time.Now()
			pulls += pull()
			pulling += time.Since(from)
		}
		if pulls < rounds*confirmed/2 {
			t.Fatalf("%d slices for %d that ended: not what this test is about", pulls, rounds*confirmed)
		}
		best = min(best, pulling/time.Duration(pulls))
		whole = min(whole, time.Since(began)/time.Duration(pulls))
	}
	t.Logf("32 pairs: %s for a pull, %s with its confirmation", best, whole)
	if best > 2*pullGoal {
		t.Errorf("%s for a pull: want %s", best, pullGoal)
	}
}
