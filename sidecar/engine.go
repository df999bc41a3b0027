package sidecar

import (
	"context"
	"log/slog"
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/sidecar/internal/local"
	"github.com/kvspray/kvspray/sidecar/internal/plans"
	"github.com/kvspray/kvspray/sidecar/internal/segments"
)

// engineEvents brings the events of engines to the driver.
type engineEvents struct {
	driver *driver.Driver
	proc   *driver.Goroutines
	local  *local.Leases
	pages  *pageStore
	life   *life

	segments *segments.Segments

	devices *gpuHealth
	tracing *tracing // nil: off
}

// Handle passes a batch to the driver, except for what needs no executor.
func (e *engineEvents) Handle(batch []engines.Event) {
	rest, changed := batch[:0], false
	for i := range batch {
		changed = changed || batch[i].Kind == engines.WorkerUp || batch[i].Kind == engines.WorkerGone
		if e.prepare(&batch[i]) {
			rest = append(rest, batch[i])
		}
	}
	if len(rest) > 0 || len(batch) == 0 {
		e.driver.Handle(rest)
	}
	if changed {
		e.devices.changed()
	}
}

// prepare does this package's part of an event. It reports whether the driver takes the event.
func (e *engineEvents) prepare(ev *engines.Event) bool {
	switch w := ev.Worker; ev.Kind {
	case engines.WorkerUp:
		e.life.registered()
		return w.Layout != nil // without one it takes part in no transfer
	case engines.WorkerGone:
		e.segments.Gone(w) // no lease of a peer begins after it
		e.local.Gone(w)
		fenced := ev.Fenced
		ev.Fenced = func() {
			e.local.After(w, func() {
				e.pages.gone(w)
				// The driver of GPUs is slow at unpinning the memory, and the kernel at unmapping the cache of
				// a large host: the goroutine that performs the executor's actions would delay every lane.
				e.proc.Run(func(context.Context) { fenced() })
			})
		}
		if w.Layout == nil { // the executor has no lease of it
			ev.Fenced()
			return false
		}
	case engines.Canceled:
		return !e.local.Cancel(w, ev.Lease, ev.Reason)
	}
	if e.tracing != nil {
		e.tracing.place(ev)
	}
	return true
}

// completions returns results to engines. It implements driver.Engines.
type completions struct {
	observer *observer
	plans    *plans.Planner
	log      *slog.Logger
	complete func(*engines.Worker, engines.Completion) error
	pages    *pageStore
	segments *segments.Segments
}

// Complete implements driver.Engines.
func (e *completions) Complete(a *exec.Action) {
	o := e.observer
	c := a.Completion
	var by carried
	batch := e.segments.Owns(a.Worker)
	if len(a.ReceiveParts) > 0 {
		by = o.route(a.ReceiveParts)
		c.Transport = by.main
	}
	if len(a.ReceiveParts) > 0 && !batch {
		switch c.Status {
		case engines.StatusOK:
			for _, l := range a.ReceiveParts {
				o.hashes.Received(l, plans.Received(l))
			}
		case engines.StatusFailed, engines.StatusExpired:
			c.Recompute = e.plans.Recompute(a.ReceiveParts)
		}
	}
	if t := a.Trace; t != nil && !c.Received {
		by = o.named(t.Moved[:])
		c.Transport = by.main
	}
	if batch {
		e.segments.Completed(c, plans.Arrived(a.ReceiveParts, c.Status))
		o.traceEnd(a, &c, by)
		return
	}
	if e.pages.exchange.Owns(a.Worker) {
		e.pages.exchange.Completed(c)
		o.traceEnd(a, &c, by)
		return
	}
	// The engine waits; the log does not.
	err := e.complete(a.Worker, c)
	o.traceEnd(a, &c, by)
	if err != nil {
		e.log.Debug("completion not delivered", "lease", c.Lease.String(), "err", err)
	}
}

// Forget implements driver.Engines.
func (e *completions) Forget(w *engines.Worker) { e.plans.Forget(w) }

// publishEvery is the interval at which members are given the engines of this node. A request to an
// engine that has ended fails until then.
const publishEvery = 200 * time.Millisecond

// publishWorkers publishes engines, and where they answer clients, until ctx ends.
func (n *Node) publishWorkers(ctx context.Context) {
	t := time.NewTicker(publishEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.leaves:
		case <-t.C:
		}
		c := n.conv.mesh.Cluster()
		if c == nil {
			return
		}
		workers := n.workers()
		c.Serve(n.served.of(workers))
		n.served.log(n.log)
		n.pages.publish(workers)
	}
}

// setRole sets the role of an engine for routers.
func (n *Node) setRole(engine, role string) error {
	defer n.wakePublisher()
	return n.served.setRole(n.workers(), engine, role)
}

// hooks counts what the connector reports.
func hooks(m *metrics.Set, l *life) connector.Hooks {
	side := func(source bool) metrics.Side {
		if source {
			return metrics.SideSource
		}
		return metrics.SideDestination
	}
	return connector.Hooks{
		Session: m.Sessions,
		Leases: func(source bool, d int) {
			m.LeasesOpen(side(source), d)
			if source {
				l.sources.Add(int64(d))
			}
		},
		Record:    m.Record,
		Malformed: m.EngineRefused,
	}
}
