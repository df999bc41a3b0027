package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"

	"github.com/kvspray/kvspray/cluster"
	"github.com/kvspray/kvspray/cluster/gossip"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/proxy"
)

// fleet gives a router what sidecars publish. It implements proxy.Fleet.
type fleet struct {
	cluster.Fleet
	log *slog.Logger
}

// openFleet begins to observe the members.
func openFleet(ctx context.Context, c *config.Router, log *slog.Logger) (*fleet, error) {
	o := gossip.Options{Listen: c.GossipListen, Advertise: c.GossipAdvertise, Join: c.Join, Log: log}
	if c.ClusterKeyFile != "" {
		key, err := keys.LoadCluster(c.ClusterKeyFile)
		if err != nil {
			return nil, fmt.Errorf("proxy: cluster_key_file: %w", err)
		}
		if o.Keys, err = key.Gossip(); err != nil {
			return nil, fmt.Errorf("proxy: cluster_key_file: %w", err)
		}
	}
	if o.Listen == "" {
		at, err := towards(ctx, c.Join[0])
		if err != nil {
			return nil, fmt.Errorf("proxy: join %s: %w; correct it, or set gossip_listen", c.Join[0], err)
		}
		o.Listen = at
	}
	g, err := gossip.Observe(o)
	switch {
	case errors.Is(err, gossip.ErrUnsafe):
		return nil, usage.Errorf("proxy: join: the router's own address %s is not loopback, and gossip "+
			"off loopback needs the cluster's key: set cluster_key_file to peer.cluster_key_file of the "+
			"sidecars", o.Listen)
	case err != nil:
		return nil, fmt.Errorf("proxy: join: %w; set gossip_listen to a free address of this host", err)
	}
	return &fleet{g, log}, nil
}

// towards is a free port of this host's address that leads to another one. Nothing is sent.
func towards(ctx context.Context, addr string) (string, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "udp", addr)
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }() // nothing was sent
	host, _, err := net.SplitHostPort(c.LocalAddr().String())
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(host, "0"), nil
}

func (f *fleet) close() {
	if err := f.Leave(); err != nil {
		f.log.Warn("leave the membership", "err", err)
	}
}

// Found implements proxy.Fleet.
func (f *fleet) Found() (list []proxy.Found) {
	for _, s := range f.Served() {
		x := proxy.Found{Engine: proxy.Engine{Sidecar: s.HTTP, Peer: s.Endpoint}, Member: s.Node,
			Started: s.Started, ID: s.Boot.String(), Leaving: s.Leaving, Lost: s.Lost}
		// Gossip probes this address. Nothing has shown that the member is at its endpoint.
		if host, _, err := net.SplitHostPort(s.Address); err == nil {
			x.Hosts = []string{host}
		}
		for _, a := range s.APIs {
			x.URL, x.Role, x.Model = a.URL, a.Role, a.Fingerprint
			x.Events, x.Replay, x.Leases = a.Events, a.Replay, a.Leases
			list = append(list, x)
		}
	}
	return list
}
