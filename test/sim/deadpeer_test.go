package sim

import (
	"testing"
	"time"

	"github.com/kvspray/kvspray/transport/simfabric"
)

// TestDeadPeerSlowsNoOther: one prefill node feeds four decode nodes; in mid transfer one of them
// goes silent for good, with all that is on its way to it. The others are served as if it had never
// been there.
func TestDeadPeerSlowsNoOther(t *testing.T) {
	link := simfabric.LinkSpec{BitsPerSecond: 10e9, Latency: 10 * time.Microsecond,
		Jitter: 2 * time.Microsecond, Buffer: 4 << 20}
	run := func(dead bool) (took time.Duration) {
		c := New(Config{Fabric: simfabric.Config{Seed: 3}})
		from := c.AddNode(simfabric.RailSpec{Name: "r0", Link: link}, simfabric.RailSpec{Name: "r1",
			Link: link})
		var to []*Node
		for range 4 {
			n := c.AddNode(simfabric.RailSpec{Name: "r0", Link: link}, simfabric.RailSpec{Name: "r1",
				Link: link})
			c.Join(from, n)
			to = append(to, n)
		}
		c.F.Run(settle, nil)
		silence := func(n *Node) {
			for _, r := range n.Host.Rails() {
				r.Rx().SetSilent(true)
				r.Tx().SetSilent(true)
			}
		}
		if dead {
			c.Begin(from, to[3], 1<<15, 5*time.Second, time.Millisecond)
			c.F.Run(c.F.Now()+50*time.Millisecond, nil)
			silence(to[3])
			// its lanes are silent now, and its chunks wait for others
			c.F.Run(c.F.Now()+200*time.Millisecond, nil)
			c.Begin(from, to[3], 1<<15, 5*time.Second, time.Millisecond)
		}
		began := c.F.Now()
		var live []*Transfer
		for range 4 {
			for _, n := range to[:3] {
				live = append(live, c.Begin(from, n, 1<<14, 30*time.Second, time.Millisecond))
			}
		}
		c.F.Run(began+20*time.Second, func() bool {
			for _, x := range live {
				if x.Received == nil {
					return false
				}
			}
			return true
		})
		took = c.F.Now() - began
		for _, x := range live {
			if x.Received == nil || x.Received.Status != 0 {
				t.Fatalf("dead %v: a transfer to a peer that lives: %+v", dead, x.Received)
			}
		}
		for _, v := range c.Violations() {
			t.Error(v)
		}
		return took
	}
	alone, beside := run(false), run(true)
	t.Logf("%v without, %v beside a dead peer", alone, beside)
	if float64(beside) > 1.02*float64(alone) {
		t.Errorf("%v beside a dead peer, %v without", beside, alone)
	}
}
