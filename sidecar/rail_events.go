package sidecar

import (
	"cmp"
	"errors"
	"net"
	"slices"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/peer"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// railsChanged notifies all parts, the executor first: slices on a dead link move to other rails at
// once.
func (c *conversation) railsChanged(backend string, before, after []rail) {
	c.driver.Do(func(ex *exec.Exec, now exec.Instant) { ex.SetRails(now, states(c.rails.list())) })
	if backend == config.TransTCP {
		c.linksChanged(before, after)
	}
	c.sendRails()
	c.dial.reconcileAll()
}

// linksChanged closes the lanes of rails whose link is down: they would only wait for a
// retransmission long after it is up again.
func (c *conversation) linksChanged(before, after []rail) {
	for _, r := range after {
		was := slices.IndexFunc(before, func(o rail) bool { return o.Name == r.Name })
		if was < 0 || before[was].down() == r.down() {
			continue
		}
		if r.down() {
			c.log.Warn("rail down", "rail", r.Name, "interface", r.nic, "why",
				cmp.Or(r.fault, "its link has no carrier"))
			c.driver.CloseLanes(func(l transport.Lane) bool {
				return l.Backend() == config.TransTCP &&
					l.Local() == r.Name
			})
			c.mesh.LinkDown(addrOf(r.Address).AsSlice())
		} else {
			c.log.Info("rail up", "rail", r.Name, "interface", r.nic)
			c.solicit(r)
		}
	}
	if err := c.mesh.SetControl(c.proc.Context(), c.controlAddresses()); err != nil && !errors.Is(err,
		net.ErrClosed) {
		c.log.Warn("control address not bound, retrying", "err", err)
	}
}

// sendRails sends the list to every peer, including this node, which is its own peer.
func (c *conversation) sendRails() {
	for _, boot := range c.dial.boots() {
		if boot == c.boot {
			c.peerRails(boot, c.rails.list())
		} else {
			c.Send(boot, c.railsFrame())
		}
	}
}

// railsFrame is the frame with the local rails.
func (c *conversation) railsFrame() *peerv1.ControlFrame {
	return &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Rails{Rails: &peerv1.Rails{
		Rails: c.rails.list(), ControlAddresses: c.mesh.Addresses()}}}
}

// peerRails applies a peer's list of rails.
func (c *conversation) peerRails(boot transfer.Boot, list []*peerv1.Rail) {
	good, refused := peer.CheckRails(list)
	known, first := c.dial.setRails(boot, good, len(refused) > 0)
	if !known {
		return
	}
	if first {
		c.log.Warn("a peer announced invalid rails; logged once", "peer", boot.String(),
			"refused", refused)
	}
	c.driver.Do(func(ex *exec.Exec, now exec.Instant) { ex.PeerRails(now, boot, states(good)) })
	for _, x := range good {
		if x.Down {
			c.driver.CloseLanes(func(l transport.Lane) bool {
				return l.Peer() == boot && l.Backend() == x.Transport && l.Remote() == x.Name
			})
		}
	}
	c.dial.reconcile(boot)
}
