package exec

import (
	"errors"
	"maps"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
)

// ErrNotListening is wrapped by the error of ConnectFailed if no process listens at the address.
var ErrNotListening = errors.New("connection refused")

// ErrNotPossible is wrapped by the error of ConnectFailed if a retry cannot succeed soon: the
// configuration forbids the address, or the release of the sidecar there is incompatible.
var ErrNotPossible = errors.New("not possible")

// Exec is one executor. Its methods must not be called concurrently.
//
// Exec itself has no state: each table belongs to one part, and the parts call each other in one
// direction, from the top of this list to its bottom. Exec takes the events, and does what needs
// several parts.
type Exec struct {
	*core
	match     *matcher    // grants and questions of peers, and the source leases that serve them
	dests     *dests      // destination leases and their grants
	queries   *queries    // admission queries of our engines
	layouts   *layouts    // layouts that peers were asked for
	sources   *sources    // source leases and what is sent from them
	endpoints *endpoints  // addresses of sidecars
	rails     *rails      // our rails and those of peers
	dispatch  *dispatcher // lanes, and what is given to them
	credits   *credits    // what peers may have in flight towards us
	peers     *peers
	workers   *workers
}

// New returns an executor.
func New(cfg Config) *Exec {
	cfg = cfg.withDefaults()
	c := &core{cfg: cfg, spray: spray.New(spray.Config{Policy: cfg.Policy, MaxFlights: cfg.MaxSlices,
		MaxStrikes: cfg.MaxAttempts})}
	e := &Exec{core: c}
	e.workers = &workers{core: c, all: map[*engines.Worker]*worker{}}
	e.peers = newPeers(c)
	e.credits = newCredits(c)
	e.dispatch = newDispatcher(c, e.peers)
	e.rails = &rails{core: c, peers: e.peers, dispatch: e.dispatch}
	e.endpoints = &endpoints{core: c, byAddr: map[string]*endpoint{}}
	e.sources = newSources(c, e.dispatch, e.workers)
	e.layouts = &layouts{core: c, asked: map[described]*description{}}
	e.queries = &queries{core: c, endpoints: e.endpoints, sources: e.sources, workers: e.workers,
		byToken: map[uint64]*query{}}
	e.dests = newDests(c, e)
	e.match = newMatcher(c, e)
	e.sources.observer = e.match
	if cfg.Endpoint != "" {
		e.PeerUp(0, cfg.Endpoint, cfg.Boot)
	}
	return e
}

// Next is when Tick must be called, or lease.Never.
func (e *Exec) Next() Instant { return e.agenda.next() }

// maxDue bounds the timers that one Tick fires. Thousands of leases may have one deadline, and the
// driver's lock must be free in between.
const maxDue = 512

// Tick does what is due, or a part of it: Next is then in the past.
func (e *Exec) Tick(now Instant) {
	for range maxDue {
		t := e.agenda.pop(now)
		if t == nil {
			break
		}
		t.Value(now)
	}
	e.assign(now)
}

// Open counts the leases that are not complete.
func (e *Exec) Open() (dests, sources int) { return len(e.dests.byID), e.sources.count }

// Lanes counts lanes to a peer.
func (e *Exec) Lanes(boot transfer.Boot) int {
	if p := e.peers.byBoot[boot]; p != nil {
		return len(p.lanes)
	}
	return 0
}

// DrainLeases refuses new leases from now on. Open leases continue.
func (e *Exec) DrainLeases() { e.draining = true }

// Abort closes every lease with engines.StatusFailed: each engine recomputes.
func (e *Exec) Abort(now Instant, reason string) {
	for _, d := range inOrder(maps.Values(e.dests.byID)) {
		e.dests.closeBy(now, d, ByDrain, engines.StatusFailed, reason)
	}
	for _, w := range workersInOrder(maps.Values(e.workers.all)) {
		for _, s := range sourcesInOrder(maps.Values(w.sources)) {
			e.sources.close(now, s, engines.StatusFailed, reason, true)
		}
	}
	e.assign(now)
}

// WorkerGone ends every lease of w; WorkerFenced follows. With final the engine itself is dead,
// and its source leases will not be presented again. Destination leases end in both cases: the
// shim ends them by itself (docs/protocol.md, Restart).
func (e *Exec) WorkerGone(now Instant, w *engines.Worker, final bool, reason string) {
	ws := e.workers.all[w]
	if ws == nil {
		e.emit(WorkerFenced).Worker = w
		return
	}
	if ws.gone {
		return
	}
	ws.gone = true
	if e.workers.vacant() {
		e.workers.vacated = now
	}
	for _, d := range inOrder(maps.Values(ws.dests)) {
		e.dests.closeBy(now, d, ByEngineGone, engines.StatusFailed, reason)
	}
	for _, s := range sourcesInOrder(maps.Values(ws.sources)) {
		e.sources.close(now, s, engines.StatusFailed, reason, final)
	}
	e.workers.idle(ws)
	e.assign(now)
}

// Cancel ends a lease at the request of its engine.
func (e *Exec) Cancel(now Instant, w *engines.Worker, id uint64, reason string) {
	ws := e.workers.all[w]
	if ws == nil {
		return
	}
	if reason == "" {
		reason = "cancelled by the engine"
	}
	if d := ws.dests[id]; d != nil {
		e.dests.close(now, d, engines.StatusCancelled, reason)
	}
	if s := ws.sources[id]; s != nil {
		e.sources.close(now, s, engines.StatusCancelled, reason, true)
	}
	e.assign(now)
}

// Message takes the body of one control frame from a peer. An error describes a protocol
// violation, for the log. Message returns it once for each peer and kind; it drops and counts the
// others.
func (e *Exec) Message(now Instant, boot transfer.Boot, f *peerv1.ControlFrame) error {
	p := e.peers.get(boot)
	var err error
	switch b := f.Body.(type) {
	case *peerv1.ControlFrame_Await:
		err = e.match.onAwait(now, p, b.Await)
	case *peerv1.ControlFrame_Admitted:
		err = e.queries.onAdmitted(p, b.Admitted)
	case *peerv1.ControlFrame_Grant:
		err = e.match.onGrant(now, p, b.Grant)
	case *peerv1.ControlFrame_GrantReply:
		err = e.dests.onGrantReply(now, p, b.GrantReply)
	case *peerv1.ControlFrame_SourceLost:
		err = e.dests.onSourceLost(now, p, b.SourceLost)
	case *peerv1.ControlFrame_Revoke:
		err = e.match.onRevoke(now, p, b.Revoke)
	case *peerv1.ControlFrame_Commit:
		err = e.match.onCommit(now, p, b.Commit)
	case *peerv1.ControlFrame_Credit:
		e.dispatch.onCredit(now, p, b.Credit)
	default:
		// Rails, Ping and Pong are the lanes' own; a peer of a later release may send what we do
		// not understand.
	}
	e.assign(now)
	if err == nil || !e.peers.violates(p, kindOf(err)) {
		return nil
	}
	return err
}

// assign gives work to lanes. Every event ends with it.
func (e *Exec) assign(now Instant) {
	e.dispatch.assign(now)
	e.credits.arm(now, e.dests.slots.Peers() > 1)
}
