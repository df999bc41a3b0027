package exec

import (
	"errors"
	"fmt"
	"slices"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/lease"
)

// outboundGrant is one grant of a destination lease: the parts that send something.
type outboundGrant struct {
	dest     *dest
	gen      uint32
	lands    []*ReceivePart
	unbound  int
	unfilled int
	unfenced int
	cause    Cause // of its fence
}

// divide plans the part of each rank of the source's engine. Until that engine's ranks are known
// they are assumed to equal ours; if that is wrong, its sidecar replies with its ranks.
func (ds *dests) divide(d *dest, p *peer) ([]Part, error) {
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
	parts, err := ds.cfg.Planner.Divide(d.ws.w, d.x, p.ranks,
		func(rank string) uint64 { return p.load[rank] })
	if err != nil {
		return nil, err
	}
	var bytes uint64
	for i := range parts {
		if parts[i].Plan != nil {
			bytes += parts[i].Plan.Space().TotalBytes() + parts[i].Lacks
		}
	}
	if want := d.plan.Space().TotalBytes(); len(parts) != len(p.ranks) || bytes != want {
		return nil, fmt.Errorf("the %d ranks of the prefill engine would give %d bytes of %d", len(parts),
			bytes, want)
	}
	return parts, nil
}

// grant offers the blocks of d to the source's sidecar, or waits for the connection to it.
func (ds *dests) grant(now Instant, d *dest) {
	if d.State != lease.DestWaiting {
		return
	}
	if !d.ep.reached() {
		d.ep.waiting[d] = struct{}{}
		ds.endpoints.reach(now, d.ep)
		return
	}
	p := d.ep.peer
	parts, err := ds.divide(d, p)
	if unknown := (*UnknownLayout)(nil); err != nil && !d.told && !errors.As(err, &unknown) {
		// The known ranks may be those of another engine there: plan without them.
		p.ranks = nil
		parts, err = ds.divide(d, p)
	}
	if unknown := (*UnknownLayout)(nil); errors.As(err, &unknown) {
		ds.layouts.describe(now, p, unknown, d, nil)
		return
	}
	if err != nil {
		ds.close(now, d, engines.StatusRefused, "plan: "+err.Error())
		return
	}
	o := &outboundGrant{dest: d}
	msg := &peerv1.Grant{
		Xfer: d.Key.Xfer[:], Hash: d.Key.Hash[:], Destination: leaseMsg(d.ID), Tokens: d.x.Tokens,
		Skip:        d.x.Skip,
		Fingerprint: d.ws.w.Fingerprint[:], Geometry: d.ws.w.Geometry[:], Priority: uint32(d.x.Priority),
		DeadlineMs: millis(d.Deadline - now), PartnerMs: millis(d.MatchBy - now),
		Team: d.team[:], TeamSize: uint32(d.ws.w.Place.World()), Parts: make([]*peerv1.Part, len(parts)),
		Tiers:       ds.rails.tiersOf(d.ws),
		PlanVersion: ds.cfg.Planner.Version(),
	}
	for i := range parts {
		q := &parts[i]
		msg.Parts[i] = &peerv1.Part{Rank: q.Name}
		if q.Plan == nil {
			continue
		}
		l := &ReceivePart{Worker: d.ws.w, Expect: d.x, Plan: q.Plan, Part: msg.Parts[i], offer: o}
		slot, gen, err := ds.slots.Alloc(p.boot)
		if err != nil {
			for _, l := range o.lands { // they were not sent
				_ = ds.slots.Fenced(p.boot, l.Grant.Slot, l.Grant.Gen)
			}
			ds.close(now, d, engines.StatusFailed, err.Error())
			return
		}
		l.Grant.Peer, l.Grant.Slot, l.Grant.Gen = p.boot, slot, gen
		sp := q.Plan.Space()
		l.Part.Geometry, l.Part.Slot, l.Part.Gen, l.Part.Share = q.Geometry[:], uint32(slot),
			uint32(gen), q.Share
		l.Part.Chunks, l.Part.Bytes = sp.NumChunks(), sp.TotalBytes()
		digest := q.Plan.Digest()
		l.Part.Digest = digest[:]
		l.full = sp.NumChunks() == 0
		o.lands = append(o.lands, l)
		if !l.full {
			o.unfilled++
		}
	}
	if len(o.lands) == 0 {
		ds.close(now, d, engines.StatusRefused, "plan: no rank of the prefill engine gives anything")
		return
	}
	first := &o.lands[0].Grant
	if err := d.Dest.Grant(p.boot, first.Slot, first.Gen); err != nil {
		ds.close(now, d, engines.StatusFailed, err.Error())
		return
	}
	ds.granted(d)
	o.unbound, o.unfenced = len(o.lands), len(o.lands)
	d.live, d.last, d.filled = o, o, 0
	if o.unfilled == 0 {
		d.filled = now
	}
	ds.charge(o, true)
	if ds.grants++; ds.grants == 0 {
		ds.grants = 1
	}
	o.gen, msg.Gen, d.gen = ds.grants, ds.grants, ds.grants
	a := ds.emit(Offer)
	a.Peer, a.ReceiveParts = p.boot, o.lands
	a.Frame = &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Grant{Grant: msg}}
}

// charge counts the bytes that each rank of a peer still owes us: the planner chooses between
// replicas by load.
func (ds *dests) charge(o *outboundGrant, on bool) {
	p := ds.peers.byBoot[o.lands[0].Grant.Peer]
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

// of returns the lease that a message of p names; nil if it is over, or granted to another peer.
func (ds *dests) of(p *peer, l *peerv1.Lease) (*dest, error) {
	id, err := leaseID(l)
	if err != nil {
		return nil, err
	}
	d := ds.byID[id]
	if d == nil || d.Peer != p.boot || d.State == lease.DestWaiting {
		return nil, nil
	}
	return d, nil
}

func (ds *dests) onGrantReply(now Instant, p *peer, m *peerv1.GrantReply) error {
	d, err := ds.of(p, m.Destination)
	if d == nil || d.State == lease.DestClosing || m.Gen != d.live.gen {
		return err
	}
	granted := d.State == lease.DestGranted
	switch m.Code {
	case peerv1.GrantReply_BOUND:
		if granted {
			return ds.partBound(now, p, d, m)
		}
	case peerv1.GrantReply_RANKS:
		if !granted {
			return nil
		}
		ranks, err := ranksOf(m)
		if err != nil {
			ds.close(now, d, engines.StatusFailed, "the ranks of the prefill engine: "+err.Error())
			return err
		}
		p.ranks, d.told = ranks, true
		ds.regrant(now, d, ByRefusal, "ranks: "+m.Message)
	// A refusal may follow the last BOUND: ranks that send nothing can refuse, too.
	case peerv1.GrantReply_NO_PARTNER:
		ds.close(now, d, engines.StatusExpired, "no partner: "+m.Message)
	case peerv1.GrantReply_MISMATCH, peerv1.GrantReply_FINGERPRINT, peerv1.GrantReply_PLAN:
		ds.close(now, d, engines.StatusRefused, codeName(m.Code)+": "+m.Message)
	default:
		ds.close(now, d, engines.StatusFailed, codeName(m.Code)+": "+m.Message)
	}
	return nil
}

// partBound records the source lease of one part. The destination lease is bound with the last of
// them.
func (ds *dests) partBound(now Instant, p *peer, d *dest, m *peerv1.GrantReply) error {
	src, err := leaseID(m.Source)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(d.live.lands, func(l *ReceivePart) bool { return l.Part.Rank == m.Rank })
	if i < 0 || d.live.lands[i].bound {
		return wrong(BadRank, "grant %s: rank %.80q is bound: it gives nothing, or was bound before",
			d.ID, m.Rank)
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
	if !p.up() {
		d.MatchBy = now + d.matchTimeout // the reply was sent before the peer became unreachable
	}
	ds.agenda.arm(d.t, min(d.Deadline, d.MatchBy))
	ds.tryCommit(now, d)
	return nil
}

func (ds *dests) onSourceLost(now Instant, p *peer, m *peerv1.SourceLost) error {
	d, err := ds.of(p, m.Destination)
	if d == nil || d.decided {
		return err
	}
	if d.live == nil || m.Gen != d.live.gen {
		return nil // of a grant that is over
	}
	if m.Final {
		ds.close(now, d, engines.StatusFailed, "source lost: "+m.Reason)
		return nil
	}
	if d.State != lease.DestClosing {
		ds.regrant(now, d, BySourceLost, "source lost: "+m.Reason)
	}
	return nil
}
