package sidecar

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/transport"
)

// counted is a backend that counts the wake-up hints of its lanes.
type counted struct {
	transport.Backend
	n *atomic.Int32
}

func (b counted) Open(ctx context.Context, h transport.Host) ([]transport.Rail, error) {
	return b.Backend.Open(ctx, countedHost{h, b.n})
}

type countedHost struct {
	transport.Host
	n *atomic.Int32
}

func (h countedHost) LaneUp(l transport.Lane) {
	h.Host.LaneUp(countedLane{l.(transport.WakeHinter),
		h.n})
}

type countedLane struct {
	transport.WakeHinter
	n *atomic.Int32
}

func (l countedLane) WakeHint() {
	l.n.Add(1)
	l.WakeHinter.WakeHint()
}

// TestWakeHint: the peer of a step that is about to run gets a wake-up hint before its first layer
// is there.
func TestWakeHint(t *testing.T) {
	shm := func(c *config.Config) { c.Transports.Order = []string{config.TransSHM} }
	var n atomic.Int32
	p := startConfig(t, testConfig(t, shm), func(node *Node) {
		for i, b := range node.backends {
			node.backends[i] = counted{b, &n}
		}
	})
	d := start(t, shm)
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	pe.random()
	for seed := range uint64(2) { // before there is a lane, and then
		step := seed + 1
		x := begin(t, p, pe, de, seed, 0, msg.PendingStep{Step: step, End: tokens})
		until(t, func() bool { return n.Load() == int32(step) })
		pe.SignalStep(step)
		if c := de.wait(x.dst); c.Status != engines.StatusOK {
			t.Fatalf("status %d: %s", c.Status, c.Received.Reason)
		}
	}
	if n.Load() != 2 {
		t.Errorf("%d wake-up hints, want 2", n.Load())
	}
}
