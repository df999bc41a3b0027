// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"
)

// CollectorBound is how long nothing of ours may hold the garbage collector.
const CollectorBound = 50 * time.Millisecond

const (
	collectorSamples = 20                 // collections that nothing disturbed
	collectorTime    = 10 * time.Second   // for all of them
	collectorLeast   = 3                  // undisturbed ones without which nothing was shown
	collectorNoise   = CollectorBound / 5 // of waiting for a CPU in one collection, from which on it counts as disturbed
)

// LetsCollectorIn fails the test if what runs meanwhile, which the caller started and will stop, keeps a garbage collection from
// ending within CollectorBound.
//
// The worst collection counts, since a loop may hold the collector only now and then, but only among those that were not disturbed:
// on a busy machine threads wait for a CPU, and the kernel says how long each of ours has (schedstat). A loop that cannot be
// preempted runs; it does not wait. So its collections are never taken for disturbed ones. Where the machine is so busy that hardly any is
// undisturbed the test skips, with "quiet" as the feature that is lacking.
func LetsCollectorIn(tb testing.TB) {
	tb.Helper()
	var worst, least time.Duration
	good, tries := 0, 0
	for end := time.Now().Add(collectorTime); good < collectorSamples && time.Now().Before(end); tries++ {
		before := waited(tb)
		began := time.Now()
		runtime.GC()
		took := time.Since(began)
		noise := waited(tb) - before
		if tries == 0 || noise < least {
			least = noise
		}
		// Whatever the machine did, it cannot have made the collection longer than all threads together have waited.
		if held := took - noise; held > CollectorBound {
			tb.Errorf("a garbage collection took %s, of which threads waited %s for a CPU: something held it; at most %s", took, noise, CollectorBound)
			return
		}
		if noise <= collectorNoise {
			good++
			worst = max(worst, took)
		}
	}
	tb.Logf("worst of %d undisturbed collections (of %d): %s", good, tries, worst)
	if good < collectorLeast {
		Skip(tb, "quiet", fmt.Sprintf("of %d collections %d were undisturbed, %d are needed: the machine is too busy to tell (in the best one threads waited %s for a CPU)",
			tries, good, collectorLeast, least))
	}
}

// waited is how long the threads of this process have waited for a CPU so far.
func waited(tb testing.TB) (sum time.Duration) {
	tb.Helper()
	tasks, err := filepath.Glob("/proc/self/task/*/schedstat")
	if err != nil || len(tasks) == 0 {
		tb.Fatalf("no schedstat of our threads: %v", err)
	}
	for _, path := range tasks {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended; what it waited is lost, which can only make a collection look less disturbed
		}
		var ran, wait int64
		if _, err := fmt.Sscan(string(b), &ran, &wait); err != nil {
			tb.Fatalf("%s: %v", path, err)
		}
		sum += time.Duration(wait)
	}
	return sum
}
