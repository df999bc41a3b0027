// Package dest has the destination side of an executor: destination leases with their grants, and
// the admission queries of our engines.
//
// A lease is granted in parts, one for each rank of the source's engine that sends something. It
// completes after a fence of every part; a commit needs every part bound and full.
//
// The tests of control/exec test this package with executors on both sides.
package dest

import (
	"crypto/sha256"
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/agreement"
	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/control/exec/internal/endpoint"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/index"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/layouts"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
	"github.com/kvspray/kvspray/control/exec/internal/workers"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// Instant is a point in time: the duration since the owner's start.
type Instant = timer.Instant

// Actions are what this package asks of the driver.
type Actions interface {
	Send(to transfer.Boot, f *peerv1.ControlFrame)
	// Offer makes the grants of parts live and sends f, which has them.
	Offer(to transfer.Boot, parts []*Part, f *peerv1.ControlFrame)
	Fence(p *Part, cause lease.Cause)
	Forget(p *Part)
	// Received ends a lease; parts are those of its last grant.
	Received(w *engines.Worker, c engines.Completion, trace *core.Trace, parts []*Part)
	Answer(a *engines.Await, ad engines.Admission)
}

// Table has the destination leases and their grants.
type Table struct {
	*core.Core
	out       Actions
	endpoints *endpoint.Table
	layouts   *layouts.Table
	rails     *lanes.Rails
	peers     *lanes.Peers
	workers   *workers.Table
	queries   *Queries

	byID       map[transfer.LeaseID]*Lease
	byPeer     index.Sets[transfer.Boot, *Lease]      // by the peer of the newest grant
	waiting    index.Sets[*endpoint.Endpoint, *Lease] // wait for a grant, or their peer is unreachable
	describing index.Sets[layouts.Name, *Lease]       // wait for a layout
	Engines    Engines
	slots      *lease.Slots
	Generation uint32 // of the last grant; the count wraps
}

// Parts are the other parts of an executor that a Table uses.
type Parts struct {
	Endpoints *endpoint.Table
	Layouts   *layouts.Table
	Rails     *lanes.Rails
	Peers     *lanes.Peers
	Workers   *workers.Table
	Queries   *Queries
}

// New returns a table without leases.
func New(c *core.Core, out Actions, p Parts) *Table {
	return &Table{Core: c, out: out, endpoints: p.Endpoints, layouts: p.Layouts, rails: p.Rails,
		peers: p.Peers, workers: p.Workers, queries: p.Queries, byID: map[transfer.LeaseID]*Lease{},
		byPeer:     index.Sets[transfer.Boot, *Lease]{},
		waiting:    index.Sets[*endpoint.Endpoint, *Lease]{},
		describing: index.Sets[layouts.Name, *Lease]{}, Engines: Engines{},
		slots: lease.NewSlots(c.Cfg.MaxSlots)}
}

// Lease is a destination lease with the executor's own state of it.
type Lease struct {
	lease.Dest
	ws           *workers.Worker
	x            *engines.Expect
	plan         agreement.Plan
	ep           *endpoint.Endpoint
	at           transfer.Boot // the entry of Table.byPeer that lists it
	team         lease.TeamID
	ranks        []agreement.Rank // of the prefill engine, reported for this lease
	ranksOf      transfer.Boot    // the peer that reported ranks
	gen          uint32           // of the last grant
	live         *outboundGrant   // the grant that is not fenced yet
	last         *outboundGrant
	matchTimeout time.Duration
	t            *timer.Timer
	stall        stall

	decided bool // status and reason stand
	status  uint16
	reason  string
	trouble string // the last one; the reason if time runs out

	began     Instant
	bound     Instant
	filled    Instant
	everBound bool // a grant was bound at least once
}

// LeaseID implements workers.Lease.
func (d *Lease) LeaseID() transfer.LeaseID { return d.ID }

// Of returns the destination leases of a worker, in order.
func Of(ws *workers.Worker) []*Lease {
	var all []*Lease
	for _, l := range ws.Leases {
		if d, ok := l.(*Lease); ok {
			all = append(all, d)
		}
	}
	return inOrder(slices.Values(all))
}

func inOrder(all iter.Seq[*Lease]) []*Lease {
	return slices.SortedFunc(all, func(a, b *Lease) int { return index.CompareLeases(a.ID, b.ID) })
}

// wait waits for the connection to the source's sidecar.
func (ds *Table) wait(d *Lease) {
	if ds.waiting.Add(d.ep, d) {
		d.ep.Wait()
	}
}

func (ds *Table) unwait(d *Lease) {
	if ds.waiting.Remove(d.ep, d) {
		d.ep.Waited()
	}
}

// granted lists a destination lease at the peer that has its newest grant.
func (ds *Table) granted(d *Lease) {
	ds.byPeer.Remove(d.at, d)
	d.at = d.Peer
	ds.byPeer.Add(d.at, d)
}

// GrantedTo are the leases whose grant a peer has, in order.
func (ds *Table) GrantedTo(boot transfer.Boot) (all []*Lease) {
	for d := range ds.byPeer[boot] {
		if d.Peer == boot && (d.State == lease.DestGranted || d.State == lease.DestLanding) {
			all = append(all, d)
		}
	}
	return inOrder(slices.Values(all))
}

// Open opens a destination lease.
func (ds *Table) Open(now Instant, w *engines.Worker, x engines.Expect) {
	ws := ds.workers.Find(w)
	if ws == nil || ws.Gone || ws.Leases[x.Lease.ID] != nil {
		return
	}
	refuse := func(reason string) {
		ds.out.Received(w, engines.Completion{Lease: x.Lease, Received: true,
			Status: engines.StatusRefused, Reason: reason}, nil, nil)
	}
	team, err := teamOf(w, &x)
	if err != nil {
		refuse(err.Error())
		return
	}
	var full string
	switch {
	case ds.Draining:
		full = "the sidecar is draining"
	case ws.Fault != "":
		full = ws.Fault
	case len(ds.byID) >= ds.Cfg.MaxDest || ds.byID[x.Lease] != nil:
		full = fmt.Sprintf("%d destination leases are open: at most %d", len(ds.byID), ds.Cfg.MaxDest)
	}
	if full != "" {
		ds.Refused(now, w, x, full)
		refuse(full)
		return
	}
	if why := ds.endpoints.Unreachable(now, x.Peer); why != "" {
		refuse(why)
		return
	}
	plan, err := ds.Cfg.Planner.Receive(w, &x)
	if err != nil {
		ds.Refused(now, w, x, "plan: "+err.Error())
		refuse(err.Error())
		return
	}
	d := &Lease{ws: ws, x: &x, plan: plan, team: team, began: now, matchTimeout: x.MatchTimeout}
	if d.matchTimeout <= 0 {
		d.matchTimeout = ds.Cfg.MatchTimeout
	}
	d.ID, d.Key = x.Lease, x.Key
	d.Deadline = now + ds.Span(x.Deadline)
	d.MatchBy = now + d.matchTimeout
	d.t = timer.New(func(now Instant) { ds.due(now, d) })
	ds.Agenda.Arm(d.t, min(d.Deadline, d.MatchBy))
	ws.Leases[x.Lease.ID] = d
	ds.byID[x.Lease] = d
	d.ep = ds.endpoints.Get(x.Peer)
	d.ep.Hold()
	ds.beginStall(now, d)
	ds.grant(now, d)
}

// teamDomain keeps the hash apart from others.
const teamDomain = "kvspray-team-v1"

// teamOf names the receivers of a request. Every rank of the engine computes the same name, and no
// other request has it.
func teamOf(w *engines.Worker, x *engines.Expect) (id lease.TeamID, err error) {
	if w.Place.World() > 1 {
		if x.Req == "" {
			return id, fmt.Errorf("the engine has %d ranks, and the request has no id that "+
				"identifies the leases of all: send req", w.Place.World())
		}
		return TeamNamed("%q %q", w.Place.Engine, x.Req), nil
	}
	// not the epoch, for the lease may be presented again
	return TeamNamed("%x %d", x.Lease.Boot, x.Lease.ID), nil
}

func TeamNamed(format string, a ...any) (id lease.TeamID) {
	h := sha256.New()
	_, _ = fmt.Fprintf(h, teamDomain+format, a...) // a hash takes everything
	copy(id[:], h.Sum(nil))
	return id
}

func (ds *Table) due(now Instant, d *Lease) {
	switch {
	case now >= d.Deadline:
		ds.CloseBy(now, d, ds.timeOut(d), engines.StatusExpired,
			core.WithTrouble("the deadline passed", d.trouble))
	case now >= d.MatchBy:
		ds.CloseBy(now, d, ds.timeOut(d), engines.StatusExpired,
			core.WithTrouble(fmt.Sprintf("no source came within %v", d.matchTimeout), d.trouble))
	default:
		ds.Agenda.Arm(d.t, min(d.Deadline, d.MatchBy))
	}
}

// timeOut is the cause of a fence when the time of a lease is over.
func (ds *Table) timeOut(d *Lease) lease.Cause {
	if p := ds.peers.Find(d.Peer); d.live != nil && (p == nil || !p.Up()) {
		return lease.ByPeerLost
	}
	return lease.ByDeadline
}

// CloseAll ends every lease with StatusFailed.
func (ds *Table) CloseAll(now Instant, reason string) {
	for _, d := range inOrder(maps.Values(ds.byID)) {
		ds.CloseBy(now, d, lease.ByDrain, engines.StatusFailed, reason)
	}
}

// Close ends a destination lease; the first status stands. A live grant is fenced before the
// engine receives the result.
func (ds *Table) Close(now Instant, d *Lease, status uint16, reason string) {
	ds.CloseBy(now, d, causeOf(status), status, reason)
}

// CloseBy is Close with a cause that the status does not imply.
func (ds *Table) CloseBy(now Instant, d *Lease, cause lease.Cause, status uint16, reason string) {
	if d.decided {
		return
	}
	d.decided, d.status, d.reason = true, status, reason
	ds.endStall(d)
	ds.unwait(d)
	waited := d.State == lease.DestWaiting
	fence, err := d.Close(true)
	if err != nil {
		return
	}
	if waited {
		// The request's query may still be on its way: without the decline, the source would be held
		// for the engine that lives.
		ds.decline(now, d.ep.Addr(), declined{id: d.x.Lease, key: d.x.Key, team: d.team,
			size: d.ws.Place.World(), gen: d.gen, reason: reason,
			far: status == engines.StatusRefused || status == engines.StatusCancelled})
		ds.complete(now, d)
		return
	}
	// From here on only the fence ends the lease.
	ds.Agenda.Disarm(d.t)
	if fence {
		ds.fence(d.live, cause)
	}
	ds.queries.RequestOver(d.ep.Addr(), d.Key)
	if status != engines.StatusOK {
		ds.out.Send(d.Peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{Revoke: &peerv1.Revoke{
			Destination: frame.Lease(d.ID), Gen: d.live.gen, Reason: reason}}})
	}
}

// regrant fences the live grant. After the fence the blocks are granted again.
func (ds *Table) regrant(now Instant, d *Lease, cause lease.Cause, why string) {
	d.trouble = why
	if d.Grants > ds.Cfg.MaxRegrants {
		ds.CloseBy(now, d, cause, engines.StatusFailed, fmt.Sprintf("granted %d times; last: %s",
			d.Grants, why))
		return
	}
	if fence, err := d.Close(false); err == nil && fence {
		ds.fence(d.live, cause)
	}
}

// fence fences every part of a grant.
func (ds *Table) fence(o *outboundGrant, cause lease.Cause) {
	o.cause = cause
	for _, l := range o.parts {
		ds.fencePart(l)
	}
}

func (ds *Table) fencePart(l *Part) {
	ds.out.Fence(l, l.offer.cause)
}

// Full is Exec.Full.
func (ds *Table) Full(now Instant, l *Part) {
	o := l.offer
	if o.dest.live != o || l.full {
		return
	}
	l.full = true
	if o.unfilled--; o.unfilled > 0 {
		return
	}
	o.dest.filled = now
	ds.tryCommit(now, o.dest)
}

// tryCommit closes a lease to writers once every part is full and bound.
func (ds *Table) tryCommit(now Instant, d *Lease) {
	if d.live != nil && d.live.unfilled == 0 && d.State == lease.DestLanding {
		ds.Close(now, d, engines.StatusOK, "")
	}
}

// FenceDone is Exec.FenceDone.
func (ds *Table) FenceDone(now Instant, l *Part, err error) {
	if l.fenced {
		return
	}
	o := l.offer
	d := o.dest
	if err != nil {
		d.trouble = "fence: " + err.Error()
		ds.Agenda.Arm(timer.New(func(Instant) { ds.fencePart(l) }), now+ds.Cfg.Grace)
		return
	}
	l.fenced = true
	ds.out.Forget(l)
	// The landing was granted once and is fenced once: neither call can fail.
	_ = ds.slots.Fenced(l.Grant.Peer, l.Grant.Slot, l.Grant.Gen)
	if o.unfenced--; o.unfenced > 0 {
		return
	}
	if p := ds.peers.Find(l.Grant.Peer); p != nil {
		ds.Engines.charge(p, o, false)
	}
	if d.live != o || d.Fenced() != nil {
		return
	}
	d.live = nil
	if d.State == lease.DestFenced {
		ds.complete(now, d)
	} else {
		d.MatchBy = now + d.matchTimeout
		ds.Agenda.Arm(d.t, min(d.Deadline, d.MatchBy))
		ds.grant(now, d)
	}
}

func (ds *Table) complete(now Instant, d *Lease) {
	if d.Complete() != nil {
		return
	}
	ds.Agenda.Disarm(d.t)
	delete(d.ws.Leases, d.ID.ID)
	delete(ds.byID, d.ID)
	ds.byPeer.Remove(d.at, d)
	ds.unwait(d)
	var bytes uint64 // not those of d's own plan: of a window's first block the source may have less
	var parts []*Part
	if d.last != nil {
		parts = d.last.parts
		for _, l := range d.last.parts {
			bytes += l.Plan.Space().TotalBytes()
		}
	}
	c := engines.Completion{Lease: d.ID, Received: true, Status: d.status,
		Took: now - d.began, Reason: d.reason}
	trace := &core.Trace{Key: d.Key, Req: d.x.Req, Source: d.Source, Dest: d.ID, Peer: d.Peer,
		Slot: d.Slot, Gen: d.Gen, Grants: d.Grants,
		Parts: len(parts), Span: d.x.Trace, Began: d.began, Filled: d.filled, Ended: now}
	if d.everBound {
		trace.Bound = d.bound
	}
	switch {
	case d.filled > 0 && d.everBound:
		from := min(d.bound, d.filled)
		trace.Queue, trace.Wire, trace.Commit = from-d.began, d.filled-from, now-d.filled
	case d.everBound:
		trace.Queue, trace.Wire = d.bound-d.began, now-d.bound
	default:
		trace.Queue = now - d.began
	}
	if d.status == engines.StatusOK {
		c.Bytes = bytes
	}
	ds.out.Received(d.ws.Worker, c, trace, parts)
	if d.status == engines.StatusOK {
		ds.out.Send(d.Peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Commit{Commit: &peerv1.Commit{
			Destination: frame.Lease(d.ID)}}})
	}
	ds.endpoints.Release(d.ep)
	ds.workers.Idle(d.ws)
}

// MoveOn moves grants from an unreachable peer to the new peer at its address. A reachable peer
// keeps its grants: several processes may share the address.
func (ds *Table) MoveOn(now Instant, ep *endpoint.Endpoint, old *lanes.Peer) {
	for _, d := range inOrder(maps.Keys(ds.waiting[ep])) {
		if d.Peer == old.Boot && (d.State == lease.DestGranted || d.State == lease.DestLanding) {
			ds.takeFrom(now, d)
		}
	}
}

// takeFrom revokes the grant of an unreachable peer, so that the new peer at its address gets it.
// The old peer receives the revoke if it returns.
func (ds *Table) takeFrom(now Instant, d *Lease) {
	why := "the source's sidecar cannot be reached, and another answers at " + d.ep.Addr()
	ds.out.Send(d.Peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{Revoke: &peerv1.Revoke{
		Destination: frame.Lease(d.ID), Gen: d.live.gen, Reason: why}}})
	ds.regrant(now, d, lease.ByPeerLost, why)
}
