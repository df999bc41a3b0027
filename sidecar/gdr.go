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
	return gdr.New(gdr.Config{Rails: func() ([]gdr.Rail, error) { return gdr.Find(o) }, Log: log})
}
