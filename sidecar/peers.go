package sidecar

import (
	"context"
	"fmt"
	"net"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/transfer"
)

// newPeers makes the control layer towards other sidecars. It is there before anything can ask for it, and starts when the rails are known.
func newPeers(n *Node) (*peer.Mesh, error) {
	cfg := &n.cfg.Peer
	creds, gossipKeys, err := credentials(n.cfg)
	if err != nil {
		return nil, err
	}
	n.creds = creds
	opt := peer.Options{Boot: n.boot, Node: n.cfg.Node, HostBoot: n.host, Version: n.version, Listen: cfg.Listen, Advertise: cfg.Advertise,
		Credentials: creds, Rails: n.railList, Handler: handler{n}, Log: n.log,
		Refused: n.metrics.HelloRefused}
	// Gossip on loopback with nobody to join would only keep a processor awake.
	if g := cfg.Gossip.Listen; g != "" && g != config.Off && (len(cfg.Gossip.Join) > 0 || !config.IsLoopback(g)) {
		opt.Gossip = &peer.Gossip{Listen: g, Advertise: cfg.Gossip.Advertise, Join: cfg.Gossip.Join, Keys: gossipKeys}
	}
	m, err := peer.New(opt)
	if err != nil {
		return nil, fmt.Errorf("sidecar: %w", err)
	}
	return m, nil
}

// credentials loads what authenticates peers: certificates where they are given, else the cluster key, else nothing.
func credentials(c *config.Config) (creds *keys.Credentials, gossip [][]byte, err error) {
	var cluster keys.Cluster
	if path := c.Peer.ClusterKeyFile; path != "" {
		if cluster, err = keys.LoadCluster(path); err != nil {
			return nil, nil, fmt.Errorf("sidecar: peer.cluster_key_file: %w", err)
		}
		if gossip, err = cluster.Gossip(); err != nil {
			return nil, nil, fmt.Errorf("sidecar: peer.cluster_key_file: %w", err)
		}
	}
	switch t := c.Peer.TLS; {
	case t.Set():
		creds, err = keys.FromFiles(t.Cert, t.Key, t.CA, time.Now())
	case cluster != nil:
		creds, err = keys.FromCluster(cluster, c.Node)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("sidecar: peer credentials: %w", err)
	}
	return creds, gossip, nil
}

// certLooks is the time between two looks at the certificate files.
const certLooks = 10 * time.Second

// watchCertificates takes renewed certificates into use, and tells when the one in use ends.
func (n *Node) watchCertificates(ctx context.Context, every time.Duration) {
	if n.creds == nil {
		return
	}
	t := time.NewTicker(every)
	defer t.Stop()
	said := ""
	for {
		n.metrics.Expires(n.creds.Expires())
		renewed, err := n.creds.Reload(time.Now())
		switch {
		case err != nil && err.Error() != said:
			said = err.Error()
			n.log.Warn("certificates not read again; those read before stay in use", "until", n.creds.Expires(), "err", err)
		case err == nil && renewed:
			n.log.Info("certificates renewed", "until", n.creds.Expires())
			fallthrough
		case err == nil:
			said = ""
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
	}
}

// controlAddresses puts a control lane on every rail that is there now and that the peer address is not on already.
func (n *Node) controlAddresses() (out []string) {
	host, _, err := net.SplitHostPort(n.cfg.Peer.Listen)
	if err != nil {
		return nil
	}
	seen := map[string]bool{host: true, "": true, "0.0.0.0": true, "::": true}
	var addrs []string
	for _, r := range n.cfg.RailsOrDefault() {
		addrs = append(addrs, r.Listen)
	}
	for _, r := range n.rails.of(config.TransTCP) {
		if r.auto {
			addrs = append(addrs, r.Address)
		}
	}
	for _, a := range addrs {
		h, _, err := net.SplitHostPort(a)
		if err != nil || seen[h] || seen[""] && host == "" || len(out) == peer.MaxAddrs-1 {
			continue
		}
		if ip := net.ParseIP(h); ip != nil && ip.IsLoopback() {
			continue // it leads nowhere that the peer address does not
		}
		seen[h] = true
		out = append(out, net.JoinHostPort(h, "0"))
	}
	return out
}

// handler is peer.Handler.
type handler struct{ n *Node }

func (h handler) PeerUp(p peer.Peer) {
	h.n.peerUp(peerInfo{Boot: p.Boot, Key: p.Key, Endpoint: p.Endpoint, Claimed: p.Claimed,
		Node: p.Node, Release: p.Release, HostBoot: p.HostBoot, Rails: p.Rails})
}

func (h handler) PeerDown(boot transfer.Boot, over bool, err error) {
	h.n.log.Info("peer down", "peer", boot.String(), "over", over, "err", err)
	h.n.peerDown(boot, over)
}

func (h handler) ConnectFailed(endpoint string, err error) { h.n.connectFailed(endpoint, err) }

func (h handler) Control(boot transfer.Boot, f *peerv1.ControlFrame) {
	h.n.metrics.Control(metrics.In, frameName(f))
	h.n.frame(boot, f)
}

// Busy looks at what is bound to lanes, whose bytes may move, and at what waits to be.
func (h handler) Busy(boot transfer.Boot) bool {
	if h.n.leases(boot) > 0 {
		return true
	}
	h.n.d.mu.Lock()
	defer h.n.d.mu.Unlock()
	return h.n.d.ex.Shares(boot)
}

func (h handler) Describe(geometry, fingerprint [32]byte) ([]byte, bool) {
	for _, w := range h.n.engine.Workers() {
		if w.Geometry == geometry && (fingerprint == [32]byte{} || w.Fingerprint == fingerprint) {
			b, err := w.Layout.Marshal()
			return b, err == nil
		}
	}
	return nil, false
}

// frameName is the field of a frame's body, for metrics.
func frameName(f *peerv1.ControlFrame) string {
	switch f.Body.(type) {
	case *peerv1.ControlFrame_Await:
		return "await"
	case *peerv1.ControlFrame_Admitted:
		return "admitted"
	case *peerv1.ControlFrame_Grant:
		return "grant"
	case *peerv1.ControlFrame_GrantReply:
		return "grant_reply"
	case *peerv1.ControlFrame_SourceLost:
		return "source_lost"
	case *peerv1.ControlFrame_Revoke:
		return "revoke"
	case *peerv1.ControlFrame_Commit:
		return "commit"
	case *peerv1.ControlFrame_Credit:
		return "credit"
	case *peerv1.ControlFrame_Rails:
		return "rails"
	}
	return "other"
}
