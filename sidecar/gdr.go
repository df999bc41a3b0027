package sidecar

import (
	"log/slog"
	"net"
	"time"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/transport/gdr"
)

// newGDR makes the RDMA transport. Its ports are looked for when it is opened.
func newGDR(c *config.Config, log *slog.Logger) *gdr.Backend {
	g := c.Transports.GDR
	host := g.Listen
	if host == "" {
		host, _, _ = net.SplitHostPort(c.Peer.Listen) // was checked
	}
	o := gdr.Options{Rails: g.Rails, Listen: host, DeadPath: time.Duration(g.DeadPath), MTU: g.MTU, TrafficClass: g.TrafficClass, ServiceLevel: g.ServiceLevel}
	// Where a path is dead, its sender's timers end the lane; who waits for it waits longer than they take.
	return gdr.New(gdr.Config{Rails: func() ([]gdr.Rail, error) { return gdr.Find(o) }, Patience: 2 * o.DeadPath, Log: log})
}
