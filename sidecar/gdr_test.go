package sidecar

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/verbs"
	"github.com/kvspray/kvspray/internal/verbs/fake"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/gdr"
)

// fabric runs a fake RDMA network until the test is over, after everything else.
func fabric(t *testing.T) *fake.Fabric {
	f := fake.New()
	t.Cleanup(f.Serve())
	return f
}

// startFakeGDR starts a node whose only transport is gdr over one device of a fabric.
func startFakeGDR(t *testing.T, f *fake.Fabric, device string, key string) *running {
	cfg := testConfig(t, func(c *config.Config) {
		c.Peer.ClusterKeyFile = key
		c.Transports.Order = []string{config.TransGDR}
	})
	return startConfig(t, cfg, func(n *Node) {
		rails := []gdr.Rail{{Name: device, Open: func() (verbs.Device, error) { return f.Open(device) }, NUMA: -1}}
		n.backends = transport.Registry{gdr.New(gdr.Config{Rails: func() ([]gdr.Rail, error) { return rails, nil }, Patience: 5 * time.Second,
			Changed: n.gdrChanged, Log: n.log})}
	})
}

// A sidecar whose GID changes tells its peers, and transfers go on without a restart of either; also where the address is gone for a while,
// and where the device is pulled out.
func TestGDRFollowsItsPort(t *testing.T) {
	f := fabric(t)
	f.SetGID("a", netip.MustParseAddr("127.0.0.2"))
	f.SetGID("b", netip.MustParseAddr("127.0.0.3"))
	key := clusterKey(t)
	p, d := startFakeGDR(t, f, "a", key), startFakeGDR(t, f, "b", key)
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	moves := func(seed uint64) {
		t.Helper()
		x := begin(t, p, pe, de, seed, tokens)
		de.ok(x.dst)
		pe.ok(x.src)
	}
	// said is what d has heard of p's rail.
	said := func(ok func(*peerv1.Rail) bool) func() bool {
		return func() bool {
			d.dial.mu.Lock()
			defer d.dial.mu.Unlock()
			r := d.dial.peers[p.boot]
			return r != nil && slices.ContainsFunc(r.rails, ok)
		}
	}
	at := func(addr string) func(*peerv1.Rail) bool {
		return func(r *peerv1.Rail) bool { return !r.Down && addrOf(r.Address) == netip.MustParseAddr(addr) }
	}
	down := func(r *peerv1.Rail) bool { return r.Down }
	moves(1)
	until(t, said(at("127.0.0.2")))

	f.SetGID("a", netip.MustParseAddr("127.0.0.4"))
	until(t, said(at("127.0.0.4")))
	moves(2)

	f.SetGID("a", netip.Addr{})
	until(t, said(down))
	f.SetGID("a", netip.MustParseAddr("127.0.0.5"))
	until(t, said(at("127.0.0.5")))
	moves(3)

	f.Remove("a")
	until(t, said(down))
	f.Insert("a")
	until(t, said(at("127.0.0.5")))
	moves(4)

	f.Emit("a", verbs.Event{Kind: verbs.PortDown})
	until(t, said(down))
	f.Emit("a", verbs.Event{Kind: verbs.PortUp})
	until(t, said(at("127.0.0.5")))
	moves(5)
}
