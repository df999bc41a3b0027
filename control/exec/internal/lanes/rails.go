package lanes

import (
	"slices"

	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
)

// Rail is a rail of one side with its current state.
type Rail struct {
	Transport string
	Name      string
	Down      bool // its link has no carrier
}

// MaxRails bounds the known rails of one side. A control lane brings fewer, and the scheduler
// remembers more links.
const MaxRails = 256

// Rails are our own rails; those of a peer are at the peer.
type Rails struct {
	*core.Core
	peers    *Peers
	dispatch *Dispatcher
	own      map[railID]bool // whether the link is down
	version  int             // changes of own
}

// NewRails returns the rails of a process; none are known yet.
func NewRails(c *core.Core, ps *Peers, dp *Dispatcher) *Rails {
	return &Rails{Core: c, peers: ps, dispatch: dp}
}

// Known counts our rails.
func (rs *Rails) Known() int { return len(rs.own) }

// Set is Exec.SetRails.
func (rs *Rails) Set(now Instant, rails []Rail) {
	rs.own = rs.change(now, nil, rs.own, rails)
	rs.version++
	for _, p := range rs.peers.inOrder() {
		rs.dispatch.Touch(p)
	}
}

// SetPeer is Exec.PeerRails.
func (rs *Rails) SetPeer(now Instant, boot transfer.Boot, rails []Rail) {
	p := rs.peers.Find(boot)
	if p == nil {
		return // it is gone
	}
	if len(rails) > MaxRails {
		rs.peers.logViolation(p, frame.BadRails,
			"%d rails: at most %d are kept, not %.64q and what follows",
			len(rails), MaxRails, rails[MaxRails].Name)
	}
	p.known = rs.change(now, p.Rails, p.known, rails)
	rs.dispatch.Touch(p)
}

func (rs *Rails) change(now Instant, p *spray.Peer, old map[railID]bool,
	rails []Rail) map[railID]bool {
	rails = rails[:min(len(rails), MaxRails)]
	known := make(map[railID]bool, len(rails))
	for _, r := range rails {
		id := railID{Transport: r.Transport, Name: r.Name}
		known[id] = r.Down
		switch {
		case r.Down && !old[id]:
			rs.Spray.RailDown(now, p, id.Transport, id.Name)
		case !r.Down && old[id]:
			rs.Spray.RailUp(now, p, id.Transport, id.Name)
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
		rs.Spray.RailDown(now, p, id.Transport, id.Name)
		rs.Spray.RailUp(now, p, id.Transport, id.Name)
	}
	return known
}
