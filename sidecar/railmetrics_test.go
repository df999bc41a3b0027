package sidecar

import (
	"maps"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/faulttest"
)

// TestRailMetricsAfterFaults: slices and probes fail on one of two rails, and then no more, while
// transfers go on and come whole. The registry of /metrics has the consequences afterwards:
// retries, exclusions, probes, re-admissions, and how far predictions are off.
func TestRailMetricsAfterFaults(t *testing.T) {
	const bad, good = "r1", "r0"
	var now atomic.Int32 // the fault that is on; 0: none
	const failing = 1
	var probes atomic.Int32 // that were made to fail
	plan := faulttest.New(1, faulttest.Rule{Kind: faulttest.Error, Only: func(l transport.Lane,
		s transport.Slice) bool {
		// a chunk fails once, however busy the machine is
		if now.Load() != failing || l.Local() != bad || s.Attempt > 1 {
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
		c.Transports.TCP.Rails = []config.Rail{{Name: good, Listen: "127.0.0.1:0"},
			{Name: bad, Listen: "127.0.0.1:0"}}
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
		return value(t, p, "kvspray_rail_"+name, append([]string{"transport", "tcp", "rail", rail},
			labels...)...)
	}
	// under moves prompts while a fault is on, until it is seen.
	seed := uint64(0)
	under := func(fault int32, what string, seen func() bool) {
		t.Helper()
		now.Store(fault)
		defer now.Store(0)
		for n := 0; !seen(); n++ {
			if time.Since(began) > patience {
				t.Fatalf("not seen after %d transfers: %s; pairs %+v", n, what,
					p.web.State().Leases.Rails.Pairs)
			}
			seed++
			x := begin(t, p, pe, de, seed, tokens)
			de.ok(x.dst)
			same(t, pe, de, x.pt, x.dt, tokens, 0)
			open = append(open, x.src)
		}
	}
	retries := func(reason string) float64 {
		return series(bad, "retransmissions_total", "reason", reason)
	}
	ended := func() {
		t.Helper()
		for _, l := range open {
			pe.ok(l)
		}
		open = nil
		until(t, func() bool { return p.web.State().Leases.Rails.Flights == 0 })
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
	if got, want := retries("failed"), float64(plan.Injected(faulttest.Error)); got != want ||
		want < 5 {
		t.Errorf("retries of slices that failed: %v, and %v were made to: want as many, and 3 for an "+
			"exclusion and two probes at least", got, want)
	}
	if got := series(bad, "probes_total", "outcome", "failed"); got != float64(probes.Load()) {
		t.Errorf("probes that failed: %v, and %d were made to", got, probes.Load())
	}
	if got := series(bad, "exclusions_total"); got < 3 {
		t.Errorf("exclusions: %v: want one for the errors and one for each probe that failed", got)
	}
	under(0, "a probe that passed, and a re-admission", func() bool {
		// Where the other rail was late, this one may have carried something as the last resort,
		// and be back without a probe.
		if ours := series(bad, "pairs", "state", "healthy") - 1; ours > 0 && series(bad, "probes_total",
			"outcome", "ok") == 0 {
			now.Store(failing)
		} else {
			now.Store(0)
		}
		return series(bad, "readmissions_total") > 0 && series(bad, "probes_total", "outcome", "ok") > 0
	})
	for _, rail := range []string{good, bad} {
		if got := series(rail, "prediction_error_ratio"); got <= 0 || got > 256 {
			t.Errorf("%s: predictions are off by %v: want more than nothing, and no more than is believed",
				rail, got)
		}
	}
	for _, reason := range []string{"failed", "refused", "lost"} {
		if got := series(good, "retransmissions_total", "reason", reason); got != 0 {
			t.Errorf("%v retries (%s) of the rail to which nothing was done", got, reason)
		}
	}
}

// TestRetriesByReason: a slice is given out again for each of the reasons there are, and /metrics'
// registry counts it under that one and no other. Where this process is not run for a while its
// rails fall silent, so that silence may come beside the others.
func TestRetriesByReason(t *testing.T) {
	const bad, good = "r1", "r0"
	for _, x := range []struct {
		reason string
		rails  []string // the bad one is the last
		rule   faulttest.Rule
		exact  bool // no slice that nothing was done to
		cut    bool // the lane is closed once it has the slice
	}{
		{reason: "failed", rails: []string{good, bad}, rule: faulttest.Rule{Kind: faulttest.Error},
			exact: true},
		{reason: "refused", rails: []string{good, bad}, rule: faulttest.Rule{Kind: faulttest.Error,
			Reason: transfer.ReasonMemory}, exact: true},
		{reason: "lost", rails: []string{good, bad}, rule: faulttest.Rule{Kind: faulttest.Hold},
			cut: true},
		{reason: "silence", rails: []string{good, bad}, rule: faulttest.Rule{Kind: faulttest.Stuck,
			After: 400 * time.Millisecond}},
		// There is no other rail on which a copy of the slice could come first, and its lane goes
		// on meanwhile.
		{reason: "timeout", rails: []string{bad}, rule: faulttest.Rule{Kind: faulttest.Hold},
			exact: true},
	} {
		t.Run(x.reason, func(t *testing.T) {
			var armed atomic.Bool
			armed.Store(true)
			met := make(chan transport.Lane, 1)
			x.rule.Only = func(l transport.Lane, s transport.Slice) bool {
				if l.Local() != bad || s.Attempt != 1 || !armed.CompareAndSwap(true, false) {
					return false
				}
				select {
				case met <- l:
				default: // only the first counts
				}
				return true
			}
			plan := faulttest.New(1, x.rule)
			wrap := func(n *Node) {
				for i, b := range n.backends {
					n.backends[i] = faulttest.Wrap(b, plan)
				}
			}
			one := func(c *config.Config) {
				c.Transports.Order = []string{config.TransTCP}
				c.Transports.TCP.Connections = 1
			}
			p := startConfig(t, testConfig(t, func(c *config.Config) {
				one(c)
				for _, r := range x.rails {
					c.Transports.TCP.Rails = append(c.Transports.TCP.Rails, config.Rail{Name: r,
						Listen: "127.0.0.1:0"})
				}
			}), wrap)
			d := startConfig(t, testConfig(t, one), wrap)
			pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
			pe.random()
			if x.cut {
				var wg sync.WaitGroup
				wg.Go(func() {
					select {
					case l := <-met:
						_ = l.Close() // it is up
					case <-t.Context().Done():
					}
				})
				t.Cleanup(wg.Wait)
			}
			retries := func(rail string) map[string]float64 {
				all := map[string]float64{}
				for _, r := range []string{"failed", "refused", "lost", "silence", "timeout"} {
					all[r] = value(t, p, "kvspray_rail_retransmissions_total", "transport", "tcp", "rail", rail,
						"reason", r)
				}
				return all
			}
			if got := retries(bad); !maps.Equal(got, map[string]float64{"failed": 0, "refused": 0, "lost": 0,
				"silence": 0, "timeout": 0}) {
				t.Fatalf("before anything moved: %v", got)
			}
			// A part of the blocks is for the one that may have to wait, the others for those that
			// follow each other.
			const parts, prompt = 4, 1024
			start := func(part uint32) (x underway) {
				t.Helper()
				x.prompt = newPrompt(prompt)
				for b := range uint32(blocksFor(prompt, testShape.TokensPerBlock)) {
					x.pt, x.dt = append(x.pt, b), append(x.dt, part*testShape.NumBlocks/parts+b)
				}
				var err error
				if x.src, err = pe.Intent(msg.Intent{Xfer: x.xfer, Hash: x.hash, Tokens: prompt, Fanout: 1,
					Blocks: [][]uint32{x.pt}, Ready: prompt,
					DeadlineMS: deadlineMS}); err != nil {
					t.Fatal(err)
				}
				if x.dst, err = de.Expect(msg.Expect{Xfer: x.xfer, Hash: x.hash, Tokens: prompt,
					Peer: p.Endpoint(), Skip: []uint32{0}, Blocks: [][]uint32{x.dt},
					DeadlineMS: deadlineMS, MatchTimeoutMS: matchMS}); err != nil {
					t.Fatal(err)
				}
				return x
			}
			end := func(x underway) {
				t.Helper()
				de.ok(x.dst)
				same(t, pe, de, x.pt, x.dt, prompt, 0)
				pe.ok(x.src)
			}
			var held, open []underway
			began := time.Now()
			for n := uint32(0); retries(bad)[x.reason] == 0; n++ {
				if time.Since(began) > patience {
					t.Fatalf("after %d transfers retries of %s are %v; injected %d; pairs %+v", n, bad,
						retries(bad), plan.Injected(x.rule.Kind), p.web.State().Leases.Rails.Pairs)
				}
				if alone := len(x.rails) == 1; alone && plan.Held() == 0 {
					// Where the lane was silent for long enough the slice was given out again for
					// that, and it is all over.
					for _, x := range held {
						end(x)
					}
					armed.Store(true)
					held = append(held[:0], start(0))
					until(t, func() bool { return plan.Held() > 0 })
				}
				open = append(open, start(1+n%(parts-1)))
				if len(open) == parts-1 {
					end(open[0])
					open = open[1:]
				}
			}
			for _, x := range append(open, held...) {
				end(x)
			}
			until(t, func() bool { return p.web.State().Leases.Rails.Flights == 0 })
			got := retries(bad)
			for r, n := range got {
				switch {
				case r == x.reason && (n == 0 || x.exact && n > float64(plan.Injected(x.rule.Kind))):
					t.Errorf("%s: %v, and %d slices were made to", r, n, plan.Injected(x.rule.Kind))
				case r != x.reason && r != "silence" && n != 0:
					t.Errorf("%v: want none but for %s, and silence", got, x.reason)
				}
			}
			for _, r := range x.rails[:len(x.rails)-1] {
				for reason, n := range retries(r) {
					if reason != "silence" && n != 0 {
						t.Errorf("%s, to which nothing was done: %v retries (%s)", r, n, reason)
					}
				}
			}
		})
	}
}
