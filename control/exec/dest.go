package exec

import (
	"fmt"
	"sort"
	"strings"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/lease"
)

// dest is a destination lease with what the executor adds to it.
type dest struct {
	lease.Dest
	ws      *worker
	x       *connector.Expect
	plan    Plan
	ep      *endpoint
	land    *Landing // of the live grant
	last    *Landing
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
	switch {
	case e.draining:
		refuse("the sidecar is draining")
		return
	case len(e.dests) >= e.cfg.MaxDest || e.dests[x.Lease] != nil:
		refuse(fmt.Sprintf("%d destination leases are open: at most %d", len(e.dests), e.cfg.MaxDest))
		return
	}
	plan, err := e.cfg.Planner.Receive(w, &x)
	if err != nil {
		refuse(err.Error())
		return
	}
	d := &dest{ws: ws, x: &x, plan: plan, began: now, partner: x.Partner}
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

// grant offers the blocks of d to its source's sidecar, or waits for that one to be reached.
func (e *Exec) grant(now Instant, d *dest) {
	if d.State != lease.DestWaiting {
		return
	}
	p := d.ep.peer
	if p == nil {
		d.ep.waiting[d] = struct{}{}
		e.reach(d.ep)
		return
	}
	slot, gen, err := e.slots.Alloc(p.boot)
	if err == nil {
		err = d.Dest.Grant(p.boot, slot, gen)
	}
	if err != nil {
		e.closeDest(now, d, StatusFailed, err.Error())
		return
	}
	l := &Landing{Worker: d.ws.w, Expect: d.x, Plan: d.plan, dest: d}
	l.Grant.Peer, l.Grant.Slot, l.Grant.Gen = p.boot, slot, gen
	d.land, d.last = l, l
	sp := d.plan.Space()
	if sp.NumChunks() == 0 {
		l.full, d.filled = true, now
	}
	a := e.emit(Offer)
	a.Peer, a.Landing = p.boot, l
	a.Frame = &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Grant{Grant: &peerv1.Grant{
		Xfer: d.Key.Xfer[:], Hash: d.Key.Hash[:], Destination: leaseMsg(d.ID), Slot: uint32(slot), Gen: uint32(gen),
		Tokens: d.x.Tokens, Skip: d.x.Skip, Fingerprint: d.ws.w.Fingerprint[:], Geometry: d.ws.w.Geometry[:],
		Chunks: sp.NumChunks(), Bytes: sp.TotalBytes(), Priority: uint32(d.x.Priority),
		DeadlineMs: millis(d.Deadline - now), PartnerMs: millis(d.Partner - now), Integrity: e.cfg.Integrity,
	}}}
}

func (e *Exec) destDue(now Instant, d *dest) {
	switch {
	case now >= d.Deadline:
		e.closeDest(now, d, StatusExpired, withTrouble("the deadline passed", d.trouble))
	case now >= d.Partner:
		e.closeDest(now, d, StatusExpired, withTrouble(fmt.Sprintf("no partner came within %v", d.partner), d.trouble))
	default:
		e.agenda.arm(d.t, min(d.Deadline, d.Partner))
	}
}

func withTrouble(reason, trouble string) string {
	if trouble == "" {
		return reason
	}
	return reason + "; last: " + trouble
}

// closeDest ends a destination lease; the first verdict stands. What was granted is fenced before the engine hears of it.
func (e *Exec) closeDest(now Instant, d *dest, status uint16, reason string) {
	if d.decided {
		return
	}
	d.decided, d.status, d.reason = true, status, reason
	delete(d.ep.waiting, d)
	fence, err := d.Close(true)
	if err != nil {
		return
	}
	if d.State == lease.DestFenced {
		e.completeDest(now, d)
		return
	}
	// From here on the fence alone decides when the lease ends.
	e.agenda.disarm(d.t)
	if fence {
		e.fence(d.land)
	}
	if status != StatusOK {
		e.send(d.Peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{Revoke: &peerv1.Revoke{
			Destination: leaseMsg(d.ID), Slot: uint32(d.Slot), Gen: uint32(d.Gen), Reason: reason}}})
	}
}

// regrant fences the live grant; when that is done the blocks are offered again.
func (e *Exec) regrant(now Instant, d *dest, why string) {
	d.trouble = why
	if d.Grants > e.cfg.MaxRegrants {
		e.closeDest(now, d, StatusFailed, fmt.Sprintf("granted %d times; last: %s", d.Grants, why))
		return
	}
	if fence, err := d.Close(false); err == nil && fence {
		e.fence(d.land)
	}
}

func (e *Exec) fence(l *Landing) {
	a := e.emit(Fence)
	a.Landing, a.Status = l, StatusFailed
	if l.dest.decided {
		a.Status = l.dest.status
	}
}

// Full says that every chunk of a landing is in place.
func (e *Exec) Full(now Instant, l *Landing) {
	d := l.dest
	if d.land != l || l.full {
		return
	}
	l.full, d.filled = true, now
	e.tryCommit(now, d)
	e.assign(now)
}

// tryCommit closes the lease to writers once the bitmap is full and both leases are known.
func (e *Exec) tryCommit(now Instant, d *dest) {
	if d.land != nil && d.land.full && d.State == lease.DestLanding {
		e.closeDest(now, d, StatusOK, "")
	}
}

// FenceDone is the acknowledgement of every backend that nothing can be written through l any more, or the failure of one. A
// failed fence is tried again, and the blocks stay where they are.
func (e *Exec) FenceDone(now Instant, l *Landing, err error) {
	if l.fenced {
		return
	}
	d := l.dest
	if err != nil {
		d.trouble = "fence: " + err.Error()
		e.agenda.arm(newTimer(func(Instant) { e.fence(l) }), now+e.cfg.Grace)
		return
	}
	l.fenced = true
	e.emit(Forget).Landing = l
	// The landing was granted once and is fenced once: neither call can fail.
	_ = e.slots.Fenced(l.Grant.Peer, l.Grant.Slot, l.Grant.Gen)
	if d.land != l || d.Fenced() != nil {
		return
	}
	d.land = nil
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
	delete(d.ep.waiting, d)
	bytes := d.plan.Space().TotalBytes()
	a := e.emit(Complete)
	a.Worker, a.Landing = d.ws.w, d.last
	a.Completion = connector.Completion{Lease: d.ID, Received: true, Status: d.status, Took: now - d.began, Reason: d.reason}
	a.Trace = &Trace{Key: d.Key, Req: d.x.Req, Source: d.Source, Dest: d.ID, Peer: d.Peer, Slot: d.Slot, Gen: d.Gen, Grants: d.Grants}
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
			Destination: leaseMsg(d.ID), Source: leaseMsg(d.Source), Bytes: bytes}}})
	}
	d.ep.refs--
	e.dropEndpoint(d.ep)
	e.workerIdle(d.ws)
}

// destOf finds the lease that a message of p speaks of; nil if it is over, or granted to somebody else.
func (e *Exec) destOf(p *peer, l *peerv1.Lease) (*dest, error) {
	id, err := leaseID(l)
	if err != nil {
		return nil, err
	}
	d := e.dests[id]
	if d == nil || d.Peer != p.boot || d.State == lease.DestWaiting {
		return nil, nil
	}
	return d, nil
}

func (e *Exec) onGrantReply(now Instant, p *peer, m *peerv1.GrantReply) error {
	d, err := e.destOf(p, m.Destination)
	if d == nil || d.State != lease.DestGranted {
		return err
	}
	switch m.Code {
	case peerv1.GrantReply_BOUND:
		src, err := leaseID(m.Source)
		if err != nil {
			return err
		}
		if err := d.Bind(src); err != nil {
			return err
		}
		d.bound, d.claimed = now, true
		e.agenda.arm(d.t, d.Deadline)
		e.tryCommit(now, d)
	case peerv1.GrantReply_NO_PARTNER:
		e.closeDest(now, d, StatusExpired, "no partner: "+m.Message)
	case peerv1.GrantReply_MISMATCH, peerv1.GrantReply_PLAN:
		e.closeDest(now, d, StatusRefused, codeName(m.Code)+": "+m.Message)
	case peerv1.GrantReply_FINGERPRINT:
		reason := "fingerprint: " + m.Message
		if diff := differing(m.Identity, d.ws.w.Layout.Identity); diff != "" {
			reason = "fingerprint: prefill and decode differ in " + diff
		}
		e.closeDest(now, d, StatusRefused, reason)
	default:
		e.closeDest(now, d, StatusFailed, codeName(m.Code)+": "+m.Message)
	}
	return nil
}

func codeName(c peerv1.GrantReply_Code) string { return strings.ToLower(c.String()) }

// maxDiffering bounds the fields that a refusal names.
const maxDiffering = 8

func differing(source, dest map[string]string) string {
	if len(source) == 0 {
		return ""
	}
	var out []string
	for k, v := range source {
		if w, ok := dest[k]; !ok || v != w {
			out = append(out, fmt.Sprintf("%s (%q and %q)", k, v, w))
		}
	}
	for k, w := range dest {
		if _, ok := source[k]; !ok {
			out = append(out, fmt.Sprintf("%s (absent and %q)", k, w))
		}
	}
	sort.Strings(out)
	if len(out) > maxDiffering {
		out = append(out[:maxDiffering], "...")
	}
	return strings.Join(out, ", ")
}

func (e *Exec) onSourceLost(now Instant, p *peer, m *peerv1.SourceLost) error {
	d, err := e.destOf(p, m.Destination)
	if d == nil || d.decided {
		return err
	}
	if m.Final {
		e.closeDest(now, d, StatusFailed, "source lost: "+m.Reason)
		return nil
	}
	if d.State != lease.DestClosing {
		e.regrant(now, d, "source lost: "+m.Reason)
	}
	return nil
}
