package source

import (
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/transfer"
)

// PeerUp ends the absence of a peer's grants.
func (mt *Matcher) PeerUp(p *lanes.Peer) {
	for _, in := range mt.grantsFrom(p) {
		mt.present(in)
	}
}

// PeerDown keeps the places of a peer's grants until the match timeout. With over, the peer is
// gone.
func (mt *Matcher) PeerDown(now Instant, p *lanes.Peer, over bool) {
	for _, in := range mt.grantsFrom(p) {
		if mt.grants[in.id] == in {
			mt.absent(now, in, over)
		}
	}
	mt.sources.peerDown(now, p.Boot, over)
}

// Forget drops what of a peer waits for an intent.
func (mt *Matcher) Forget(p *lanes.Peer) { mt.pending.dropOf(p) }

// Shares reports whether any grant or query involves a peer.
func (mt *Matcher) Shares(boot transfer.Boot) bool {
	return len(mt.grantsOf[boot])+len(mt.pending.byPeer[boot])+len(mt.sources.waits.sessions[boot]) > 0
}
