package sidecar

import (
	"context"
	"log/slog"
	"net"
	"slices"
	"time"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/transport/gdr"
)

// newGDR makes the RDMA transport. It searches for ports when it is opened. changed must not block.
func newGDR(c *config.Config, changed func(), log *slog.Logger) *gdr.Backend {
	g := c.Transports.GDR
	host := g.Listen
	if host == "" {
		host, _, _ = net.SplitHostPort(c.Peer.Listen) // already checked
	}
	o := gdr.Options{Rails: g.Rails, Listen: host, DeadPath: time.Duration(g.DeadPath), MTU: g.MTU, TrafficClass: g.TrafficClass, ServiceLevel: g.ServiceLevel}
	// On a dead path the sender's timers end the lane; waits for the lane are longer than these
	// timers.
	return gdr.New(gdr.Config{Rails: func() ([]gdr.Rail, error) { return gdr.Find(o) }, Patience: 2 * o.DeadPath, Changed: changed, Log: log})
}

// gdrChanged: a port of gdr went down or up, or has another address.
func (n *Node) gdrChanged() {
	select {
	case n.gdrNews <- struct{}{}:
	default: // the pending check covers this change too
	}
}

// watchGDR follows gdr's rails until ctx ends.
func (n *Node) watchGDR(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.gdrNews:
			n.takeGDR()
		}
	}
}

// takeGDR applies the current rails of gdr and notifies executor and peers.
func (n *Node) takeGDR() {
	b, ok := n.backends.Get(config.TransGDR)
	g, dynamic := b.(*gdr.Backend)
	if !ok || !dynamic {
		return
	}
	s := &n.rails
	s.apply.Lock()
	defer s.apply.Unlock()
	before := s.of(config.TransGDR)
	now := slices.Clone(before)
	for _, x := range g.Rails() {
		i := slices.IndexFunc(now, func(r rail) bool { return r.Name == x.Name })
		if i < 0 {
			continue
		}
		r := &now[i]
		if r.down != x.Down || r.Address != x.Address {
			n.log.Info("rail changed", "transport", config.TransGDR, "rail", r.Name, "down", x.Down, "address", x.Address)
		}
		r.down, r.Address = x.Down, x.Address
	}
	if slices.Equal(before, now) {
		return
	}
	s.mu.Lock()
	s.byB[config.TransGDR] = now
	s.mu.Unlock()
	at := n.enter()
	n.d.ex.SetRails(at, states(n.railList()))
	n.leave()
	n.tellRails()
	n.dial.reconcileAll()
}
