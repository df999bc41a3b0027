// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

// CollectorBound is how long nothing of ours may hold the garbage collector.
const CollectorBound = 50 * time.Millisecond

const (
	collectorSamples = 20                 // collections that nothing disturbed
	collectorTime    = 3 * time.Second    // for all of them
	collectorLeast   = 3                  // undisturbed ones without which nothing was shown
	collectorHeld    = 2                  // that were held: a loop that can hold one holds others, what the host does to its guest comes once
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
	l := collect(tb)
	tb.Logf("worst of %d undisturbed collections (of %d): %s", l.good, l.tries, l.worst)
	switch {
	case l.held >= collectorHeld:
		tb.Errorf("something held %d of %d garbage collections for more than %s: the longest took %s, of which threads waited %s for a CPU",
			l.held, l.tries, CollectorBound, l.longest, l.noise)
	case l.good < collectorLeast:
		Skip(tb, "quiet", fmt.Sprintf("of %d collections %d were undisturbed, %d are needed: the machine is too busy to tell (in the best one threads waited %s for a CPU)",
			l.tries, l.good, collectorLeast, l.least))
	}
}

// LetsCollectorInWhile is LetsCollectorIn while loop runs, again and again, in a goroutine of its own that has ended on return.
func LetsCollectorInWhile(tb testing.TB, loop func()) {
	tb.Helper()
	var stop atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		for !stop.Load() {
			loop()
		}
	}()
	defer func() { // also where the machine is too busy to tell
		stop.Store(true)
		<-done
	}()
	LetsCollectorIn(tb)
}

// looked is what a series of collections showed.
type looked struct {
	tries, good, held int
	worst             time.Duration // of the undisturbed ones
	least             time.Duration // that threads waited for a CPU, in the best of all
	longest, noise    time.Duration // of those that were held: what it took, and what threads waited meanwhile
}

// collect collects until it knows, or collectorTime is over.
func collect(tb testing.TB) (l looked) {
	tb.Helper()
	for end := time.Now().Add(collectorTime); l.good < collectorSamples && l.held < collectorHeld && time.Now().Before(end); l.tries++ {
		before := waited(tb)
		began := time.Now()
		runtime.GC()
		took := time.Since(began)
		noise := waited(tb) - before
		if l.tries == 0 || noise < l.least {
			l.least = noise
		}
		// Whatever the machine did, it cannot have made the collection longer than all threads together have waited.
		if took-noise > CollectorBound {
			l.held++
			if took > l.longest {
				l.longest, l.noise = took, noise
			}
		}
		if noise <= collectorNoise {
			l.good++
			l.worst = max(l.worst, took)
		}
	}
	return l
}

// WaitedForCPU is how long the threads of this process have waited for a CPU so far: a machine that is
// busy with other things cannot tell how long something takes.
func WaitedForCPU(tb testing.TB) time.Duration { tb.Helper(); return waited(tb) }

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
