package dest

import (
	"errors"
	"fmt"
	"slices"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/agreement"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/layouts"
	"github.com/kvspray/kvspray/control/lease"
)

// outboundGrant is one grant of a destination lease: the parts that send something.
type outboundGrant struct {
	dest     *Lease
	gen      uint32
	parts    []*Part
	unbound  int
	unfilled int
	unfenced int
	cause    lease.Cause // of its fence
}

// divide plans the part of each rank of the source's engine. Until that engine's ranks are known
// they are assumed to equal ours; if that is wrong, its sidecar replies with its ranks.
func (ds *Table) divide(d *Lease, p *lanes.Peer) ([]agreement.Part, error) {
	at := ds.Engines.of(p)
	ranks := d.reported(p)
	if ranks == nil {
		ranks = at.ranks[d.ws.Fingerprint]
	}
	place := d.ws.Place
	own := agreement.Rank{Name: place.Rank(), Geometry: d.ws.Geometry}
	names := place.Ranks()
	if d.ws.Internal || ranks == nil ||
		len(ranks) == len(names) && slices.Contains(ranks, own) {
		parts := make([]agreement.Part, len(names))
		for i, name := range names {
			if parts[i].Name = name; name == own.Name {
				parts[i].Geometry, parts[i].Plan = own.Geometry, d.plan
			}
		}
		return parts, nil
	}
	parts, err := ds.Cfg.Planner.Divide(d.ws.Worker, d.x, ranks,
		func(rank string) uint64 { return at.load[rank] })
	if err != nil {
		return nil, err
	}
	var bytes uint64
	for i := range parts {
		if parts[i].Plan != nil {
			bytes += parts[i].Plan.Space().TotalBytes() + parts[i].Lacks
		}
	}
	if want := d.plan.Space().TotalBytes(); len(parts) != len(ranks) || bytes != want {
		return nil, fmt.Errorf("the %d ranks of the prefill engine would give %d bytes of %d", len(parts),
			bytes, want)
	}
	return parts, nil
}

// reported returns the ranks that p has reported for d; nil: none.
func (d *Lease) reported(p *lanes.Peer) []agreement.Rank {
	if d.ranksOf != p.Boot {
		return nil
	}
	return d.ranks
}

// grant offers the blocks of d to the source's sidecar, or waits for the connection to it.
func (ds *Table) grant(now Instant, d *Lease) {
	if d.State != lease.DestWaiting {
		return
	}
	if !d.ep.Reached() {
		ds.wait(d)
		ds.endpoints.Reach(now, d.ep)
		return
	}
	p := d.ep.Peer()
	parts, err := ds.divide(d, p)
	if unknown := (*agreement.UnknownLayout)(nil); err != nil && d.reported(p) == nil &&
		!errors.As(err, &unknown) {
		// The known ranks may be those of another engine there: plan without them.
		ds.Engines.SetRanks(p, d.ws.Fingerprint, nil)
		parts, err = ds.divide(d, p)
	}
	if unknown := (*agreement.UnknownLayout)(nil); errors.As(err, &unknown) {
		for _, g := range unknown.Geometries {
			if name := (layouts.Name{Boot: p.Boot, Geometry: g}); ds.layouts.Ask(now, name) {
				ds.describing.Add(name, d)
			}
		}
		return
	}
	if err != nil {
		ds.Close(now, d, engines.StatusRefused, "plan: "+err.Error())
		return
	}
	o := &outboundGrant{dest: d}
	msg := &peerv1.Grant{
		Xfer: d.Key.Xfer[:], Hash: d.Key.Hash[:], Destination: frame.Lease(d.ID), Tokens: d.x.Tokens,
		Skip:        d.x.Skip,
		Fingerprint: d.ws.Fingerprint[:], Geometry: d.ws.Geometry[:], Priority: uint32(d.x.Priority),
		DeadlineMs: frame.Millis(d.Deadline - now), MatchTimeoutMs: frame.Millis(d.MatchBy - now),
		Team: d.team[:], TeamSize: uint32(d.ws.Place.World()), Parts: make([]*peerv1.Part, len(parts)),
		Distances:   ds.rails.DistancesOf(d.ws.Worker, &d.ws.Distances),
		PlanVersion: ds.Cfg.Planner.Version(),
	}
	if t := d.x.Trace.ForPeer(); t != "" {
		msg.Traceparent = []byte(t)
	}
	for i := range parts {
		q := &parts[i]
		msg.Parts[i] = &peerv1.Part{Rank: q.Name}
		if q.Plan == nil {
			continue
		}
		l := &Part{Worker: d.ws.Worker, Expect: d.x, Plan: q.Plan, Part: msg.Parts[i], offer: o}
		slot, gen, err := ds.slots.Alloc(p.Boot)
		if err != nil {
			for _, l := range o.parts { // they were not sent
				_ = ds.slots.Fenced(p.Boot, l.Grant.Slot, l.Grant.Gen)
			}
			ds.Close(now, d, engines.StatusFailed, err.Error())
			return
		}
		l.Grant.Peer, l.Grant.Slot, l.Grant.Gen = p.Boot, slot, gen
		sp := q.Plan.Space()
		l.Part.Geometry, l.Part.Slot, l.Part.Gen, l.Part.Share = q.Geometry[:], uint32(slot),
			uint32(gen), q.Share
		l.Part.Chunks, l.Part.Bytes = sp.NumChunks(), sp.TotalBytes()
		digest := q.Plan.Digest()
		l.Part.Digest = digest[:]
		l.full = sp.NumChunks() == 0
		o.parts = append(o.parts, l)
		if !l.full {
			o.unfilled++
		}
	}
	if len(o.parts) == 0 {
		ds.Close(now, d, engines.StatusRefused, "plan: no rank of the prefill engine gives anything")
		return
	}
	first := &o.parts[0].Grant
	if err := d.Dest.Grant(p.Boot, first.Slot, first.Gen); err != nil {
		ds.Close(now, d, engines.StatusFailed, err.Error())
		return
	}
	ds.granted(d)
	o.unbound, o.unfenced = len(o.parts), len(o.parts)
	d.live, d.last, d.filled = o, o, 0
	if o.unfilled == 0 {
		d.filled = now
	}
	ds.Engines.charge(p, o, true)
	if ds.Generation++; ds.Generation == 0 {
		ds.Generation = 1
	}
	o.gen, msg.Gen, d.gen = ds.Generation, ds.Generation, ds.Generation
	ds.out.Offer(p.Boot, o.parts, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Grant{Grant: msg}})
}

// of returns the lease that a message of p names; nil if it is over, or granted to another peer.
func (ds *Table) of(p *lanes.Peer, l *peerv1.Lease) (*Lease, error) {
	id, err := frame.LeaseID(l)
	if err != nil {
		return nil, err
	}
	d := ds.byID[id]
	if d == nil || d.Peer != p.Boot || d.State == lease.DestWaiting {
		return nil, nil
	}
	return d, nil
}

func (ds *Table) OnGrantReply(now Instant, p *lanes.Peer, m *peerv1.GrantReply) error {
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
		ranks, err := frame.Ranks(m)
		if err != nil {
			ds.Close(now, d, engines.StatusFailed, "the ranks of the prefill engine: "+err.Error())
			return err
		}
		ds.Engines.SetRanks(p, d.ws.Fingerprint, ranks)
		d.ranks, d.ranksOf = ranks, p.Boot
		ds.regrant(now, d, lease.ByRefusal, "ranks: "+m.Message)
	// A refusal may follow the last BOUND: ranks that send nothing can refuse, too.
	case peerv1.GrantReply_NO_SOURCE:
		ds.Close(now, d, engines.StatusExpired, "no source: "+m.Message)
	case peerv1.GrantReply_MISMATCH, peerv1.GrantReply_FINGERPRINT, peerv1.GrantReply_PLAN:
		ds.Close(now, d, engines.StatusRefused, frame.CodeName(m.Code)+": "+m.Message)
	default:
		ds.Close(now, d, engines.StatusFailed, frame.CodeName(m.Code)+": "+m.Message)
	}
	return nil
}

// partBound records the source lease of one part. The destination lease is bound with the last of
// them.
func (ds *Table) partBound(now Instant, p *lanes.Peer, d *Lease, m *peerv1.GrantReply) error {
	src, err := frame.LeaseID(m.Source)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(d.live.parts, func(l *Part) bool { return l.Part.Rank == m.Rank })
	if i < 0 || d.live.parts[i].bound {
		return frame.Wrong(frame.BadRank, "grant %s: rank %.80q is bound: it gives nothing, or was "+
			"bound before",
			d.ID, m.Rank)
	}
	l := d.live.parts[i]
	l.bound, l.source = true, src
	if d.live.unbound--; d.live.unbound > 0 {
		return nil
	}
	if err := d.Bind(d.live.parts[0].source); err != nil {
		return err
	}
	d.bound, d.everBound = now, true
	if !p.Up() {
		d.MatchBy = now + d.matchTimeout // the reply was sent before the peer became unreachable
	}
	ds.Agenda.Arm(d.t, min(d.Deadline, d.MatchBy))
	ds.tryCommit(now, d)
	return nil
}

func (ds *Table) OnSourceLost(now Instant, p *lanes.Peer, m *peerv1.SourceLost) error {
	d, err := ds.of(p, m.Destination)
	if d == nil || d.decided {
		return err
	}
	if d.live == nil || m.Gen != d.live.gen {
		return nil // of a grant that is over
	}
	if m.Final {
		ds.Close(now, d, engines.StatusFailed, "source lost: "+m.Reason)
		return nil
	}
	if d.State != lease.DestClosing {
		ds.regrant(now, d, lease.BySourceLost, "source lost: "+m.Reason)
	}
	return nil
}
