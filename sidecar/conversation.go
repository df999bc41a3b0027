package sidecar

import (
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"sync/atomic"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/peer"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/sidecar/internal/plans"
	"github.com/kvspray/kvspray/sidecar/internal/segments"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// conversation is what this sidecar sends to its peers and does with what they send. It implements
// driver.Peers.
type conversation struct {
	cfg          *config.Config
	log          *slog.Logger
	refused      admit.Log // grants
	unsent       admit.Log // frames
	unlearned    admit.Log // layouts of peers
	boot         transfer.Boot
	host         string // kernel boot id
	version      string
	self         transport.Peer
	proc         *driver.Goroutines
	driver       *driver.Driver
	metrics      *metrics.Set
	plans        *plans.Planner
	descriptions *descriptions
	dial         *dialer
	rails        *railSet
	workers      func() []*engines.Worker
	pages        *pageStore
	segments     *segments.Segments

	missed atomic.Pointer[[]string] // of peer.gossip.join; nil: not known yet

	mesh  *peer.Mesh        // set before Run opens a backend
	creds *keys.Credentials // likewise; nil: none
}

// PeerKey implements driver.Peers. The handshake is enough: the first lane of a peer may come
// before its PeerUp.
func (c *conversation) PeerKey(boot transfer.Boot) (transport.Peer, bool) {
	if boot == c.boot {
		return c.self, true
	}
	key, ok := c.mesh.PeerKey(boot)
	return transport.Peer{Boot: boot, Self: c.boot, Key: key}, ok
}

// selfUp makes the node its own peer: one sidecar may serve both sides.
func (c *conversation) selfUp() {
	info := peerInfo{Boot: c.boot, Key: c.self.Key, Endpoint: c.mesh.Endpoint(), Release: c.version,
		HostBoot: c.host, Rails: c.rails.list()}
	c.segments.PeerUp(c.boot, c.cfg.Node, info.Endpoint, "", []string{segments.Feature})
	c.peerUp(info)
}

// Connect implements driver.Peers.
func (c *conversation) Connect(endpoint string) {
	c.dial.name(endpoint)
	c.mesh.Connect(endpoint)
}

// Known implements driver.Peers.
func (c *conversation) Known(boot transfer.Boot) bool { return c.dial.has(boot) }

// Send implements driver.Peers. A frame for this node is an event of the next round.
func (c *conversation) Send(to transfer.Boot, f *peerv1.ControlFrame) {
	if r := f.GetGrantReply(); r != nil && r.Code != peerv1.GrantReply_BOUND &&
		r.Code != peerv1.GrantReply_RANKS {
		c.refused.Note(slog.LevelWarn, "grant refused", "peer", to.String(), "code",
			strings.ToLower(r.Code.String()), "gen", r.Gen, "reason", r.Message)
	}
	if to == c.boot {
		c.frame(to, f)
		return
	}
	if f.GetRails() == nil {
		c.dial.need(to)
	}
	c.metrics.Control(metrics.Out, frameName(f))
	c.prefer(to)
	if err := c.mesh.Send(to, f); err != nil {
		c.unsent.Note(slog.LevelWarn, "control frame not sent", "peer", to.String(), "type", frameName(f),
			"err", err)
		// The loss of a peer reaches the executor as PeerDown; this peer is still there.
		if errors.Is(err, peer.ErrQueueFull) || errors.Is(err, peer.ErrTooBig) {
			c.driver.Do(func(ex *exec.Exec, now exec.Instant) { ex.Unsent(now, to, f, err) })
		}
	}
}

// prefer sends control frames over the rail with the shortest queue.
func (c *conversation) prefer(to transfer.Boot) {
	var rail string
	var ok bool
	c.driver.View(func(ex *exec.Exec, now exec.Instant) {
		rail, ok = ex.Quickest(now, to, config.TransTCP)
	})
	var addr netip.Addr
	if r, here := c.rails.find(config.TransTCP, rail); ok && here {
		// an address that is a name prefers nothing
		if a, err := netip.ParseAddrPort(r.Address); err == nil {
			addr = a.Addr().Unmap()
		}
	}
	c.mesh.Prefer(to, addr)
}

// frame takes one control frame from a peer.
func (c *conversation) frame(from transfer.Boot, f *peerv1.ControlFrame) {
	if r := f.GetRails(); r != nil {
		c.peerRails(from, r.Rails)
		if len(r.ControlAddresses) > 0 && from != c.boot {
			if err := c.mesh.PeerAddresses(from, r.ControlAddresses); err != nil {
				c.violates(from, exec.BadAddress, err)
			}
		}
		return
	}
	c.dial.need(from)
	var err error
	c.driver.Do(func(ex *exec.Exec, now exec.Instant) { err = ex.Message(now, from, f) })
	if err != nil {
		c.log.Warn("control frame refused; logged once", "peer", from.String(), "err", err)
	}
}

// violates counts a violation of the protocol, and logs a peer's first one.
func (c *conversation) violates(from transfer.Boot, what exec.Violation, err error) {
	first := false
	c.driver.View(func(ex *exec.Exec, _ exec.Instant) { first = ex.ReportViolation(from, what) })
	if first {
		c.log.Warn("control frame refused; logged once", "peer", from.String(), "err", err)
	}
}

// peerUp handles a completed handshake, also after each reconnection of a peer's control lanes.
func (c *conversation) peerUp(in peerInfo) {
	others, named := c.dial.up(in)
	c.metrics.Peers(others)
	c.driver.Do(func(ex *exec.Exec, now exec.Instant) { ex.PeerUp(now, in.Endpoint, in.Boot) })
	c.peerRails(in.Boot, in.Rails)
	if named {
		c.dial.need(in.Boot)
	}
	if in.Boot != c.boot {
		// The list in the handshake may be older.
		c.Send(in.Boot, c.railsFrame())
	}
}

// connectFailed ends a connect.
func (c *conversation) connectFailed(endpoint string, err error) {
	err = classifyDialError(err)
	// Requests wait for this peer, and a wrong address costs each of them seconds. Logged once, until
	// the peer answers.
	level := slog.LevelDebug
	if c.dial.failed(endpoint) {
		level = slog.LevelWarn
	}
	c.log.Log(c.proc.Context(), level, "peer not reached; tried again while requests wait for it",
		"endpoint", endpoint, "err", err)
	c.segments.ConnectFailed(endpoint, err)
	c.driver.Do(func(ex *exec.Exec, now exec.Instant) { ex.ConnectFailed(now, endpoint, err) })
}

// peerDown handles the loss of the control lanes to a peer. over: the conversation has ended, and
// nothing is kept of it.
func (c *conversation) peerDown(boot transfer.Boot, over bool) {
	c.segments.PeerDown(boot, over)
	if over {
		c.metrics.Peers(c.dial.forget(boot))
		c.driver.CloseLanes(func(l transport.Lane) bool { return l.Peer() == boot })
		c.driver.ForgetPeer(boot)
	}
	c.driver.Do(func(ex *exec.Exec, now exec.Instant) { ex.PeerDown(now, boot, over) })
}
