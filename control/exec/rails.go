package exec

import (
	"bytes"
	"cmp"
	"slices"

	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
)

// Rail is a data rail, ours or a peer's, as it is now.
type Rail struct {
	Transport string
	Name      string
	Down      bool // its link has no carrier
}

// maxRails bounds what is known of one side's rails. A control lane brings fewer; it is below what the scheduler remembers of links, so that none of
// these is forgotten there.
const maxRails = 256

type railID struct{ transport, name string }

// SetRails says what our rails are. Pairs over one that is down or gone are out of use at once; what they carried goes to others.
func (e *Exec) SetRails(now Instant, rails []Rail) {
	e.rails = e.setRails(now, nil, e.rails, rails)
	e.railsNo++
	for _, p := range e.peersInOrder() {
		e.touch(p)
	}
	e.assign(now)
}

// PeerRails says what the rails of boot are, by its own word.
func (e *Exec) PeerRails(now Instant, boot transfer.Boot, rails []Rail) {
	p := e.peers[boot]
	if p == nil {
		return // it is gone
	}
	if len(rails) > maxRails {
		e.complain(p, BadRails, "%d rails: at most %d are kept, not %.64q and what follows", len(rails), maxRails, rails[maxRails].Name)
	}
	p.known = e.setRails(now, p.rails, p.known, rails)
	e.touch(p)
	e.assign(now)
}

func (e *Exec) setRails(now Instant, p *spray.Peer, old map[railID]bool, rails []Rail) map[railID]bool {
	rails = rails[:min(len(rails), maxRails)]
	known := make(map[railID]bool, len(rails))
	for _, r := range rails {
		id := railID{r.Transport, r.Name}
		known[id] = r.Down
		switch {
		case r.Down && !old[id]:
			e.spray.RailDown(now, p, id.transport, id.name)
		case !r.Down && old[id]:
			e.spray.RailUp(now, p, id.transport, id.name)
		}
	}
	var gone []railID
	for id := range old {
		if _, ok := known[id]; !ok {
			gone = append(gone, id)
		}
	}
	slices.SortFunc(gone, func(a, b railID) int {
		return cmp.Or(cmp.Compare(a.transport, b.transport), cmp.Compare(a.name, b.name))
	})
	for _, id := range gone {
		// What it carried is free at once. Its lanes end, and one that comes up again begins on trial.
		e.spray.RailDown(now, p, id.transport, id.name)
		e.spray.RailUp(now, p, id.transport, id.name)
	}
	return known
}

func (e *Exec) peersInOrder() []*peer {
	all := make([]*peer, 0, len(e.peers))
	for _, p := range e.peers {
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b *peer) int { return bytes.Compare(a.boot[:], b.boot[:]) })
	return all
}

// Moved answers Ask: bytes of what the lane carries were received since it was asked last.
func (e *Exec) Moved(now Instant, lane uint64) {
	if l := e.lanes[lane]; l != nil {
		e.spray.Moved(now, lane)
		e.touch(l.peer)
		e.assign(now)
	}
}
