package sidecar

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/faulttest"
)

// TestRailMetricsAfterFaults: slices and probes fail on one of two rails, and then no more, while transfers go on and come whole. What was done
// to it is read from /metrics' registry afterwards: retries, exclusions, probes, re-admissions, and how far predictions are off.
func TestRailMetricsAfterFaults(t *testing.T) {
	const bad, good = "r1", "r0"
	var now atomic.Int32 // the fault that is on; 0: none
	const failing = 1
	var probes atomic.Int32 // that were made to fail
	plan := faulttest.New(1, faulttest.Rule{Kind: faulttest.Error, Only: func(l transport.Lane, s transport.Slice) bool {
		if now.Load() != failing || l.Local() != bad || s.Attempt > 1 { // a chunk fails once, however busy the machine is
			return false
		}
		if s.Attempt == 0 {
			probes.Add(1)
		}
		return true
	}})
	p := startConfig(t, testConfig(t, func(c *config.Config) {
		c.Transports.Order = []string{config.TransTCP}
		c.Transports.TCP.Connections = 1
		c.Transports.TCP.Rails = []config.Rail{{Name: good, Listen: "127.0.0.1:0"}, {Name: bad, Listen: "127.0.0.1:0"}}
	}), func(n *Node) {
		for i, b := range n.backends {
			n.backends[i] = faulttest.Wrap(b, plan)
		}
	})
	d := start(t, func(c *config.Config) {
		c.Transports.Order = []string{config.TransTCP}
		c.Transports.TCP.Connections = 1
	})
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	pe.random()
	var open []uint64 // source leases
	began := time.Now()
	series := func(rail, name string, labels ...string) float64 {
		return value(t, p, "kvspray_rail_"+name, append([]string{"transport", "tcp", "rail", rail}, labels...)...)
	}
	// under moves prompts while a fault is on, until it is seen.
	seed := uint64(0)
	under := func(fault int32, what string, seen func() bool) {
		t.Helper()
		now.Store(fault)
		defer now.Store(0)
		for n := 0; !seen(); n++ {
			if time.Since(began) > patience {
				t.Fatalf("not seen after %d transfers: %s; pairs %+v", n, what, p.state().Leases.Rails.Pairs)
			}
			seed++
			x := begin(t, p, pe, de, seed, tokens)
			de.ok(x.dst)
			same(t, pe, de, x.pt, x.dt, tokens, 0)
			open = append(open, x.src)
		}
	}
	retries := func(reason string) float64 { return series(bad, "retries_total", "reason", reason) }
	ended := func() {
		t.Helper()
		for _, l := range open {
			pe.ok(l)
		}
		open = nil
		until(t, func() bool { return p.state().Leases.Rails.Flights == 0 })
	}

	under(0, "a prediction", func() bool { return series(bad, "prediction_error_ratio") > 0 })
	ended()
	if got := retries("failed") + retries("refused") + retries("lost"); got != 0 {
		t.Errorf("%v retries before anything failed", got)
	}
	under(failing, "an exclusion, and two probes that failed", func() bool {
		return series(bad, "exclusions_total") > 0 && series(bad, "probes_total", "outcome", "failed") > 1
	})
	ended()
	// A slice that an injected error ended is one that failed, and nothing else is.
	if got, want := retries("failed"), float64(plan.Injected(faulttest.Error)); got != want || want < 5 {
		t.Errorf("retries of slices that failed: %v, and %v were made to: want as many, and 3 for an exclusion and two probes at least", got, want)
	}
	if got := series(bad, "probes_total", "outcome", "failed"); got != float64(probes.Load()) {
		t.Errorf("probes that failed: %v, and %d were made to", got, probes.Load())
	}
	if got := series(bad, "exclusions_total"); got < 3 {
		t.Errorf("exclusions: %v: want one for the errors and one for each probe that failed", got)
	}
	under(0, "a probe that passed, and a re-admission", func() bool {
		// Where the other rail was late, this one may have carried something as the last resort, and be back without a probe.
		if ours := series(bad, "pairs", "state", "healthy") - 1; ours > 0 && series(bad, "probes_total", "outcome", "ok") == 0 {
			now.Store(failing)
		} else {
			now.Store(0)
		}
		return series(bad, "readmissions_total") > 0 && series(bad, "probes_total", "outcome", "ok") > 0
	})
	for _, rail := range []string{good, bad} {
		if got := series(rail, "prediction_error_ratio"); got <= 0 || got > 256 {
			t.Errorf("%s: predictions are off by %v: want more than nothing, and no more than is believed", rail, got)
		}
	}
	for _, reason := range []string{"failed", "refused", "lost"} {
		if got := series(good, "retries_total", "reason", reason); got != 0 {
			t.Errorf("%v retries (%s) of the rail to which nothing was done", got, reason)
		}
	}
}
