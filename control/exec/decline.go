package exec

import (
	"fmt"
	"maps"
	"slices"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// A receiver that cannot plan, or is cancelled while nothing is granted, says so: else the source's engine would keep its blocks until it
// has waited long enough for a partner.

// decline is such a word: its place at each rank of our engine stays empty.
type decline struct {
	id     lease.GrantID
	team   lease.TeamID
	size   int
	why    string
	engine string
	world  int             // its ranks; 0: none of its intents has come
	told   map[string]bool // those that know
}

// decline tells the sidecar at an address that no grant will come for a lease. far: it is worth a connect.
func (ds *dests) decline(now Instant, addr string, x *connector.Expect, team lease.TeamID, size int, gen uint32, reason string, far bool) {
	ds.declineAs(now, addr, x.Lease, x.Key, team, size, gen, reason, far)
}

func (ds *dests) declineAs(now Instant, addr string, id transfer.LeaseID, k transfer.Key, team lease.TeamID, size int, gen uint32, reason string, far bool) {
	f := &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{Revoke: &peerv1.Revoke{Destination: leaseMsg(id), Gen: gen, Reason: reason,
		Xfer: k.Xfer[:], Hash: k.Hash[:], Team: team[:], TeamSize: uint32(size)}}}
	ep := ds.endpoints.get(addr)
	switch {
	case ep.reached():
		ds.send(ep.peer.boot, f)
	case far && len(ep.queuedRevokes) < maxQueuedRevokes:
		ep.queuedRevokes = append(ep.queuedRevokes, f)
		ds.endpoints.reach(now, ep)
	}
	ds.endpoints.drop(ep)
}

// Decline says that a whole engine gives up a request that none of its ranks has a lease for: its scheduler's one word stands for all of them, so
// that ranks need not be stepped for it. A word that gets lost costs the source's engine its patience with a missing partner. A hash of zeros
// stands for every prompt of the transfer.
func (ds *dests) declineAll(now Instant, d connector.Decline) {
	if d.World < 1 || d.World > lease.MaxTeam {
		return
	}
	// No rank's lease has such a name: the boot is the scheduler's.
	id := transfer.LeaseID{Boot: d.Boot, ID: d.ID * lease.MaxTeam, Epoch: 1}
	team := teamNamed("%x %d", id.Boot, id.ID)
	for range d.World {
		ds.declineAs(now, d.Peer, id, d.Key, team, d.World, 0, d.Reason, true)
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
	q := &pending{peer: p, key: k, decline: &decline{id: g, team: lease.TeamID(m.Team), size: int(m.TeamSize), why: why, told: map[string]bool{}}}
	if !mt.settleDecline(now, q) {
		mt.wait(now, q, 0)
	}
	return nil
}

// whole reports whether a key stands for every prompt of its transfer: no prompt has such a hash.
func whole(k transfer.Key) bool { return k.Hash == transfer.PrefixHash{} }

// settleWhole gives a place back at every source lease of a transfer. It waits on: other prompts of the transfer may come yet.
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

// settleDecline gives the place of the receiver back on every rank that has come. False: others may come yet.
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
		case s.Over(d.id): // it knows
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
