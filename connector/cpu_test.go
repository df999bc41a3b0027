package connector_test

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/testutil"
)

// cpu is what this process has used so far.
func cpu(t testing.TB) time.Duration {
	t.Helper()
	var ru unix.Rusage
	must(t, unix.Getrusage(unix.RUSAGE_SELF, &ru))
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

// TestCPU holds the watcher to its promises, with engines in processes of their own: nothing when idle, a few percent of a
// core while it follows a 32-layer step every 20 ms (2 to 3 on a quiet machine; the bound leaves room for a busy one).
func TestCPU(t *testing.T) {
	if testing.Short() {
		testutil.Skip(t, "long", "measures for seconds; run without -short")
	}
	r := start(t, nil)
	a := startChild(t, r.socket)
	b := startChild(t, r.socket)
	r.rec.until(t, "intents", func() bool { return len(r.rec.intents) == 2 })

	began, used := time.Now(), cpu(t)
	<-time.After(2 * time.Second) // the time is the measurement
	share := float64(cpu(t)-used) / float64(time.Since(began))
	t.Logf("idle, two sessions with a lease open each: %.3f%% of a core", 100*share)
	if limit := 0.005; share > limit && !raceEnabled {
		t.Errorf("idle: %.2f%% of a core, at most %.2f%%", 100*share, 100*limit)
	}

	began, used = time.Now(), cpu(t)
	_, err := fmt.Fprintln(a.in, "steps")
	must(t, err)
	a.expect(t, "done")
	share = float64(cpu(t)-used) / float64(time.Since(began))
	r.rec.mu.Lock()
	n := len(r.rec.progress)
	r.rec.mu.Unlock()
	t.Logf("following %d steps of 32 layers, one every 20 ms: %.2f%% of a core, %d progress reports of %d layers", followSteps, 100*share, n, 32*followSteps)
	if limit := 0.05; share > limit && !raceEnabled {
		t.Errorf("following: %.2f%% of a core, at most %.2f%%", 100*share, 100*limit)
	}
	r.rec.until(t, "every layer of the last step", func() bool { return len(r.rec.progress) > 0 && finals(r.rec) == 32 })
	if n < 32*followSteps*8/10 {
		t.Errorf("%d progress reports of %d layers: the watcher is too slow to follow", n, 32*followSteps)
	}

	// A watcher that sleeps must not hold up the garbage collector.
	stop := make(chan struct{})
	slowest := make(chan time.Duration)
	go func() {
		var worst time.Duration
		for {
			select {
			case <-stop:
				slowest <- worst
				return
			case <-time.After(200 * time.Millisecond):
				at := time.Now()
				runtime.GC()
				worst = max(worst, time.Since(at))
			}
		}
	}()
	_, err = fmt.Fprintln(b.in, "steps")
	must(t, err)
	b.expect(t, "done")
	close(stop)
	if gc := <-slowest; gc > 50*time.Millisecond && !raceEnabled {
		t.Errorf("a garbage collection took %s", gc)
	} else {
		t.Logf("slowest garbage collection: %s", gc)
	}
}

func finals(rec *recorder) int {
	n := 0
	for _, p := range rec.progress {
		if p.Final {
			n++
		}
	}
	return n
}
