package exec

import (
	"slices"

	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
)

// Rail is a rail of one side with its current state.
type Rail struct {
	Transport string
	Name      string
	Down      bool // its link has no carrier
}

// maxRails bounds the known rails of one side. A control lane brings fewer, and the scheduler
// remembers more links.
const maxRails = 256

// rails are our own rails; those of a peer are at the peer.
type rails struct {
	*core
	peers    *peers
	dispatch *dispatcher
	own      map[railID]bool // whether the link is down
	version  int             // changes of own
}

// set is Exec.SetRails.
func (rs *rails) set(now Instant, rails []Rail) {
	rs.own = rs.change(now, nil, rs.own, rails)
	rs.version++
	for _, p := range rs.peers.inOrder() {
		rs.dispatch.touch(p)
	}

}

// setPeer is Exec.PeerRails.
func (rs *rails) setPeer(now Instant, boot transfer.Boot, rails []Rail) {
	p := rs.peers.byBoot[boot]
	if p == nil {
		return // it is gone
	}
	if len(rails) > maxRails {
		rs.peers.logViolation(p, BadRails, "%d rails: at most %d are kept, not %.64q and what follows",
			len(rails), maxRails, rails[maxRails].Name)
	}
	p.known = rs.change(now, p.rails, p.known, rails)
	rs.dispatch.touch(p)

}

func (rs *rails) change(now Instant, p *spray.Peer, old map[railID]bool,
	rails []Rail) map[railID]bool {
	rails = rails[:min(len(rails), maxRails)]
	known := make(map[railID]bool, len(rails))
	for _, r := range rails {
		id := railID{Transport: r.Transport, Name: r.Name}
		known[id] = r.Down
		switch {
		case r.Down && !old[id]:
			rs.spray.RailDown(now, p, id.Transport, id.Name)
		case !r.Down && old[id]:
			rs.spray.RailUp(now, p, id.Transport, id.Name)
		}
	}
	var gone []railID
	for id := range old {
		if _, ok := known[id]; !ok {
			gone = append(gone, id)
		}
	}
	slices.SortFunc(gone, railID.Compare)
	for _, id := range gone {
		// Its slices are free at once. Its lanes end, and a new lane over it starts on probation.
		rs.spray.RailDown(now, p, id.Transport, id.Name)
		rs.spray.RailUp(now, p, id.Transport, id.Name)
	}
	return known
}
