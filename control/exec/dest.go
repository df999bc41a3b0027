package exec

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
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
	team    lease.TeamID
	told    bool   // by the peer, for this lease, which ranks its engine has
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

// offer is one grant of a destination lease: its parts that give something.
type offer struct {
	dest     *dest
	gen      uint32
	lands    []*Landing
	unbound  int
	unfilled int
	unfenced int
	cause    Cause // of its fence
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
	if why := e.unreachable(now, x.Peer); why != "" {
		refuse(why)
		return
	}
	team, err := teamOf(w, &x)
	if err != nil {
		refuse(err.Error())
		return
	}
	plan, err := e.cfg.Planner.Receive(w, &x)
	if err != nil {
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
	h := sha256.New()
	h.Write([]byte(teamDomain))
	if w.Place.World() > 1 {
		if x.Req == "" {
			return id, fmt.Errorf("the engine has %d ranks, and the request has no id by which theirs can be told: send req", w.Place.World())
		}
		_, _ = fmt.Fprintf(h, "%q %q", w.Place.Engine, x.Req) // a hash takes everything
	} else {
		_, _ = fmt.Fprintf(h, "%x %d %d", x.Lease.Boot, x.Lease.ID, x.Lease.Epoch)
	}
	copy(id[:], h.Sum(nil))
	return id, nil
}

// divide says what each rank of the source's engine gives. As long as nothing else was heard, the engine there is taken to be as the
// one here, rank by rank; if that is wrong its sidecar says so, and which ranks there are.
func (e *Exec) divide(d *dest, p *peer) ([]Part, error) {
	place := d.ws.w.Place
	own := Rank{place.Rank(), d.ws.w.Geometry}
	names := place.Ranks()
	if p.ranks == nil || len(p.ranks) == len(names) && slices.Contains(p.ranks, own) {
		parts := make([]Part, len(names))
		for i, name := range names {
			if parts[i].Name = name; name == own.Name {
				parts[i].Geometry, parts[i].Plan = own.Geometry, d.plan
			}
		}
		return parts, nil
	}
	parts, err := e.cfg.Planner.Divide(d.ws.w, d.x, p.ranks, func(rank string) uint64 { return p.load[rank] })
	if err != nil {
		return nil, err
	}
	var bytes uint64
	for i := range parts {
		if parts[i].Plan != nil {
			bytes += parts[i].Plan.Space().TotalBytes()
		}
	}
	if want := d.plan.Space().TotalBytes(); len(parts) != len(p.ranks) || bytes != want {
		return nil, fmt.Errorf("the %d ranks of the prefill engine would give %d bytes of %d", len(parts), bytes, want)
	}
	return parts, nil
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
	parts, err := e.divide(d, p)
	if unknown := (*UnknownLayout)(nil); err != nil && !d.told && !errors.As(err, &unknown) {
		// The ranks are those of another engine there: ask as if nothing were known.
		p.ranks = nil
		parts, err = e.divide(d, p)
	}
	if unknown := (*UnknownLayout)(nil); errors.As(err, &unknown) {
		e.describe(p, unknown, d, nil)
		return
	}
	if err != nil {
		e.closeDest(now, d, StatusRefused, "plan: "+err.Error())
		return
	}
	o := &offer{dest: d}
	msg := &peerv1.Grant{
		Xfer: d.Key.Xfer[:], Hash: d.Key.Hash[:], Destination: leaseMsg(d.ID), Tokens: d.x.Tokens, Skip: d.x.Skip,
		Fingerprint: d.ws.w.Fingerprint[:], Geometry: d.ws.w.Geometry[:], Priority: uint32(d.x.Priority),
		DeadlineMs: millis(d.Deadline - now), PartnerMs: millis(d.Partner - now), Integrity: e.cfg.Integrity,
		Team: d.team[:], TeamSize: uint32(d.ws.w.Place.World()), Parts: make([]*peerv1.Part, len(parts)), Tiers: e.tiersOf(d.ws),
	}
	for i := range parts {
		q := &parts[i]
		msg.Parts[i] = &peerv1.Part{Rank: q.Name}
		if q.Plan == nil {
			continue
		}
		l := &Landing{Worker: d.ws.w, Expect: d.x, Plan: q.Plan, Part: msg.Parts[i], offer: o}
		slot, gen, err := e.slots.Alloc(p.boot)
		if err != nil {
			for _, l := range o.lands { // nobody has heard of them
				_ = e.slots.Fenced(p.boot, l.Grant.Slot, l.Grant.Gen)
			}
			e.closeDest(now, d, StatusFailed, err.Error())
			return
		}
		l.Grant.Peer, l.Grant.Slot, l.Grant.Gen = p.boot, slot, gen
		sp := q.Plan.Space()
		l.Part.Geometry, l.Part.Slot, l.Part.Gen, l.Part.Share = q.Geometry[:], uint32(slot), uint32(gen), q.Share
		l.Part.Chunks, l.Part.Bytes = sp.NumChunks(), sp.TotalBytes()
		l.full = sp.NumChunks() == 0
		o.lands = append(o.lands, l)
		o.gen = uint32(gen) // generations only grow, so the last part's is the grant's, too
		if !l.full {
			o.unfilled++
		}
	}
	if len(o.lands) == 0 {
		e.closeDest(now, d, StatusRefused, "plan: no rank of the prefill engine gives anything")
		return
	}
	first := &o.lands[0].Grant
	if err := d.Dest.Grant(p.boot, first.Slot, first.Gen); err != nil {
		e.closeDest(now, d, StatusFailed, err.Error())
		return
	}
	o.unbound, o.unfenced = len(o.lands), len(o.lands)
	d.live, d.last = o, o
	if o.unfilled == 0 {
		d.filled = now
	}
	e.charge(o, true)
	msg.Gen = o.gen
	a := e.emit(Offer)
	a.Peer, a.Landings = p.boot, o.lands
	a.Frame = &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Grant{Grant: msg}}
}

// charge counts what the ranks of a peer's engine owe us, so that replicas are chosen by load.
func (e *Exec) charge(o *offer, on bool) {
	p := e.peers[o.lands[0].Grant.Peer]
	if p == nil {
		return
	}
	for _, l := range o.lands {
		n := p.load[l.Part.Rank]
		if on {
			n += l.Part.Bytes
		} else {
			n -= min(n, l.Part.Bytes)
		}
		if p.load == nil {
			p.load = map[string]uint64{}
		}
		if p.load[l.Part.Rank] = n; n == 0 {
			delete(p.load, l.Part.Rank)
		}
	}
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
	delete(d.ep.waiting, d)
	bytes := d.plan.Space().TotalBytes()
	a := e.emit(Complete)
	a.Worker = d.ws.w
	var sources []*peerv1.Lease
	if d.last != nil {
		a.Landings = d.last.lands
		for _, l := range d.last.lands {
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
	if d == nil || d.State != lease.DestGranted || m.Gen != d.live.gen {
		return err
	}
	switch m.Code {
	case peerv1.GrantReply_BOUND:
		return e.partBound(now, d, m)
	case peerv1.GrantReply_RANKS:
		ranks, err := ranksOf(m)
		if err != nil {
			e.closeDest(now, d, StatusFailed, "the ranks of the prefill engine: "+err.Error())
			return err
		}
		p.ranks, d.told = ranks, true
		e.regrant(now, d, ByRefusal, "ranks: "+m.Message)
	case peerv1.GrantReply_NO_PARTNER:
		e.closeDest(now, d, StatusExpired, "no partner: "+m.Message)
	case peerv1.GrantReply_MISMATCH, peerv1.GrantReply_FINGERPRINT, peerv1.GrantReply_PLAN:
		e.closeDest(now, d, StatusRefused, codeName(m.Code)+": "+m.Message)
	default:
		e.closeDest(now, d, StatusFailed, codeName(m.Code)+": "+m.Message)
	}
	return nil
}

// partBound takes the source lease of one part. The lease is bound with the last of them.
func (e *Exec) partBound(now Instant, d *dest, m *peerv1.GrantReply) error {
	src, err := leaseID(m.Source)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(d.live.lands, func(l *Landing) bool { return l.Part.Rank == m.Rank })
	if i < 0 || d.live.lands[i].bound {
		return fmt.Errorf("grant %s: rank %.80q is bound: it gives nothing, or was bound before", d.ID, m.Rank)
	}
	l := d.live.lands[i]
	l.bound, l.source = true, src
	if d.live.unbound--; d.live.unbound > 0 {
		return nil
	}
	if err := d.Bind(d.live.lands[0].source); err != nil {
		return err
	}
	d.bound, d.claimed = now, true
	e.agenda.arm(d.t, d.Deadline)
	e.tryCommit(now, d)
	return nil
}

// ranksOf reads what a peer says of its engine.
func ranksOf(m *peerv1.GrantReply) ([]Rank, error) {
	if n := len(m.Ranks); n < 1 || n > MaxParts {
		return nil, fmt.Errorf("%d of them: want 1 to %d", n, MaxParts)
	}
	out := make([]Rank, 0, len(m.Ranks))
	for i, r := range m.Ranks {
		if r.GetRank() == "" || len(r.Rank) > maxRankBytes || len(r.Geometry) != 32 ||
			slices.ContainsFunc(out, func(o Rank) bool { return o.Name == r.Rank }) {
			return nil, fmt.Errorf("ranks[%d] = %.80q with a geometry of %d bytes: want each name once, in 1 to %d bytes, and 32", i, r.GetRank(),
				len(r.GetGeometry()), maxRankBytes)
		}
		out = append(out, Rank{r.Rank, [32]byte(r.Geometry)})
	}
	return out, nil
}

func codeName(c peerv1.GrantReply_Code) string { return strings.ToLower(c.String()) }

func (e *Exec) onSourceLost(now Instant, p *peer, m *peerv1.SourceLost) error {
	d, err := e.destOf(p, m.Destination)
	if d == nil || d.decided {
		return err
	}
	if d.live == nil || m.Gen != d.live.gen {
		return nil // of a grant that is over
	}
	if m.Final {
		e.closeDest(now, d, StatusFailed, "source lost: "+m.Reason)
		return nil
	}
	if d.State != lease.DestClosing {
		e.regrant(now, d, BySourceLost, "source lost: "+m.Reason)
	}
	return nil
}
