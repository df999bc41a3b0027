package sidecar

import (
	"context"
	"errors"
	"time"

	"github.com/kvspray/kvspray/control/exec"
)

// shut lets running leases end within the configured time, and fences the rest.
func (n *Node) shut() {
	n.life.draining.Store(true)
	n.metrics.Draining(true)
	n.log.Info("draining", "timeout", time.Duration(n.cfg.Drain.Timeout))
	n.driver.Do(func(ex *exec.Exec, _ exec.Instant) { ex.DrainLeases() })
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(n.cfg.Drain.Timeout))
	defer cancel()
	defer n.flush()
	defer n.leaveSegments()
	if x := n.pages.exchange; x != nil {
		x.Drain()
		defer n.pages.leave()
	}
	if err := n.engine.Drain(ctx); err == nil {
		n.log.Info("drained")
		return
	}
	var dests, sources int
	n.driver.Do(func(ex *exec.Exec, now exec.Instant) {
		dests, sources = ex.Open()
		ex.Abort(now, "the sidecar is stopping")
	})
	n.local.Stop(errStops)
	n.log.Warn("drain timed out; open leases are fenced", "receiving", dests, "sending", sources)
	last, cancel2 := context.WithTimeout(context.Background(), n.grace)
	defer cancel2()
	if err := n.engine.Drain(last); err != nil {
		n.log.Warn("open leases remain: the shims end them with the proved exit of this process", "err",
			err)
	}
}

// errStops ends leases that the executor does not serve.
var errStops = errors.New("the sidecar stops")

// Times for peers to acknowledge the last messages.
const (
	flushTime = 500 * time.Millisecond
	flushTick = time.Millisecond
)

// flush waits until the executor's decisions are done and peers have acknowledged them: for its
// engine the last lease ends a moment before the other side receives that (shutdown flush).
func (n *Node) flush() {
	ctx, cancel := context.WithTimeout(context.Background(), flushTime)
	defer cancel()
	tick := time.NewTicker(flushTick)
	defer tick.Stop()
	for n.driver.Performing() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
	if err := n.conv.mesh.Flush(ctx); err != nil {
		n.log.Debug("a peer has not acknowledged everything; its leases end by their deadlines", "err",
			err)
	}
}
