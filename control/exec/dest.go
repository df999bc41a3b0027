package exec

import (
	"crypto/sha256"
	"fmt"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// dest is a destination lease with what the executor adds to it.
type dest struct {
	lease.Dest
	ws      *worker
	x       *connector.Expect
	plan    Plan
	ep      *endpoint
	at      transfer.Boot // the entry of Exec.shared that lists it
	team    lease.TeamID
	told    bool   // by the peer, for this lease, which ranks its engine has
	gen     uint32 // of the last grant
	live    *offer // the grant that is not fenced yet
	last    *offer
	partner time.Duration
	t       *timer

	decided bool // status and reason stand
	status  uint16
	reason  string
	trouble string // the last one; the reason if time runs out

	began   Instant
	bound   Instant
	filled  Instant
	claimed bool // a partner was bound at least once
}

// Expect opens a destination lease.
func (e *Exec) Expect(now Instant, w *connector.Worker, x connector.Expect) {
	ws := e.workers[w]
	if ws == nil || ws.gone || ws.dests[x.Lease.ID] != nil || ws.sources[x.Lease.ID] != nil {
		return
	}
	refuse := func(reason string) {
		a := e.emit(Complete)
		a.Worker = w
		a.Completion = connector.Completion{Lease: x.Lease, Received: true, Status: StatusRefused, Reason: reason}
	}
	team, err := teamOf(w, &x)
	if err != nil {
		refuse(err.Error())
		return
	}
	var full string
	switch {
	case e.draining:
		full = "the sidecar is draining"
	case len(e.dests) >= e.cfg.MaxDest || e.dests[x.Lease] != nil:
		full = fmt.Sprintf("%d destination leases are open: at most %d", len(e.dests), e.cfg.MaxDest)
	}
	if full != "" {
		e.decline(now, x.Peer, &x, team, w.Place.World(), 0, full, false)
		refuse(full)
		return
	}
	if why := e.unreachable(now, x.Peer); why != "" {
		refuse(why)
		return
	}
	plan, err := e.cfg.Planner.Receive(w, &x)
	if err != nil {
		e.decline(now, x.Peer, &x, team, w.Place.World(), 0, "plan: "+err.Error(), true)
		refuse(err.Error())
		return
	}
	d := &dest{ws: ws, x: &x, plan: plan, team: team, began: now, partner: x.Partner}
	if d.partner <= 0 {
		d.partner = e.cfg.Partner
	}
	d.ID, d.Key = x.Lease, x.Key
	d.Deadline = now + e.span(x.Deadline)
	d.Partner = now + d.partner
	d.t = newTimer(func(now Instant) { e.destDue(now, d) })
	e.agenda.arm(d.t, min(d.Deadline, d.Partner))
	ws.dests[x.Lease.ID] = d
	e.dests[x.Lease] = d
	d.ep = e.endpoint(x.Peer)
	d.ep.refs++
	e.grant(now, d)
	e.assign(now)
}

func (e *Exec) span(d time.Duration) time.Duration {
	if d <= 0 {
		return e.cfg.Deadline
	}
	return min(d, MaxDeadline)
}

// teamDomain keeps the hash apart from others.
const teamDomain = "kvspray-team-v1"

// teamOf names the receivers of a request: every rank of the engine finds the same name, and no other request does.
func teamOf(w *connector.Worker, x *connector.Expect) (id lease.TeamID, err error) {
	if w.Place.World() > 1 {
		if x.Req == "" {
			return id, fmt.Errorf("the engine has %d ranks, and the request has no id by which theirs can be told: send req", w.Place.World())
		}
		return teamNamed("%q %q", w.Place.Engine, x.Req), nil
	}
	return teamNamed("%x %d", x.Lease.Boot, x.Lease.ID), nil // not the epoch, for the lease may be presented again
}

func teamNamed(format string, a ...any) (id lease.TeamID) {
	h := sha256.New()
	_, _ = fmt.Fprintf(h, teamDomain+format, a...) // a hash takes everything
	copy(id[:], h.Sum(nil))
	return id
}

func (e *Exec) destDue(now Instant, d *dest) {
	switch {
	case now >= d.Deadline:
		e.closeDestBy(now, d, e.timeOut(d), StatusExpired, withTrouble("the deadline passed", d.trouble))
	case now >= d.Partner:
		e.closeDestBy(now, d, e.timeOut(d), StatusExpired, withTrouble(fmt.Sprintf("no partner came within %v", d.partner), d.trouble))
	default:
		e.agenda.arm(d.t, min(d.Deadline, d.Partner))
	}
}

// timeOut says why nothing came in time.
func (e *Exec) timeOut(d *dest) Cause {
	if p := e.peers[d.Peer]; d.live != nil && (p == nil || !p.up) {
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

// closeDest ends a destination lease; the first verdict stands. What was granted is fenced before the engine hears of it.
func (e *Exec) closeDest(now Instant, d *dest, status uint16, reason string) {
	e.closeDestBy(now, d, causeOf(status), status, reason)
}

// closeDestBy is closeDest where the verdict does not say what started the fence.
func (e *Exec) closeDestBy(now Instant, d *dest, cause Cause, status uint16, reason string) {
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
		e.decline(now, d.ep.addr, d.x, d.team, d.ws.w.Place.World(), d.gen, reason, status == StatusRefused)
		e.completeDest(now, d)
		return
	}
	// From here on the fence alone decides when the lease ends.
	e.agenda.disarm(d.t)
	if fence {
		e.fence(d.live, cause)
	}
	if status != StatusOK {
		e.send(d.Peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{Revoke: &peerv1.Revoke{
			Destination: leaseMsg(d.ID), Gen: d.live.gen, Reason: reason}}})
	}
}

// regrant fences the live grant; when that is done the blocks are offered again.
func (e *Exec) regrant(now Instant, d *dest, cause Cause, why string) {
	d.trouble = why
	if d.Grants > e.cfg.MaxRegrants {
		e.closeDestBy(now, d, cause, StatusFailed, fmt.Sprintf("granted %d times; last: %s", d.Grants, why))
		return
	}
	if fence, err := d.Close(false); err == nil && fence {
		e.fence(d.live, cause)
	}
}

// fence closes every part of a grant to writers.
func (e *Exec) fence(o *offer, cause Cause) {
	o.cause = cause
	for _, l := range o.lands {
		e.fencePart(l)
	}
}

func (e *Exec) fencePart(l *Landing) {
	a := e.emit(Fence)
	a.Landing, a.Cause = l, l.offer.cause
}

// Full says that every chunk of a landing is in place.
func (e *Exec) Full(now Instant, l *Landing) {
	o := l.offer
	if o.dest.live != o || l.full {
		return
	}
	l.full = true
	if o.unfilled--; o.unfilled > 0 {
		return
	}
	o.dest.filled = now
	e.tryCommit(now, o.dest)
	e.assign(now)
}

// tryCommit closes the lease to writers once the bitmap of every part is full and its source lease known.
func (e *Exec) tryCommit(now Instant, d *dest) {
	if d.live != nil && d.live.unfilled == 0 && d.State == lease.DestLanding {
		e.closeDest(now, d, StatusOK, "")
	}
}

// FenceDone is the acknowledgement of every backend that nothing can be written through l any more, or the failure of one. A
// failed fence is tried again, and the blocks stay where they are.
func (e *Exec) FenceDone(now Instant, l *Landing, err error) {
	if l.fenced {
		return
	}
	o := l.offer
	d := o.dest
	if err != nil {
		d.trouble = "fence: " + err.Error()
		e.agenda.arm(newTimer(func(Instant) { e.fencePart(l) }), now+e.cfg.Grace)
		return
	}
	l.fenced = true
	e.emit(Forget).Landing = l
	// The landing was granted once and is fenced once: neither call can fail.
	_ = e.slots.Fenced(l.Grant.Peer, l.Grant.Slot, l.Grant.Gen)
	if o.unfenced--; o.unfenced > 0 {
		return
	}
	e.charge(o, false)
	if d.live != o || d.Fenced() != nil {
		return
	}
	d.live = nil
	if d.State == lease.DestFenced {
		e.completeDest(now, d)
	} else {
		d.Partner = now + d.partner
		e.agenda.arm(d.t, min(d.Deadline, d.Partner))
		e.grant(now, d)
	}
	e.assign(now)
}

func (e *Exec) completeDest(now Instant, d *dest) {
	if d.Complete() != nil {
		return
	}
	e.agenda.disarm(d.t)
	delete(d.ws.dests, d.ID.ID)
	delete(e.dests, d.ID)
	e.ungranted(d)
	delete(d.ep.waiting, d)
	var bytes uint64 // not those of d's own plan: of a window's first block the source may have less
	a := e.emit(Complete)
	a.Worker = d.ws.w
	var sources []*peerv1.Lease
	if d.last != nil {
		a.Landings = d.last.lands
		for _, l := range d.last.lands {
			bytes += l.Plan.Space().TotalBytes()
			if l.bound {
				sources = append(sources, leaseMsg(l.source))
			}
		}
	}
	a.Completion = connector.Completion{Lease: d.ID, Received: true, Status: d.status, Took: now - d.began, Reason: d.reason}
	a.Trace = &Trace{Key: d.Key, Req: d.x.Req, Source: d.Source, Dest: d.ID, Peer: d.Peer, Slot: d.Slot, Gen: d.Gen, Grants: d.Grants,
		Parts: len(a.Landings)}
	switch {
	case d.filled > 0 && d.claimed:
		from := min(d.bound, d.filled)
		a.Trace.Queue, a.Trace.Wire, a.Trace.Commit = from-d.began, d.filled-from, now-d.filled
	case d.claimed:
		a.Trace.Queue, a.Trace.Wire = d.bound-d.began, now-d.bound
	default:
		a.Trace.Queue = now - d.began
	}
	if d.status == StatusOK {
		a.Completion.Bytes = bytes
		e.send(d.Peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Commit{Commit: &peerv1.Commit{
			Destination: leaseMsg(d.ID), Source: sources, Bytes: bytes}}})
	}
	d.ep.refs--
	e.dropEndpoint(d.ep)
	e.workerIdle(d.ws)
}
