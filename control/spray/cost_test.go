//go:build !race

package spray

import (
	"testing"
	"time"
)

// pullGoal is what the decision about one slice may cost with 32 candidate pairs. A core whose
// other half is busy takes nearly twice as long for the same, so twice the goal is what fails; the
// log has the figure.
const pullGoal = 500 * time.Nanosecond

// TestPullCost: the decision stays cheap with many pairs, the one that finds nothing and ends each
// round included. The race detector makes everything slow, so this is left out under it; make
// test-sim runs it.
func TestPullCost(t *testing.T) {
	const rounds, confirmed = 100, 16
	end, pull := loaded(t, 32)
	pull()
	best, whole := time.Hour, time.Hour
	for range 300 { // the best of them is what nobody else disturbed
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
