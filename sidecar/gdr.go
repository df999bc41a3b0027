package sidecar

import (
	"log/slog"
	"net"
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
	o := gdr.Options{Rails: g.Rails, Listen: host, DeadAfter: time.Duration(g.DeadAfter), MTU: g.MTU,
		TrafficClass: g.TrafficClass, ServiceLevel: g.ServiceLevel}
	// On a dead path the sender's timers end the lane; waits for the lane are longer than these
	// timers.
	return gdr.New(gdr.Config{Rails: func() ([]gdr.Rail, error) { return gdr.Find(o) },
		Patience: 2 * o.DeadAfter, Changed: changed, Log: log})
}
