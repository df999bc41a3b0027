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

// CollectorBound is the longest time for which this program may delay the garbage collector.
const CollectorBound = 50 * time.Millisecond

const (
	collectorSamples = 20              // collections that nothing disturbed
	collectorTime    = 3 * time.Second // for all of them
	collectorMinimum = 3               // undisturbed ones that a result needs
	// delayed ones that fail the test: a loop that can delay one delays others, while a host delays
	// its guest once.
	collectorHeld = 2
	// time of waiting for a CPU from which a collection counts as disturbed.
	collectorNoise = CollectorBound / 5
)

// LetsCollectorIn fails the test if the load, which the caller started and will stop, keeps a
// garbage collection from ending within CollectorBound.
//
// The worst collection counts, since a loop may delay the collector only now and then, but only
// among the undisturbed ones: on a busy machine threads wait for a CPU, and the kernel reports each
// thread's waits (schedstat). A loop that cannot be preempted runs and does not wait, so its
// collections never count as disturbed. If the machine is so busy that hardly any collection is
// undisturbed, the test skips with the missing feature "quiet".
func LetsCollectorIn(tb testing.TB) {
	tb.Helper()
	l := collect(tb)
	tb.Logf("worst of %d undisturbed collections (of %d): %s", l.good, l.tries, l.worst)
	switch {
	case l.held >= collectorHeld:
		tb.Errorf("something held %d of %d garbage collections for more than %s: the longest took %s, "+
			"of which threads waited %s for a CPU",
			l.held, l.tries, CollectorBound, l.longest, l.noise)
	case l.good < collectorMinimum:
		Skip(tb, "quiet", fmt.Sprintf("of %d collections %d were undisturbed, %d are needed: the "+
			"machine is too busy to measure (in the best one threads waited %s for a CPU)",
			l.tries, l.good, collectorMinimum, l.quietest))
	}
}

// LetsCollectorInWhile is LetsCollectorIn while loop runs repeatedly in a goroutine of its own,
// which has ended on return.
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
	defer func() { // also if the machine is too busy
		stop.Store(true)
		<-done
	}()
	LetsCollectorIn(tb)
}

// looked is the result of a series of collections.
type looked struct {
	tries, good, held int
	worst             time.Duration // of the undisturbed ones
	quietest          time.Duration // that threads waited for a CPU, in the best of all
	longest, noise    time.Duration // of the delayed ones: total time, and the threads' waits in it
}

// collect collects until the result is certain, or collectorTime is over.
func collect(tb testing.TB) (l looked) {
	tb.Helper()
	for end := time.Now().Add(collectorTime); l.good < collectorSamples && l.held < collectorHeld &&
		time.Now().Before(end); l.tries++ {
		before := waited(tb)
		began := time.Now()
		runtime.GC()
		took := time.Since(began)
		noise := waited(tb) - before
		if l.tries == 0 || noise < l.quietest {
			l.quietest = noise
		}
		// The machine cannot have lengthened the collection by more than all threads' waits
		// together.
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

// WaitedForCPU is how long the threads of this process have waited for a CPU so far: a machine that
// is busy with other things cannot measure how long something takes.
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
			// the thread has ended; its waits are lost, which can only make a collection look less
			// disturbed
			continue
		}
		var ran, wait int64
		if _, err := fmt.Sscan(string(b), &ran, &wait); err != nil {
			tb.Fatalf("%s: %v", path, err)
		}
		sum += time.Duration(wait)
	}
	return sum
}
