package sidecar

import (
	"sync"
	"time"

	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/spans"
	"github.com/kvspray/kvspray/sidecar/internal/trace"
	"github.com/kvspray/kvspray/transfer"
)

// maxAsked bounds the admission queries whose times are kept. They belong to requests that wait for
// their prefill.
const maxAsked = 4096

// tracing places leases in distributed traces and makes their spans. Nil: off, which costs a
// comparison for each lease.
type tracing struct {
	spans *spans.Recorder // set before the first engine comes
	proc  *driver.Goroutines

	mu    sync.Mutex // protects all below
	asked map[transfer.Key]*asking
	order [maxAsked]transfer.Key // ring of the keys, oldest at next
	next  int
}

// asking is when a scheduler asked for a prompt, and was answered; 0: not yet.
type asking struct{ at, admitted exec.Instant }

// newTracing is nil if no collector is configured.
func newTracing(endpoint string, proc *driver.Goroutines) *tracing {
	if endpoint == "" {
		return nil
	}
	return &tracing{proc: proc, asked: map[transfer.Key]*asking{}}
}

// open starts the export.
func (t *tracing) open(n *Node) (err error) {
	if t == nil {
		return nil
	}
	m := n.metrics
	t.spans, err = spans.New(spans.Options{Endpoint: n.cfg.Trace.OTLP, Service: "kvspray-sidecar",
		Instance: n.cfg.Node, Version: n.version, Log: n.log,
		Exported: func(k int) { m.Spans(true, k) }, Dropped: func(k int) { m.Spans(false, k) }})
	t.spans.Start()
	return err
}

func (t *tracing) close() error { return t.spans.Close() }

// place adds the trace of a lease to the event that opens it.
func (t *tracing) place(ev *engines.Event) {
	switch ev.Kind {
	case engines.SourceOpened:
		ev.Intent.Trace = t.placed(ev.Intent.Trace)
	case engines.DestOpened:
		ev.Expect.Trace = t.expected(ev.Expect.Key, ev.Expect.Trace)
	case engines.Asked:
		ev.Await.Reply = t.await(ev.Await.Key, ev.Await.Reply)
	}
}

// placed names the span of a lease. A malformed or unsampled traceparent is forgotten, so that the
// peer does not get it.
func (t *tracing) placed(at engines.Trace) engines.Trace {
	parent, ok := spans.Parse(at.Parent)
	if !ok {
		return engines.Trace{}
	}
	at.Own = spans.Format(spans.NewChild(parent))
	return at
}

// expected is placed for a destination lease, with the times of the admission query before it.
func (t *tracing) expected(k transfer.Key, at engines.Trace) engines.Trace {
	at = t.placed(at)
	if at.Own == "" {
		return at
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	// It stays: each rank of an engine has a lease of the key.
	if a := t.asked[k]; a != nil {
		at.Asked, at.Admitted = a.at, a.admitted
	}
	return at
}

// await notes when a query comes, and its answer.
func (t *tracing) await(k transfer.Key, reply func(engines.Admission)) func(engines.Admission) {
	a := &asking{at: t.proc.Now()}
	t.mu.Lock()
	if t.asked[k] == nil {
		delete(t.asked, t.order[t.next])
		t.order[t.next] = k
		t.next = (t.next + 1) % maxAsked
	}
	t.asked[k] = a
	t.mu.Unlock()
	return func(ad engines.Admission) {
		t.mu.Lock()
		a.admitted = t.proc.Now()
		t.mu.Unlock()
		reply(ad)
	}
}

// ended exports the spans of a lease.
func (t *tracing) ended(a *exec.Action, c *engines.Completion, route string) {
	if t == nil {
		return
	}
	s := &trace.TransferSpans{Trace: a.Trace, Completion: *c, Route: route,
		Reported: t.proc.Now(), ReportedAt: time.Now()}
	if s.Traced() {
		t.spans.Put(s.Max(), s.Spans)
	}
}
