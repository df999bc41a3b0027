package dest

import (
	"encoding/binary"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// A receiver that cannot plan, or is canceled before its grant, declines: else the source's engine
// would keep its blocks for the match timeout.

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
func (ds *Table) decline(now Instant, addr string, d declined) {
	ds.queries.RequestOver(addr, d.key)
	f := &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{Revoke: &peerv1.Revoke{
		Destination: frame.Lease(d.id), Gen: d.gen, Reason: d.reason,
		Xfer: d.key.Xfer[:], Hash: d.key.Hash[:], Team: d.team[:], TeamSize: uint32(d.size)}}}
	ep := ds.endpoints.Get(addr)
	switch {
	case ep.Reached():
		ds.out.Send(ep.Peer().Boot, f)
	case d.far:
		ds.endpoints.Revoke(now, ep, f)
	}
	ds.endpoints.Drop(ep)
}

// Refused takes engines.DestRefused.
func (ds *Table) Refused(now Instant, w *engines.Worker, x engines.Expect, reason string) {
	if team, err := teamOf(w, &x); err == nil {
		ds.decline(now, x.Peer, declined{id: x.Lease, key: x.Key, team: team,
			size: w.Place.World(), reason: reason, far: true})
	}
}

// Decline takes engines.Declined.
func (ds *Table) Decline(now Instant, d engines.Decline) {
	if d.World < 1 || d.World > lease.MaxTeam {
		return
	}
	// The ranks that ask are of the same team: each place of it is taken once.
	team := TeamNamed("%q %q", d.Engine, d.Req)
	if d.Req == "" {
		team = TeamNamed("%x %d", d.Boot, d.ID)
	}
	ranks := d.Ranks
	if len(ranks) == 0 {
		for r := range d.World {
			ranks = append(ranks, uint32(r))
		}
	}
	for _, r := range ranks {
		// The boot id is the engine scheduler's, so no rank's lease has such an id. A rank that
		// declines the same request again has the same one.
		id := transfer.LeaseID{Boot: d.Boot, Epoch: 1,
			ID: binary.LittleEndian.Uint64(team[:])/lease.MaxTeam*lease.MaxTeam + uint64(r)}
		ds.decline(now, d.Peer, declined{id: id, key: d.Key, team: team, size: d.World,
			reason: d.Reason, far: true})
	}
}

// Unsent ends the lease of a grant that was not sent to a peer and never will be.
func (ds *Table) Unsent(now Instant, boot transfer.Boot, m *peerv1.Grant, err error) {
	id, bad := frame.LeaseID(m.Destination)
	if d := ds.byID[id]; bad == nil && d != nil && d.Peer == boot && d.live != nil &&
		d.live.gen == m.Gen {
		ds.closeUnsent(now, d,
			"the grant was not sent to the sidecar of the prefill engine: "+err.Error())
	}
}

// closeUnsent ends a lease whose last grant did not reach the source. The source does not have the
// grant, so a Revoke of it would mean nothing there; this one carries the key, and the source
// stops its wait.
func (ds *Table) closeUnsent(now Instant, d *Lease, why string) {
	if d.decided {
		return
	}
	d.decided, d.status, d.reason = true, engines.StatusFailed, why
	ds.endStall(d)
	fence, err := d.Close(true)
	if err != nil {
		return
	}
	ds.Agenda.Disarm(d.t)
	if fence {
		ds.fence(d.live, lease.ByRefusal)
	}
	ds.decline(now, d.ep.Addr(), declined{id: d.x.Lease, key: d.x.Key, team: d.team,
		size: d.ws.Place.World(), gen: d.live.gen, reason: why, far: true})
}
