package sidecar

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/sidecar/internal/plans"
)

// halfLanded is a transfer of which half of the prompt has landed, and all of it of the first
// layers ahead.
func halfLanded(t *testing.T, p, d *running, ahead int) (pe, de *engine, x underway) {
	t.Helper()
	pe, de = newEngine(t, p, testShape), newEngine(t, d, testShape)
	pe.random()
	x = begin(t, p, pe, de, 1, 0, msg.PendingStep{Step: 1, End: 1024}, msg.PendingStep{Step: 2,
		End: tokens})
	bound(t, d)
	for l := range testShape.Layers {
		pe.SignalLayer(l, 1)
	}
	pe.SignalStep(1)
	for l := range ahead {
		pe.SignalLayer(l, 2)
	}
	until(t, func() bool { return landedBytes(d) == uint64(testShape.Layers+ahead)*1024*1024 })
	return pe, de, x
}

// A transfer that fails in its middle names what did not come to the engine, and what it does not
// name is there.
func TestFailedTransferNamesItsTokens(t *testing.T) {
	each(t, func(t *testing.T, p, d *running) {
		pe, de, x := halfLanded(t, p, d, 0)
		if err := pe.Cancel(x.src, "aborted", true); err != nil {
			t.Fatal(err)
		}
		c := de.wait(x.dst)
		if want := []plans.TokenRange{{1024, tokens}}; c.Status != engines.StatusFailed ||
			!slices.Equal(c.Received.Recompute, want) {
			t.Fatalf("status %d, recompute %v: want %v", c.Status, c.Received.Recompute, want)
		}
		same(t, pe, de, x.pt, x.dt, 1024, 0)
		pe.wait(x.src)
	})
}

// A transfer whose deadline comes in its middle names what did not come, neither more nor less,
// whatever layers have more of it than others. The test moves the executor's time past the
// deadline, so nothing here depends on how fast this machine is.
func TestExpiredTransferNamesItsTokens(t *testing.T) {
	// layers that have all of the prompt, of which the others have a half
	for _, ahead := range []int{0, 2} {
		t.Run(fmt.Sprint("ahead ", ahead), func(t *testing.T) {
			each(t, func(t *testing.T, p, d *running) {
				pe, de, x := halfLanded(t, p, d, ahead)
				open := 0
				d.driver.Do(func(ex *exec.Exec, now exec.Instant) {
					open = ex.Load().Dests
					ex.Tick(now + deadlineMS*time.Millisecond)
				})
				c := de.wait(x.dst)
				if want := []plans.TokenRange{{1024, tokens}}; open != 1 || c.Status != engines.StatusExpired ||
					!strings.Contains(c.Received.Reason, "the deadline passed") ||
					!slices.Equal(c.Received.Recompute, want) {
					t.Fatalf("%d were open; status %d, %q, recompute %v: want %v", open, c.Status,
						c.Received.Reason, c.Received.Recompute, want)
				}
				same(t, pe, de, x.pt, x.dt, 1024, 0)
				if err := pe.Cancel(x.src, "nobody wants it any more", true); err != nil {
					t.Fatal(err)
				}
				pe.wait(x.src)
			})
		})
	}
}
