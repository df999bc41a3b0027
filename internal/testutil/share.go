package testutil

import (
	"slices"
	"testing"
	"time"
)

// share returns the used part of a core over all windows together, and logs how the windows differ.
// cpu returns the time used so far; after, if not nil, is called with the length of each window.
func share(t *testing.T, what string, windows int, window time.Duration, cpu func() time.Duration,
	after func(time.Duration)) float64 {
	t.Helper()
	var spent, total time.Duration
	shares := make([]float64, 0, windows)
	for range windows {
		began, used := time.Now(), cpu()
		<-time.After(window) // the time is the measurement
		took, mine := time.Since(began), cpu()-used
		if after != nil {
			after(took)
		}
		spent, total = spent+took, total+mine
		shares = append(shares, 100*float64(mine)/float64(took))
	}
	slices.Sort(shares)
	share := float64(total) / float64(spent)
	t.Logf("%s: %.2f%% of a core in %s; windows of %s: %.2f%% to %.2f%%, median %.2f%%", what,
		100*share, spent.Round(time.Millisecond), window,
		shares[0], shares[len(shares)-1], shares[len(shares)/2])
	return share
}
