package sidecar

import (
	"github.com/kvspray/kvspray/control/route"
	"github.com/kvspray/kvspray/sidecar/internal/web"
	"github.com/kvspray/kvspray/transfer"
)

// peerViews shows the peers of a conversation. It implements web.Peers.
type peerViews struct{ *conversation }

// Peers implements web.Peers.
func (v peerViews) Peers() []web.Peer { return v.dial.views() }

// Routes implements web.Peers.
func (v peerViews) Routes(boot transfer.Boot) []route.Candidate { return v.dial.routesTo(boot) }

// Trouble implements web.Peers.
func (v peerViews) Trouble(boot transfer.Boot, c route.Candidate) string {
	return v.dial.errs.of(pairName{boot, c.Transport, c.Local, c.Remote})
}

// ControlLanes implements web.Peers.
func (v peerViews) ControlLanes(boot transfer.Boot) []string { return v.mesh.Lanes(boot) }
