package connector_test

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// cpu is what this process has used so far.
func cpu(t testing.TB) time.Duration {
	t.Helper()
	var ru unix.Rusage
	must(t, unix.Getrusage(unix.RUSAGE_SELF, &ru))
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

// TestCPU holds the watcher to its promises, with engines in processes of their own: nothing when idle, a few percent of a
// core while it follows a 32-layer step every 20 ms.
func TestCPU(t *testing.T) {
	if testing.Short() {
		t.Skip("measures for seconds")
	}
	r := start(t, nil)
	a := startChild(t, r.socket)
	startChild(t, r.socket)
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
	if limit := 0.06; share > limit && !raceEnabled {
		t.Errorf("following: %.2f%% of a core, at most %.2f%%", 100*share, 100*limit)
	}
	r.rec.until(t, "every layer of the last step", func() bool { return len(r.rec.progress) > 0 && finals(r.rec) == 32 })
	if n < 32*followSteps*8/10 {
		t.Errorf("%d progress reports of %d layers: the watcher is too slow to follow", n, 32*followSteps)
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
