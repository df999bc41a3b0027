package exec

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// dests are the destination leases and their grants.
type dests struct {
	*core
	endpoints *endpoints
	layouts   *layouts
	rails     *rails
	peers     *peers
	workers   *workers

	byID   map[transfer.LeaseID]*dest
	byPeer byPeer[*dest] // by the peer of the newest grant
	slots  *lease.Slots
	grants uint32 // made so far; the count wraps
}

func newDests(c *core, e *Exec) *dests {
	return &dests{core: c, endpoints: e.endpoints, layouts: e.layouts, rails: e.rails, peers: e.peers,
		workers: e.workers, byID: map[transfer.LeaseID]*dest{}, byPeer: byPeer[*dest]{},
		slots: lease.NewSlots(c.cfg.MaxSlots)}
}

// dest is a destination lease with the executor's own state of it.
type dest struct {
	lease.Dest
	ws           *worker
	x            *engines.Expect
	plan         Plan
	ep           *endpoint
	at           transfer.Boot // the entry of dests.byPeer that lists it
	team         lease.TeamID
	told         bool           // the peer has reported its ranks for this lease
	gen          uint32         // of the last grant
	live         *outboundGrant // the grant that is not fenced yet
	last         *outboundGrant
	matchTimeout time.Duration
	t            *timer

	decided bool // status and reason stand
	status  uint16
	reason  string
	trouble string // the last one; the reason if time runs out

	began   Instant
	bound   Instant
	filled  Instant
	claimed bool // a partner was bound at least once
}

// granted lists a destination lease at the peer that has its newest grant.
func (ds *dests) granted(d *dest) {
	ds.byPeer.remove(d.at, d)
	d.at = d.Peer
	ds.byPeer.add(d.at, d)
}

// grantedTo are the leases whose grant a peer has, in order.
func (ds *dests) grantedTo(boot transfer.Boot) (all []*dest) {
	for d := range ds.byPeer[boot] {
		if d.Peer == boot && (d.State == lease.DestGranted || d.State == lease.DestLanding) {
			all = append(all, d)
		}
	}
	return inOrder(slices.Values(all))
}

// open is Exec.Expect.
func (ds *dests) open(now Instant, w *engines.Worker, x engines.Expect) {
	ws := ds.workers.all[w]
	if ws == nil || ws.gone || ws.dests[x.Lease.ID] != nil || ws.sources[x.Lease.ID] != nil {
		return
	}
	refuse := func(reason string) {
		a := ds.emit(Complete)
		a.Worker = w
		a.Completion = engines.Completion{Lease: x.Lease, Received: true, Status: engines.StatusRefused,
			Reason: reason}
	}
	team, err := teamOf(w, &x)
	if err != nil {
		refuse(err.Error())
		return
	}
	var full string
	switch {
	case ds.draining:
		full = "the sidecar is draining"
	case len(ds.byID) >= ds.cfg.MaxDest || ds.byID[x.Lease] != nil:
		full = fmt.Sprintf("%d destination leases are open: at most %d", len(ds.byID), ds.cfg.MaxDest)
	}
	if full != "" {
		ds.decline(now, x.Peer, declined{id: x.Lease, key: x.Key, team: team,
			size: w.Place.World(), reason: full})
		refuse(full)
		return
	}
	if why := ds.endpoints.unreachable(now, x.Peer); why != "" {
		refuse(why)
		return
	}
	plan, err := ds.cfg.Planner.Receive(w, &x)
	if err != nil {
		ds.decline(now, x.Peer, declined{id: x.Lease, key: x.Key, team: team,
			size: w.Place.World(), reason: "plan: " + err.Error(), far: true})
		refuse(err.Error())
		return
	}
	d := &dest{ws: ws, x: &x, plan: plan, team: team, began: now, matchTimeout: x.Partner}
	if d.matchTimeout <= 0 {
		d.matchTimeout = ds.cfg.MatchTimeout
	}
	d.ID, d.Key = x.Lease, x.Key
	d.Deadline = now + ds.span(x.Deadline)
	d.MatchBy = now + d.matchTimeout
	d.t = newTimer(func(now Instant) { ds.due(now, d) })
	ds.agenda.arm(d.t, min(d.Deadline, d.MatchBy))
	ws.dests[x.Lease.ID] = d
	ds.byID[x.Lease] = d
	d.ep = ds.endpoints.get(x.Peer)
	d.ep.refs++
	ds.grant(now, d)

}

// teamDomain keeps the hash apart from others.
const teamDomain = "kvspray-team-v1"

// teamOf names the receivers of a request. Every rank of the engine computes the same name, and no
// other request has it.
func teamOf(w *engines.Worker, x *engines.Expect) (id lease.TeamID, err error) {
	if w.Place.World() > 1 {
		if x.Req == "" {
			return id, fmt.Errorf("the engine has %d ranks, and the request has no id by which theirs can "+
				"be told: send req", w.Place.World())
		}
		return teamNamed("%q %q", w.Place.Engine, x.Req), nil
	}
	// not the epoch, for the lease may be presented again
	return teamNamed("%x %d", x.Lease.Boot, x.Lease.ID), nil
}

func teamNamed(format string, a ...any) (id lease.TeamID) {
	h := sha256.New()
	_, _ = fmt.Fprintf(h, teamDomain+format, a...) // a hash takes everything
	copy(id[:], h.Sum(nil))
	return id
}

func (ds *dests) due(now Instant, d *dest) {
	switch {
	case now >= d.Deadline:
		ds.closeBy(now, d, ds.timeOut(d), engines.StatusExpired, withTrouble("the deadline passed", d.trouble))
	case now >= d.MatchBy:
		ds.closeBy(now, d, ds.timeOut(d), engines.StatusExpired,
			withTrouble(fmt.Sprintf("no partner came within %v", d.matchTimeout), d.trouble))
	default:
		ds.agenda.arm(d.t, min(d.Deadline, d.MatchBy))
	}
}

// timeOut is the cause of a fence when the time of a lease is over.
func (ds *dests) timeOut(d *dest) Cause {
	if p := ds.peers.byBoot[d.Peer]; d.live != nil && (p == nil || !p.up()) {
		return ByPeerLost
	}
	return ByDeadline
}

func withTrouble(reason, trouble string) string {
	if trouble == "" {
		return reason
	}
	return reason + "; last: " + trouble
}

// close ends a destination lease; the first status stands. A live grant is fenced before the
// engine receives the result.
func (ds *dests) close(now Instant, d *dest, status uint16, reason string) {
	ds.closeBy(now, d, causeOf(status), status, reason)
}

// closeBy is close with a cause that the status does not imply.
func (ds *dests) closeBy(now Instant, d *dest, cause Cause, status uint16, reason string) {
	if d.decided {
		return
	}
	d.decided, d.status, d.reason = true, status, reason
	delete(d.ep.waiting, d)
	waited := d.State == lease.DestWaiting
	fence, err := d.Close(true)
	if err != nil {
		return
	}
	if waited {
		ds.decline(now, d.ep.addr, declined{id: d.x.Lease, key: d.x.Key, team: d.team,
			size: d.ws.w.Place.World(), gen: d.gen, reason: reason, far: status == engines.StatusRefused})
		ds.complete(now, d)
		return
	}
	// From here on only the fence ends the lease.
	ds.agenda.disarm(d.t)
	if fence {
		ds.fence(d.live, cause)
	}
	if status != engines.StatusOK {
		ds.send(d.Peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{Revoke: &peerv1.Revoke{
			Destination: leaseMsg(d.ID), Gen: d.live.gen, Reason: reason}}})
	}
}

// regrant fences the live grant. After the fence the blocks are granted again.
func (ds *dests) regrant(now Instant, d *dest, cause Cause, why string) {
	d.trouble = why
	if d.Grants > ds.cfg.MaxRegrants {
		ds.closeBy(now, d, cause, engines.StatusFailed, fmt.Sprintf("granted %d times; last: %s", d.Grants, why))
		return
	}
	if fence, err := d.Close(false); err == nil && fence {
		ds.fence(d.live, cause)
	}
}

// fence fences every part of a grant.
func (ds *dests) fence(o *outboundGrant, cause Cause) {
	o.cause = cause
	for _, l := range o.lands {
		ds.fencePart(l)
	}
}

func (ds *dests) fencePart(l *ReceivePart) {
	a := ds.emit(Fence)
	a.ReceivePart, a.Cause = l, l.offer.cause
}

// full is Exec.Full.
func (ds *dests) full(now Instant, l *ReceivePart) {
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
func (ds *dests) tryCommit(now Instant, d *dest) {
	if d.live != nil && d.live.unfilled == 0 && d.State == lease.DestLanding {
		ds.close(now, d, engines.StatusOK, "")
	}
}

// fenceDone is Exec.FenceDone.
func (ds *dests) fenceDone(now Instant, l *ReceivePart, err error) {
	if l.fenced {
		return
	}
	o := l.offer
	d := o.dest
	if err != nil {
		d.trouble = "fence: " + err.Error()
		ds.agenda.arm(newTimer(func(Instant) { ds.fencePart(l) }), now+ds.cfg.Grace)
		return
	}
	l.fenced = true
	ds.emit(Forget).ReceivePart = l
	// The landing was granted once and is fenced once: neither call can fail.
	_ = ds.slots.Fenced(l.Grant.Peer, l.Grant.Slot, l.Grant.Gen)
	if o.unfenced--; o.unfenced > 0 {
		return
	}
	ds.charge(o, false)
	if d.live != o || d.Fenced() != nil {
		return
	}
	d.live = nil
	if d.State == lease.DestFenced {
		ds.complete(now, d)
	} else {
		d.MatchBy = now + d.matchTimeout
		ds.agenda.arm(d.t, min(d.Deadline, d.MatchBy))
		ds.grant(now, d)
	}

}

func (ds *dests) complete(now Instant, d *dest) {
	if d.Complete() != nil {
		return
	}
	ds.agenda.disarm(d.t)
	delete(d.ws.dests, d.ID.ID)
	delete(ds.byID, d.ID)
	ds.byPeer.remove(d.at, d)
	delete(d.ep.waiting, d)
	var bytes uint64 // not those of d's own plan: of a window's first block the source may have less
	a := ds.emit(Complete)
	a.Worker = d.ws.w
	var sources []*peerv1.Lease
	if d.last != nil {
		a.ReceiveParts = d.last.lands
		for _, l := range d.last.lands {
			bytes += l.Plan.Space().TotalBytes()
			if l.bound {
				sources = append(sources, leaseMsg(l.source))
			}
		}
	}
	a.Completion = engines.Completion{Lease: d.ID, Received: true, Status: d.status,
		Took: now - d.began, Reason: d.reason}
	a.Trace = &Trace{Key: d.Key, Req: d.x.Req, Source: d.Source, Dest: d.ID, Peer: d.Peer,
		Slot: d.Slot, Gen: d.Gen, Grants: d.Grants,
		Parts: len(a.ReceiveParts)}
	switch {
	case d.filled > 0 && d.claimed:
		from := min(d.bound, d.filled)
		a.Trace.Queue, a.Trace.Wire, a.Trace.Commit = from-d.began, d.filled-from, now-d.filled
	case d.claimed:
		a.Trace.Queue, a.Trace.Wire = d.bound-d.began, now-d.bound
	default:
		a.Trace.Queue = now - d.began
	}
	if d.status == engines.StatusOK {
		a.Completion.Bytes = bytes
		ds.send(d.Peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Commit{Commit: &peerv1.Commit{
			Destination: leaseMsg(d.ID), Source: sources, Bytes: bytes}}})
	}
	d.ep.refs--
	ds.endpoints.drop(d.ep)
	ds.workers.idle(d.ws)
}

// moveOn moves grants from an unreachable peer to the new peer at its address. A reachable peer
// keeps its grants: several processes may share the address.
func (ds *dests) moveOn(now Instant, ep *endpoint, old *peer) {
	for _, d := range inOrder(maps.Keys(ep.waiting)) {
		if d.Peer == old.boot && (d.State == lease.DestGranted || d.State == lease.DestLanding) {
			ds.takeFrom(now, d)
		}
	}
}

// takeFrom revokes the grant of an unreachable peer, so that the new peer at its address gets it.
// The old peer receives the revoke if it returns.
func (ds *dests) takeFrom(now Instant, d *dest) {
	why := "the source's sidecar cannot be reached, and another answers at " + d.ep.addr
	ds.send(d.Peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{Revoke: &peerv1.Revoke{
		Destination: leaseMsg(d.ID), Gen: d.live.gen, Reason: why}}})
	ds.regrant(now, d, ByPeerLost, why)
}
