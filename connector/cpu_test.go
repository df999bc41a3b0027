package connector_test

import (
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/testutil"
)

// What a sidecar may cost its host while it moves nothing, in cores.
const (
	idleShare   = 0.005 // no engine computes
	decodeShare = 0.03  // two engines decode, and nothing is moved
	// the same while layers are followed closely, as for a receiver that waits: and for each core of
	// the host.
	followShare = 0.03
	followCore  = 0.02 // limit of the increase; an internal bound
)

// A share is that of all windows together: what a process uses in bursts counts as what it uses all
// the time. Others that use the machine make the same work dearer, by caches and by the processor's
// other thread, but not by much: their time is not in ours.
const (
	cpuWindows = 10
	cpuWindow  = time.Second
)

// cpu is what this process has used so far, in all its threads.
func cpu(t testing.TB) time.Duration {
	t.Helper()
	var ts unix.Timespec
	must(t, unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &ts))
	return time.Duration(ts.Nano())
}

// holds fails the test unless the process stays under the limit over all windows. during is called
// with the length of each window.
func holds(t *testing.T, what string, limit float64, during func(time.Duration)) {
	t.Helper()
	testutil.HoldsShare(t, what, limit, cpuWindows, cpuWindow, func() time.Duration { return cpu(t) },
		during)
}

// TestMeasureConnectorCPU holds the watcher to its promises, with two engines in processes of their
// own: nothing when idle, and little while both run a step of 32 layers every 20 ms.
func TestMeasureConnectorCPU(t *testing.T) {
	testutil.Measures(t)
	var layers atomic.Int64 // of which progress was reported
	// Counting costs nothing: the measurement is of the connector.
	r := start(t, func(o *connector.Options) {
		record := o.Events
		o.Events = func(batch []engines.Event) {
			for i := range batch {
				layers.Add(int64(len(batch[i].Progress)))
			}
			record(slices.DeleteFunc(batch, func(ev engines.Event) bool {
				return ev.Kind == engines.LayersComplete
			}))
		}
	})
	a := startChild(t, r.socket)
	b := startChild(t, r.socket)
	r.rec.until(t, "intents", func() bool { return len(r.rec.intents) == 2 })

	holds(t, "idle, two sessions with a lease open each", idleShare, func(time.Duration) {
		if n := layers.Load(); n != 0 {
			t.Fatalf("%d layers moved", n)
		}
	})

	for _, child := range []*child{a, b} {
		_, err := fmt.Fprintln(child.in, "decode")
		must(t, err)
		child.expect(t, "decoding")
	}
	before := layers.Load()
	follows := func(spent time.Duration) {
		// A watcher that does not look is cheap, too.
		seen, want := layers.Load()-before, int64(2*childShape.Layers)*int64(spent/decodePeriod)
		before += seen
		if seen < want*8/10 && !testutil.Race {
			t.Errorf("%d layers reported of %d: the watcher is too slow to follow", seen, want)
		}
	}
	holds(t, "two engines that decode, nothing to move", decodeShare, follows)
	for _, w := range r.rec.seen().ups {
		w.Session.Follow(true)
	}
	holds(t, "two engines that decode, every layer awaited", followShare+min(0.3,
		followCore*float64(runtime.NumCPU())), follows)

	if !testutil.Race {
		testutil.LetsCollectorIn(t) // a watcher that sleeps must not hold it up
	}

	for _, child := range []*child{a, b} {
		_, err := fmt.Fprintln(child.in, "stop")
		must(t, err)
		child.expect(t, "stopped")
	}
}
