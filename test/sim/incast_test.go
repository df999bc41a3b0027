package sim

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvspray/kvspray/transport/simfabric"
)

// TestIncastIsShared: sixteen senders to one rail, in front of which there is room for little more
// than a chunk of each. Their windows would overflow it, one after the other would wait for a
// timeout and the rail be idle; with the receiver's credits it is full and shared evenly.
func TestIncastIsShared(t *testing.T) {
	const senders = 16
	for _, x := range []struct {
		gbps    float64
		buffer  int
		latency time.Duration
	}{{10, 4 << 20, 10 * time.Microsecond}, {10, 2 << 20, 10 * time.Microsecond},
		{25, 4 << 20, 10 * time.Microsecond},
		{100, 16 << 20, 10 * time.Microsecond}, {10, 16 << 20, 2 * time.Millisecond}} {
		t.Run(fmt.Sprintf("%v Gbit, %d KiB, %v", x.gbps, x.buffer>>10, x.latency), func(t *testing.T) {
			link := simfabric.LinkSpec{BitsPerSecond: x.gbps * 1e9, Latency: x.latency,
				Jitter: 2 * time.Microsecond, Buffer: x.buffer}
			c := New(Config{Fabric: simfabric.Config{Seed: 1}})
			to := c.AddNode(simfabric.RailSpec{Name: "r0", Link: link})
			for range senders {
				c.Join(c.AddNode(simfabric.RailSpec{Name: "r0", Link: link}), to)
			}
			c.F.Run(settle, nil)
			const span = time.Second
			each := uint64(2 * x.gbps * 1e9 / 8 * span.Seconds() / senders) // twice what fits
			for _, n := range c.Nodes[1:] {
				for sent := uint64(0); sent < each; {
					sent += c.Begin(n, to, 2048, time.Minute, time.Millisecond).Bytes()
				}
			}
			c.F.Run(c.F.Now()+100*time.Millisecond, nil) // windows and credits find each other
			came := func() (all []float64) {
				for _, n := range c.Nodes[1:] {
					all = append(all, float64(to.side.received[n.side.boot]))
				}
				return all
			}
			rx := to.Host.Rails()[0].Rx()
			before, bytes, lost := came(), rx.Bytes(), rx.Overflows()
			c.F.Run(c.F.Now()+span, nil)
			var sum, squares float64
			for i, v := range came() {
				v -= before[i]
				sum += v
				squares += v * v
			}
			share, jain := sum*8/span.Seconds()/link.BitsPerSecond, sum*sum/(senders*squares)
			t.Logf("%.3f of the link carried what landed, %.3f anything; Jain %.3f; %d overflows, deepest "+
				"queue %d KiB", share,
				float64(rx.Bytes()-bytes)*8/span.Seconds()/link.BitsPerSecond, jain, rx.Overflows()-lost,
				rx.Deepest()>>10)
			if share < 0.95 || jain < 0.95 {
				t.Errorf("%.3f of the link, Jain %.3f: want 0.95 of both", share, jain)
			}
			for _, v := range c.Violations() {
				t.Error(v)
			}
		})
	}
}
