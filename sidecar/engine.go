package sidecar

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/sidecar/internal/local"
	"github.com/kvspray/kvspray/sidecar/internal/plans"
)

// engineEvents brings the events of engines to the driver. Copies are the exception: they need no
// executor.
type engineEvents struct {
	*driver.Events
	proc   *driver.Goroutines
	local  *local.Leases
	copies *copies
	pages  *pageStore
	life   *life

	tracing *tracing // nil: off
}

var _ connector.Events = engineEvents{}

// WorkerUp passes a worker to the driver, unless it has no layout and so takes part in no transfer.
func (e engineEvents) WorkerUp(w *engines.Worker) {
	e.life.registered()
	if w.Layout != nil {
		e.Events.WorkerUp(w)
	}
}

// WorkerGone ends all leases of w, then calls fenced.
func (e engineEvents) WorkerGone(w *engines.Worker, why error, fenced func()) {
	e.local.Gone(w)
	ended := func() {
		e.local.After(w, func() {
			e.pages.gone(w)
			// The driver of GPUs is slow at unpinning the memory, and the kernel at unmapping the cache of
			// a large host: the goroutine that performs the executor's actions would delay every lane.
			e.proc.Run(func(context.Context) { fenced() })
		})
	}
	if w.Layout == nil {
		ended()
		return
	}
	e.Events.WorkerGone(w, workerDead(why), "engine worker gone: "+errText(why), ended)
}

func errText(err error) string {
	if err == nil {
		return "no reason given"
	}
	return err.Error()
}

// workerDead distinguishes an exit from a takeover by a new session of the same engine, which
// presents its leases again.
func workerDead(why error) bool { return !errors.Is(why, connector.ErrSuperseded) }

// Copy opens a copy between two regions of w.
func (e engineEvents) Copy(w *engines.Worker, c connector.Copy) { e.copies.start(w, c) }

// Cancel ends a lease.
func (e engineEvents) Cancel(w *engines.Worker, id uint64, reason string) {
	if !e.local.Cancel(w, id, reason) {
		e.Events.Cancel(w, id, reason)
	}
}

// completions returns results to engines. It implements driver.Engines.
type completions struct {
	observer *observer
	plans    *plans.Planner
	log      *slog.Logger
	complete func(*engines.Worker, engines.Completion) error
	pages    *pageStore
}

// Complete implements driver.Engines.
func (e *completions) Complete(a *exec.Action) {
	o := e.observer
	c := a.Completion
	route, moved := "", uint64(0)
	if len(a.ReceiveParts) > 0 {
		c.Transport, route, moved = o.route(a.ReceiveParts)
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
		c.Transport, route, moved = o.named(t.Moved[:])
	}
	if e.pages.exchange.Owns(a.Worker) {
		e.pages.exchange.Completed(c)
		o.traceEnd(a, &c, route, moved)
		return
	}
	// The engine waits; the log does not.
	err := e.complete(a.Worker, c)
	o.traceEnd(a, &c, route, moved)
	if err != nil {
		e.log.Debug("completion not delivered", "lease", c.Lease.String(), "err", err)
	}
}

// Follow implements driver.Engines.
func (e *completions) Follow(w *engines.Worker, on bool) { w.Session.Follow(on) }

// HeldOn implements driver.Engines.
func (e *completions) HeldOn(w *engines.Worker, lease uint64) { w.Session.HeldOn(lease) }

// Forget implements driver.Engines.
func (e *completions) Forget(w *engines.Worker) { e.plans.Forget(w) }

// publishEvery is the interval at which members are given the engines of this node.
const publishEvery = time.Second

func (p *pageStore) publishWorkers(ctx context.Context, workers func() []*engines.Worker) {
	t := time.NewTicker(publishEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		p.publish(workers())
	}
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
