package sidecar

import (
	"context"
	"fmt"
	"net"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/cluster"
	"github.com/kvspray/kvspray/cluster/gossip"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/peer"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/sidecar/internal/segments"
	"github.com/kvspray/kvspray/transfer"
)

// open makes the control layer towards other sidecars, before anything can use it. It starts when
// the rails are known.
func (c *conversation) open() error {
	cfg := &c.cfg.Peer
	creds, keysOfGossip, err := credentials(c.cfg)
	if err != nil {
		return err
	}
	c.creds = creds
	opt := peer.Options{Boot: c.boot, Node: c.cfg.Node, HostBoot: c.host, Version: c.version,
		Listen: cfg.Listen, Advertise: cfg.Advertise,
		Credentials: creds, Rails: c.rails.list, Handler: handler{c}, Log: c.log,
		Refused: c.metrics.HelloRefused}
	if c.cfg.GossipOn() {
		join := gossip.Joiner(gossip.Options{Listen: cfg.Gossip.Listen,
			Advertise: cfg.Gossip.Advertise, Join: cfg.Gossip.Join, Keys: keysOfGossip, Log: c.log,
			Missed: func(addresses []string) { c.missed.Store(&addresses) }})
		opt.Join = func(m cluster.Member, known *admit.Members) (cluster.Cluster, error) {
			m.Labels = c.pages.labels()
			return join(m, known)
		}
	}
	opt.Features = append(c.pages.features(), segments.Feature)
	if c.mesh, err = peer.New(opt); err != nil {
		return fmt.Errorf("sidecar: %w", err)
	}
	return nil
}

// credentials loads what authenticates peers: certificates if configured, else the cluster key,
// else nothing.
func credentials(c *config.Config) (creds *keys.Credentials, gossipKeys [][]byte, err error) {
	var cluster keys.Cluster
	if path := c.Peer.ClusterKeyFile; path != "" {
		if cluster, err = keys.LoadCluster(path); err != nil {
			return nil, nil, fmt.Errorf("sidecar: peer.cluster_key_file: %w", err)
		}
		if gossipKeys, err = cluster.Gossip(); err != nil {
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
	return creds, gossipKeys, nil
}

// certLooks is the interval of checks of the certificate files.
const certLooks = 10 * time.Second

// watchCertificates loads renewed certificates, and reports when the current one ends.
func (c *conversation) watchCertificates(ctx context.Context, every time.Duration) {
	if c.creds == nil {
		return
	}
	t := time.NewTicker(every)
	defer t.Stop()
	logged := ""
	for {
		c.metrics.Expires(c.creds.Expires())
		renewed, err := c.creds.Reload(time.Now())
		switch {
		case err != nil && err.Error() != logged:
			logged = err.Error()
			c.log.Warn("certificates not read again; the earlier ones stay in use", "until",
				c.creds.Expires(), "err", err)
		case err == nil && renewed:
			c.log.Info("certificates renewed", "until", c.creds.Expires())
			fallthrough
		case err == nil:
			logged = ""
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
	}
}

// controlAddresses puts a control lane on every present rail except that of the peer address.
func (c *conversation) controlAddresses() (out []string) {
	host, _, err := net.SplitHostPort(c.cfg.Peer.Listen)
	if err != nil {
		return nil
	}
	seen := map[string]bool{host: true, "": true, "0.0.0.0": true, "::": true}
	var addrs []string
	for _, r := range c.cfg.RailsOrDefault() {
		addrs = append(addrs, r.Listen)
	}
	for _, r := range c.rails.of(config.TransTCP) {
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
			continue // the peer address reaches the same
		}
		seen[h] = true
		out = append(out, net.JoinHostPort(h, "0"))
	}
	return out
}

// handler is peer.Handler.
type handler struct{ c *conversation }

func (h handler) PeerUp(p peer.Peer) {
	h.c.peerUp(peerInfo{Boot: p.Boot, Key: p.Key, Endpoint: p.Endpoint, Claimed: p.Claimed,
		Node: p.Node, Release: p.Release, HostBoot: p.HostBoot, Rails: p.Rails})
	h.c.pages.peerUp(&p)
	h.c.segmentPeer(&p)
}

func (h handler) PeerDown(boot transfer.Boot, over bool, err error) {
	h.c.log.Info("peer down", "peer", boot.String(), "over", over, "err", err)
	h.c.pages.peerDown(boot)
	h.c.peerDown(boot, over)
}

func (h handler) ConnectFailed(endpoint string, err error) { h.c.connectFailed(endpoint, err) }

func (h handler) Control(boot transfer.Boot, f *peerv1.ControlFrame) {
	h.c.metrics.Control(metrics.In, frameName(f))
	if taken, err := h.c.pages.frame(boot, f); taken {
		if err != nil {
			h.c.violates(boot, exec.BadPages, err)
		}
		return
	}
	if !h.c.segmentFrame(boot, f) {
		h.c.frame(boot, f)
	}
}

// Busy reports whether anything is bound to lanes, or waits for that.
func (h handler) Busy(boot transfer.Boot) (busy bool) {
	if h.c.driver.BoundTo(boot) > 0 {
		return true
	}
	h.c.driver.View(func(ex *exec.Exec, _ exec.Instant) { busy = ex.Shares(boot) })
	return busy
}

func (h handler) Describe(geometry, fingerprint [32]byte) ([]byte, bool) {
	for _, w := range h.c.workers() {
		if w.Layout != nil && w.Geometry == geometry &&
			(fingerprint == [32]byte{} || w.Fingerprint == fingerprint) {
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
	case *peerv1.ControlFrame_SessionOver:
		return "session_over"
	case *peerv1.ControlFrame_Check:
		return "check"
	case *peerv1.ControlFrame_Checked:
		return "checked"
	case *peerv1.ControlFrame_Commit:
		return "commit"
	case *peerv1.ControlFrame_Credit:
		return "credit"
	case *peerv1.ControlFrame_Rails:
		return "rails"
	case *peerv1.ControlFrame_PageHints:
		return "page_hints"
	case *peerv1.ControlFrame_PageLookup:
		return "page_lookup"
	case *peerv1.ControlFrame_PageHolders:
		return "page_holders"
	case *peerv1.ControlFrame_PageRequest:
		return "page_request"
	case *peerv1.ControlFrame_PageOffer:
		return "page_offer"
	case *peerv1.ControlFrame_PageRemovals:
		return "page_removals"
	case *peerv1.ControlFrame_PageRemoved:
		return "page_removed"
	case *peerv1.ControlFrame_SegmentLocate:
		return "segment_locate"
	case *peerv1.ControlFrame_SegmentLocated:
		return "segment_located"
	case *peerv1.ControlFrame_SegmentBatch:
		return "segment_batch"
	case *peerv1.ControlFrame_SegmentCancel:
		return "segment_cancel"
	case *peerv1.ControlFrame_SegmentDone:
		return "segment_done"
	}
	return "other"
}
