package sidecar

import (
	"context"
	"encoding/hex"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/spans"
	"github.com/kvspray/kvspray/sidecar/internal/plans"
	"github.com/kvspray/kvspray/sidecar/internal/trace"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// totals are counts for /debug/state.
type totals struct {
	bytes     [transport.MaxBackends]atomic.Uint64 // landed here, by index of the backend
	mu        sync.Mutex
	transfers map[string]uint64 // protected by mu
}

// observer counts and records transfers: metrics, totals, log lines and trace files. It implements
// driver.Observer.
type observer struct {
	metrics *metrics.Set
	log     *slog.Logger
	order   []string // of transports, as configured
	live    *openBackends

	transfers *trace.Lines
	hashes    trace.Hashes
	tracing   *tracing // nil: off

	totals totals
}

// LaneUp implements driver.Observer.
func (o *observer) LaneUp(l transport.Lane) { o.metrics.LaneUp(l.Backend(), l.Local()) }

// LaneRefused implements driver.Observer.
func (o *observer) LaneRefused(transport.Lane, error) {}

// LaneDown implements driver.Observer.
func (o *observer) LaneDown(l transport.Lane, lost bool) {
	o.metrics.LaneDown(l.Backend(), l.Local(), lost)
}

// Slice implements driver.Observer.
func (o *observer) Slice(l transport.Lane, r *transport.Result, bytes uint64) {
	o.metrics.Slice(l.Backend(), l.Local(), r.Outcome, r.Reason, bytes)
}

// FrameRefused implements driver.Observer.
func (o *observer) FrameRefused(l transport.Lane, why transfer.Reason) {
	o.metrics.FrameRefused(l.Backend(), why)
}

// Landed implements driver.Observer.
func (o *observer) Landed(transport, rail string, backend int, bytes uint64) {
	o.totals.bytes[backend].Add(bytes)
	o.metrics.Landed(transport, rail, bytes)
}

var causes = map[lease.Cause]string{lease.ByCommit: metrics.CauseCommit,
	lease.ByCancel: metrics.CauseCancel, lease.ByDeadline: metrics.CauseDeadline,
	lease.ByRefusal: metrics.CauseRefused, lease.BySourceLost: metrics.CauseSourceLost,
	lease.ByPeerLost:   metrics.CausePeerLost,
	lease.ByEngineGone: metrics.CauseEngineGone, lease.ByDrain: metrics.CauseDrain,
	lease.ByPeerSilent: metrics.CausePeerSilent, lease.BySourceSilent: metrics.CauseSourceSilent,
	lease.ByLanesSilent: metrics.CauseLanesSilent}

// Fenced implements driver.Observer.
func (o *observer) Fenced(cause lease.Cause, took time.Duration) {
	o.metrics.Fenced(causes[cause], took)
}

// Quarantined implements driver.Observer.
func (o *observer) Quarantined(by int) { o.metrics.Quarantined(by) }

// Sent implements driver.Observer.
func (o *observer) Sent(s *exec.SendPart) {
	if p := plans.Sent(s); p != nil { // a batch has no pages
		o.hashes.Sent(s, p)
	}
}

// route is what moved the bytes of a grant's parts.
func (o *observer) route(lands []*exec.ReceivePart) carried {
	var moved [transport.MaxBackends]uint64
	for _, l := range lands {
		for i := range moved {
			moved[i] += l.Grant.Receipt.Bytes(i)
		}
	}
	return carriedBy(namesOf(o.live.Registry), moved[:])
}

// named is route for the executor's counts.
func (o *observer) named(moved []uint64) carried { return carriedBy(o.order, moved) }

// carried are the transports that moved bytes of a transfer.
type carried struct {
	main, all string // the one of most bytes; all, joined by +
	bytes     uint64
	by        []nodeapi.Moved
}

func carriedBy(names []string, moved []uint64) (c carried) {
	var top uint64
	for i, name := range names {
		if i >= len(moved) || moved[i] == 0 {
			continue
		}
		c.bytes += moved[i]
		c.by = append(c.by, nodeapi.Moved{Transport: name, Bytes: moved[i]})
		if moved[i] > top {
			c.main, top = name, moved[i]
		}
		if c.all != "" {
			c.all += "+"
		}
		c.all += name
	}
	return c
}

// sendsOf describes what a source lease sent.
func sendsOf(t *exec.Trace) (out []nodeapi.Send) {
	for i := range t.Sends {
		s := &t.Sends[i]
		x := nodeapi.Send{Peer: s.Peer.String(), Committed: s.Committed, Rails: []nodeapi.RailSend{}}
		if s.First > 0 {
			x.FirstUS = (s.First - s.Bound).Microseconds()
		}
		if s.Last > 0 {
			x.WireUS = (s.Last - s.First).Microseconds()
		}
		if s.Committed && s.Last > 0 {
			x.CommitUS = (s.Ended - s.Last).Microseconds()
		}
		for _, r := range s.Rails {
			x.Rails = append(x.Rails, nodeapi.RailSend{Transport: r.Path.Transport, Local: r.Path.Local,
				Remote: r.Path.Remote, Bytes: r.Bytes, Slices: r.Slices, Failed: r.Failed})
		}
		out = append(out, x)
	}
	return out
}

// traceEnd writes a transfer's line. by counts its bytes, also after a failure.
func (o *observer) traceEnd(a *exec.Action, c *engines.Completion, by carried) {
	route, moved := by.all, by.bytes
	side := metrics.SideSource
	if c.Received {
		side = metrics.SideDestination
	}
	outcome := metrics.OutcomeOf(c.Status)
	if c.Status == engines.StatusOK {
		moved = c.Bytes
	}
	o.metrics.TransferEnded(side, outcome, c.Transport, moved, c.Took)
	o.totals.mu.Lock()
	if o.totals.transfers == nil {
		o.totals.transfers = map[string]uint64{}
	}
	o.totals.transfers[string(side)+"_"+string(outcome)]++
	o.totals.mu.Unlock()
	t := a.Trace
	if t == nil {
		o.log.Info("lease refused", "side", side, "lease", c.Lease.String(), "reason", c.Reason)
		return
	}
	o.tracing.ended(a, c, route)
	if !c.Received && c.Status == engines.StatusOK && t.Flag > 0 {
		o.metrics.FlagToCommit(t.Flag)
	}
	r := trace.Transfer{Side: string(side), Outcome: string(outcome), Xfer: t.Key.Xfer.String(),
		Hash: hex.EncodeToString(t.Key.Hash[:8]), Req: t.Req, Engine: a.Worker.Name,
		Source: t.Source.String(), Dest: t.Dest.String(), Peer: t.Peer.String(), Slot: uint32(t.Slot),
		Gen: uint32(t.Gen), Route: route, Bytes: c.Bytes,
		Grants: t.Grants, QueueUS: t.Queue.Microseconds(), WireUS: t.Wire.Microseconds(),
		CommitUS: t.Commit.Microseconds(),
		TookUS:   c.Took.Microseconds(), Reason: c.Reason, Moved: by.by, Sends: sendsOf(t)}
	if !c.Received {
		r.FlagUS, r.Early = t.Flag.Microseconds(), t.BytesBefore
	}
	if own, ok := spans.Parse(t.Span.Own); ok {
		r.Trace = own.TraceID().String()
	}
	level := slog.LevelInfo
	if c.Status != engines.StatusOK && c.Status != engines.StatusCancelled {
		level = slog.LevelWarn
	}
	if o.log.Enabled(context.Background(), level) {
		o.log.Log(context.Background(), level, "transfer", "side", r.Side, "outcome", r.Outcome, "xfer",
			r.Xfer, "hash", r.Hash, "req", r.Req,
			"source", r.Source, "dest", r.Dest, "peer", r.Peer, "slot", r.Slot, "gen", r.Gen, "route",
			r.Route, "bytes", r.Bytes, "grants", r.Grants,
			"queue_us", r.QueueUS, "wire_us", r.WireUS, "commit_us", r.CommitUS, "flag_us", r.FlagUS,
			"took_us", r.TookUS,
			"early_bytes", r.Early, "reason", r.Reason)
	}
	o.transfers.Put(r)
}

// counts are those of totals.
func (o *observer) counts() nodeapi.Totals {
	st := nodeapi.Totals{Transfers: map[string]uint64{}, Bytes: map[string]uint64{}}
	o.totals.mu.Lock()
	for k, v := range o.totals.transfers {
		st.Transfers[k] = v
	}
	o.totals.mu.Unlock()
	for i, b := range o.live.Registry {
		st.Bytes[b.Name()] = o.totals.bytes[min(i, transport.MaxBackends-1)].Load()
	}
	return st
}
