package exec

import (
	"fmt"
	"maps"
	"slices"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// A receiver that cannot plan, or is canceled before its grant, declines: else the source's engine
// would keep its blocks for the match timeout.

// decline cancels one receiver before it has a lease: its place at each rank of our engine stays
// empty.
type decline struct {
	id     lease.GrantID
	team   lease.TeamID
	size   int
	why    string
	engine string
	world  int             // its ranks; 0: none of its intents has come
	told   map[string]bool // ranks whose place is free
}

// declined is a destination lease that will not take its transfer.
type declined struct {
	id     transfer.LeaseID
	key    transfer.Key
	team   lease.TeamID
	size   int    // ranks of the team
	gen    uint32 // of the grant; 0: there was none
	reason string
	// far: the source's sidecar is dialed if there is no lane to it.
	far bool
}

// decline informs the source's sidecar at addr.
func (ds *dests) decline(now Instant, addr string, d declined) {
	f := &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{Revoke: &peerv1.Revoke{
		Destination: leaseMsg(d.id), Gen: d.gen, Reason: d.reason,
		Xfer: d.key.Xfer[:], Hash: d.key.Hash[:], Team: d.team[:], TeamSize: uint32(d.size)}}}
	ep := ds.endpoints.get(addr)
	switch {
	case ep.reached():
		ds.send(ep.peer.boot, f)
	case d.far && len(ep.queuedRevokes) < maxQueuedRevokes:
		ep.queuedRevokes = append(ep.queuedRevokes, f)
		ds.endpoints.reach(now, ep)
	}
	ds.endpoints.drop(ep)
}

// declineAll is Exec.Decline.
func (ds *dests) declineAll(now Instant, d engines.Decline) {
	if d.World < 1 || d.World > lease.MaxTeam {
		return
	}
	// The boot id is the engine scheduler's, so no rank's lease has such an id.
	id := transfer.LeaseID{Boot: d.Boot, ID: d.ID * lease.MaxTeam, Epoch: 1}
	team := teamNamed("%x %d", id.Boot, id.ID)
	for range d.World {
		ds.decline(now, d.Peer, declined{id: id, key: d.Key, team: team, size: d.World,
			reason: d.Reason, far: true})
		id.ID++
	}

}

// onDecline takes a decline: a Revoke of a lease that has no grant here.
func (mt *matcher) onDecline(now Instant, p *peer, g lease.GrantID, m *peerv1.Revoke) error {
	if len(m.Xfer) == 0 {
		return nil // of a grant that is over
	}
	k, err := key(m.Xfer, m.Hash)
	if err != nil {
		return fmt.Errorf("revoke %s: %w", g.Dest, err)
	}
	if err := checkTeam(m.Team, m.TeamSize); err != nil {
		return fmt.Errorf("revoke %s: %w", g.Dest, err)
	}
	why := gaveUp + m.Reason
	if old := mt.absents[engineLease{g.Dest.Boot, g.Dest.ID}]; old != nil && old.key == k {
		mt.endInbound(now, old, false, why)
		return nil
	}
	q := &pending{peer: p, key: k, decline: &decline{id: g, team: lease.TeamID(m.Team),
		size: int(m.TeamSize), why: why, told: map[string]bool{}}}
	if !mt.settleDecline(now, q) {
		mt.wait(now, q, 0)
	}
	return nil
}

// whole reports whether a key stands for every prompt of its transfer: no prompt has a hash of
// zeros.
func whole(k transfer.Key) bool { return k.Hash == transfer.PrefixHash{} }

// settleWhole frees a place at every source lease of a transfer. The decline stays: other prompts
// of the transfer may follow.
func (mt *matcher) settleWhole(now Instant, q *pending) {
	d := q.decline
	for _, k := range keysInOrder(maps.Keys(mt.sources.byKey), q.key.Xfer) {
		for _, s := range slices.Clone(mt.sources.byKey[k]) {
			if !s.Over(d.id) && s.Bind(d.id, d.team, d.size) == nil {
				s.trouble = d.why
				mt.sources.served(now, s, s.End(d.id, false), d.why)
			}
		}
	}
}

// settleDecline frees the receiver's place on every rank that has come. It returns false while
// other ranks may come.
func (mt *matcher) settleDecline(now Instant, q *pending) bool {
	d := q.decline
	if whole(q.key) {
		mt.settleWhole(now, q)
		return false
	}
	for _, s := range slices.Clone(mt.sources.byKey[q.key]) {
		at := s.ws.w.Place
		switch {
		case d.world > 0 && d.engine != at.Engine || d.told[at.Rank()]:
			continue
		case s.Over(d.id): // its place is free already
		case s.Bind(d.id, d.team, d.size) != nil:
			continue // of another request
		default:
			s.trouble = d.why
			mt.sources.served(now, s, s.End(d.id, false), d.why)
		}
		d.engine, d.world = at.Engine, at.World()
		d.told[at.Rank()] = true
	}
	return d.world > 0 && len(d.told) >= d.world
}
