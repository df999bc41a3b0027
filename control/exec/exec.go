package exec

import (
	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/control/exec/internal/dest"
	"github.com/kvspray/kvspray/control/exec/internal/endpoint"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/layouts"
	"github.com/kvspray/kvspray/control/exec/internal/source"
	"github.com/kvspray/kvspray/control/exec/internal/workers"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
)

// Exec is one executor. Its methods must not be called concurrently.
//
// Exec itself has no state: each table belongs to one part, and the parts call each other in one
// direction, from the top of this list to its bottom. Exec takes the events, and does what needs
// several parts.
type Exec struct {
	core      *core.Core
	out       *actions
	match     *source.Matcher   // grants and queries of peers, and the source leases that serve them
	dests     *dest.Table       // destination leases and their grants
	queries   *dest.Queries     // admission queries of our engines
	layouts   *layouts.Table    // layouts that peers were asked for
	sources   *source.Table     // source leases and what is sent from them
	endpoints *endpoint.Table   // addresses of sidecars
	rails     *lanes.Rails      // our rails and those of peers
	dispatch  *lanes.Dispatcher // lanes, and what is given to them
	credits   *lanes.Credits    // what peers may have in flight towards us
	peers     *lanes.Peers
	workers   *workers.Table
}

// New returns an executor.
func New(cfg Config) *Exec {
	cfg = cfg.WithDefaults()
	c := &core.Core{Cfg: cfg, Spray: spray.New(spray.Config{MaxFlights: cfg.MaxSlices,
		MaxStrikes: cfg.MaxAttempts})}
	out := &actions{}
	e := &Exec{core: c, out: out}
	e.workers = workers.New(out.workerFenced)
	e.peers = lanes.NewPeers(c, out)
	e.credits = lanes.NewCredits(c, out)
	e.dispatch = lanes.NewDispatcher(c, e.peers, out, source.OriginOf)
	e.rails = lanes.NewRails(c, e.peers, e.dispatch)
	e.endpoints = endpoint.New(&c.Agenda, out.connect)
	e.sources = source.New(c, out, e.dispatch, e.workers, e.peers)
	e.layouts = layouts.New(c, out.describe)
	e.queries = dest.NewQueries(c, out, e.endpoints, e.workers, e.sources.Has)
	e.dests = dest.New(c, out, dest.Parts{Endpoints: e.endpoints, Layouts: e.layouts, Rails: e.rails,
		Peers: e.peers, Workers: e.workers, Queries: e.queries})
	e.match = source.NewMatcher(c, out, e.sources, source.Parts{Layouts: e.layouts, Rails: e.rails,
		Peers: e.peers, Workers: e.workers})
	if cfg.Endpoint != "" {
		e.PeerUp(0, cfg.Endpoint, cfg.Boot)
	}
	return e
}

// Next is when Tick must be called, or lease.Never.
func (e *Exec) Next() Instant { return e.core.Agenda.Next() }

// maxDue bounds the timers that one Tick fires. Thousands of leases may have one deadline, and the
// driver's lock must be free in between.
const maxDue = 512

// Tick does what is due, or a part of it: Next is then in the past.
func (e *Exec) Tick(now Instant) {
	for range maxDue {
		t := e.core.Agenda.Pop(now)
		if t == nil {
			break
		}
		t.Value(now)
	}
	e.assign(now)
}

// Drain moves the actions of the last events into b, overwrites its former content, and reports
// whether there are any.
func (e *Exec) Drain(b *Batch) bool { return e.out.drain(b) }

// Open counts the leases that are not complete.
func (e *Exec) Open() (dests, sources int) { return e.dests.Len(), e.sources.Len() }

// Lanes counts lanes to a peer.
func (e *Exec) Lanes(boot transfer.Boot) int {
	if p := e.peers.Find(boot); p != nil {
		return p.Lanes()
	}
	return 0
}

// DrainLeases refuses new leases from now on. Open leases continue.
func (e *Exec) DrainLeases() { e.core.Draining = true }

// Abort closes every lease with engines.StatusFailed: each engine recomputes.
func (e *Exec) Abort(now Instant, reason string) {
	e.dests.CloseAll(now, reason)
	for _, w := range e.workers.InOrder() {
		e.failSources(now, w, reason)
	}
	e.assign(now)
}

// SetFault sets why the memory of a worker must not be used any more; empty: it may be. Its open
// leases fail, and new ones are refused. It returns false if the worker is not known.
func (e *Exec) SetFault(now Instant, w *engines.Worker, why string) bool {
	ws := e.workers.Find(w)
	if ws == nil || ws.Gone {
		return false
	}
	if ws.Fault = why; why != "" {
		for _, d := range dest.Of(ws) {
			e.dests.Close(now, d, engines.StatusFailed, why)
		}
		e.failSources(now, ws, why)
	}
	e.assign(now)
	return true
}

func (e *Exec) failSources(now Instant, w *workers.Worker, why string) {
	for _, s := range source.Of(w) {
		e.sources.Close(now, s, engines.StatusFailed, why, true)
	}
}

// Message takes the body of one control frame from a peer. An error describes a protocol
// violation, for the log. Message returns it once for each peer and kind; it drops and counts the
// others.
func (e *Exec) Message(now Instant, boot transfer.Boot, f *peerv1.ControlFrame) error {
	p := e.peers.Get(boot)
	var err error
	switch b := f.Body.(type) {
	case *peerv1.ControlFrame_Await:
		err = e.match.OnAwait(now, p, b.Await)
	case *peerv1.ControlFrame_SessionOver:
		e.match.OnSessionOver(now, p, b.SessionOver)
	case *peerv1.ControlFrame_Admitted:
		err = e.queries.OnAdmitted(p, b.Admitted)
	case *peerv1.ControlFrame_Grant:
		err = e.match.OnGrant(now, p, b.Grant)
	case *peerv1.ControlFrame_GrantReply:
		err = e.dests.OnGrantReply(now, p, b.GrantReply)
	case *peerv1.ControlFrame_SourceLost:
		err = e.dests.OnSourceLost(now, p, b.SourceLost)
	case *peerv1.ControlFrame_Check:
		err = e.match.OnCheck(now, p, b.Check)
	case *peerv1.ControlFrame_Checked:
		err = e.dests.OnChecked(now, p, b.Checked)
	case *peerv1.ControlFrame_Revoke:
		err = e.match.OnRevoke(now, p, b.Revoke)
	case *peerv1.ControlFrame_Commit:
		err = e.match.OnCommit(now, p, b.Commit)
	case *peerv1.ControlFrame_Credit:
		e.dispatch.OnCredit(now, p, b.Credit)
	default:
		// Rails, Ping and Pong are the lanes' own; a peer of a later release may send what we do
		// not understand.
	}
	e.assign(now)
	if err == nil || !e.peers.Violates(p, frame.KindOf(err)) {
		return nil
	}
	return err
}

// assign gives work to lanes. Every event ends with it.
func (e *Exec) assign(now Instant) {
	e.dispatch.Assign(now)
	e.out.flushLate()
	e.credits.Schedule(now, e.dests.ServedBySeveral())
}
