//go:build !race

package sim

import (
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transport/simfabric"
)

// What one node of a large cluster may spend in its executor. Left out under the race detector,
// as all that measures.
const (
	hubPeers     = 999
	hubRails     = 8
	hubTransfers = 10_000
	hubHeld      = 2 * time.Millisecond   // of CPU, for which the executor's lock is held at a time
	hubIdle      = 0.05                   // of a core, while nothing flows
	hubLoss      = 500 * time.Millisecond // of CPU, for the PeerDown of all
)

// threadCPU is what this thread has used. What else runs on the machine is not in it.
func threadCPU() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

// TestMeasureHubLosesAll: one node of a thousand has ten thousand transfers open, half of them each
// way, when all of its peers are lost at once. Before, nothing flows, since no prefill has come so
// far.
func TestMeasureHubLosesAll(t *testing.T) {
	testutil.Measures(t)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	link := simfabric.LinkSpec{BitsPerSecond: 10e9, Latency: 10 * time.Microsecond,
		Jitter: 2 * time.Microsecond, Buffer: 4 << 20}
	var rails []simfabric.RailSpec
	for i := range hubRails {
		rails = append(rails, simfabric.RailSpec{Name: string('a' + rune(i)), Link: link})
	}
	c := New(Config{Fabric: simfabric.Config{Seed: 7}, Skew: time.Millisecond})
	hub := c.AddNode(rails...)
	var peers []*Node
	for range hubPeers {
		n := c.AddNode(rails...)
		c.Join(hub, n)
		peers = append(peers, n)
	}
	measured := func(what string, d time.Duration) Held {
		h := Held{Clock: threadCPU}
		hub.Measure(&h)
		c.F.Run(c.F.Now()+d, nil)
		hub.Measure(nil)
		t.Logf("%s: the executor's lock is held %d times in %v, %v of CPU in all and %v at most",
			what, h.Times, d, h.Sum, h.Max)
		if h.Max > hubHeld {
			t.Errorf("%s: the executor's lock is held for %v at a time, want %v at most", what,
				h.Max, hubHeld)
		}
		return h
	}
	measured("lanes come up", settle)
	if x := hub.side.ex.Load(); x.Lanes != hubPeers*hubRails {
		t.Fatalf("%d lanes, want %d", x.Lanes, hubPeers*hubRails)
	}
	const deadline, layer = 2 * time.Minute, time.Minute
	for i := range hubTransfers {
		from, to := hub, peers[i/2%hubPeers]
		if i%2 == 0 {
			from, to = to, from
		}
		c.Begin(from, to, blockTokens, deadline, layer)
	}
	measured("transfers begin", time.Second)
	if x := hub.side.ex.Load(); x.Dests != hubTransfers/2 || x.Sources != hubTransfers/2 ||
		x.Inbound != hubTransfers/2 {
		t.Fatalf("%d receive, %d send, %d of them with a grant, want %d each", x.Dests, x.Sources,
			x.Inbound, hubTransfers/2)
	}
	const quiet = 10 * time.Second
	h := measured("nothing flows", quiet)
	if share := float64(h.Sum) / float64(quiet); share > hubIdle {
		t.Errorf("%.1f%% of a core while nothing flows, want %.0f%% at most", 100*share, 100*hubIdle)
	}
	for _, n := range peers {
		n.Kill()
	}
	measured("all lanes are lost", controlDown-time.Millisecond)
	// Nothing but this happens now.
	if h = measured("all peers are down", 2*time.Millisecond); h.Times < hubPeers {
		t.Errorf("the executor was called %d times, of %d peers", h.Times, hubPeers)
	}
	if h.Sum > hubLoss {
		t.Errorf("the loss of all peers costs %v of CPU, want %v at most", h.Sum, hubLoss)
	}
	for _, n := range peers {
		n.Restart()
	}
	measured("all are there again", 5*time.Second)
	c.F.Run(c.F.Now()+deadline+time.Minute, func() bool {
		return c.Open() == 0 ||
			len(c.Violations()) > 0
	})
	c.F.Run(c.F.Now()+5*time.Second, nil) // what was agreed on for rails is forgotten, too
	c.Settle(0)
	for _, v := range c.Violations() {
		t.Error(v)
	}
}
