package sidecar

import (
	"github.com/kvspray/kvspray/control/route"
	"github.com/kvspray/kvspray/sidecar/internal/web"
	"github.com/kvspray/kvspray/transfer"
)

// peerViews shows the peers of a conversation. It implements web.Peers.
type peerViews struct{ *conversation }

// Peers implements web.Peers.
func (v peerViews) Peers() (out []web.Peer) {
	d := v.dial
	d.mu.Lock()
	defer d.mu.Unlock()
	for boot, r := range d.peers {
		out = append(out, web.Peer{Boot: boot, Node: r.node, Release: r.release, Endpoint: r.endpoint,
			Claimed: r.claimed, Wanted: r.wanted})
	}
	return out
}

// Routes implements web.Peers.
func (v peerViews) Routes(boot transfer.Boot) []route.Candidate {
	d := v.dial
	d.mu.Lock()
	defer d.mu.Unlock()
	if r := d.peers[boot]; r != nil {
		return d.routes(r)
	}
	return nil
}

// Trouble implements web.Peers.
func (v peerViews) Trouble(boot transfer.Boot, c route.Candidate) string {
	return v.dial.troubles.of(pairName{boot, c.Transport, c.Local, c.Remote})
}

// ControlLanes implements web.Peers.
func (v peerViews) ControlLanes(boot transfer.Boot) []string { return v.mesh.Lanes(boot) }
