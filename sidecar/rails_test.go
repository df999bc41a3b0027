package sidecar

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/peer"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/topo"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
)

// veth makes a pair of interfaces, brings it up and gives the first end an address.
func veth(t *testing.T, name, addr string) (here, far netlink.Link) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	v := &netlink.Veth{LinkAttrs: attrs, PeerName: name + "far"}
	ok(t, netlink.LinkAdd(v))
	far, err := netlink.LinkByName(name + "far")
	ok(t, err)
	ip, n, err := net.ParseCIDR(addr)
	ok(t, err)
	ok(t, netlink.AddrAdd(v, &netlink.Addr{IPNet: &net.IPNet{IP: ip, Mask: n.Mask}}))
	ok(t, netlink.LinkSetUp(v))
	ok(t, netlink.LinkSetUp(far))
	return v, far
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Patterns that fit more interfaces than there may be rails make only that number, which is logged
// once; a look that finds the same changes nothing, and an interface that goes makes room.
func TestAutoRailsAreBounded(t *testing.T) {
	if !testutil.InNamespace(t) {
		return
	}
	lo, err := netlink.LinkByName("lo")
	ok(t, err)
	h := &topo.Host{}
	for i := range 40 {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 90, byte(i), 1}), 24)
		ok(t, netlink.AddrAdd(lo, &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(),
			Mask: net.CIDRMask(24, 32)}}))
		h.NICs = append(h.NICs, topo.NIC{Name: fmt.Sprintf("fake%02d", i), Kind: topo.Physical,
			Addrs: []netip.Prefix{p}, Admin: true, Link: true})
	}
	l := &testutil.Log{}
	cfg := testConfig(t, func(c *config.Config) {
		c.Transports.Order = []string{config.TransTCP}
		c.Transports.TCP.Rails = []config.Rail{{Match: "fake*"}}
		c.Peer.ClusterKeyFile = clusterKey(t)
	})
	n := startLog(t, cfg, slog.New(slog.NewTextHandler(l, nil)))
	look := func(h *topo.Host, before []rail) []rail {
		t.Helper()
		n.rails.apply.Lock()
		defer n.rails.apply.Unlock()
		now, again := n.rails.follow(h, before)
		if again {
			t.Errorf("an address could not be bound: %s", l)
		}
		return now
	}
	first := look(h, nil)
	if len(first) != maxAutoRails || first[0].nic != "fake00" || first[maxAutoRails-1].nic !=
		fmt.Sprintf("fake%02d", maxAutoRails-1) {
		t.Errorf("%d rails of 40 interfaces, want the first %d: %+v", len(first), maxAutoRails, first)
	}
	if second := look(h, first); !slices.Equal(second, first) {
		t.Errorf("the same interfaces: %+v, before: %+v", second, first)
	}
	less := &topo.Host{NICs: h.NICs[1:]}
	third := look(less, first)
	if len(third) != maxAutoRails || third[0].nic != "fake01" || third[maxAutoRails-1].nic !=
		fmt.Sprintf("fake%02d", maxAutoRails) {
		t.Errorf("one of the rails went: %+v", third)
	}
	if got := strings.Count(l.String(), "too many interfaces match transports.tcp.rails"); got != 1 {
		t.Errorf("it was logged %d times, want once: %s", got, l)
	}
}

// The executor's clock counts from a monotonic reading: a jump of the wall clock does not reach it.
// Without that reading package time would take the wall's.
func TestClockIsMonotonic(t *testing.T) {
	n, _ := startLogged(t)
	if s := n.proc.Started().String(); !strings.Contains(s, " m=") {
		t.Errorf("the clock begins at %s, which has no monotonic reading", s)
	}
}

// The log has one line for each peer that announces invalid rails, or 10,000 of them, with the
// peer's name and the bound, however often the peer repeats it. Valid rails are used.
func TestInvalidRailsAreLoggedOnce(t *testing.T) {
	n, l := startLogged(t)
	var many []*peerv1.Rail
	for i := range 10000 {
		many = append(many, &peerv1.Rail{Transport: "tcp", Name: fmt.Sprint("x", i),
			Address: "10.0.0.1:1", Gbps: 10})
	}
	many[3].Gbps = 1e300
	for i := range 2 {
		boot := transfer.Boot{0, byte(i + 1)}
		n.dial.mu.Lock()
		// it keeps the lanes
		n.dial.peers[boot] = &remote{keepers: map[wantedLane]context.CancelFunc{}}
		n.dial.mu.Unlock()
		n.conv.peerRails(boot, many[:3])
		if s := l.String(); strings.Contains(s, boot.String()) {
			t.Errorf("valid rails are logged: %s", s)
		}
		for range 100 {
			n.conv.peerRails(boot, many)
		}
		n.dial.mu.Lock()
		kept := n.dial.peers[boot].rails
		n.dial.mu.Unlock()
		if len(kept) != peer.MaxRails || kept[3].Name != "x3" || kept[3].Gbps != 0 || kept[4].Gbps != 10 {
			t.Errorf("%d rails are kept: %v", len(kept), kept)
		}
		var logged []string
		for line := range strings.Lines(l.String()) {
			if strings.Contains(line, "a peer announced invalid rails") && strings.Contains(line,
				boot.String()) {
				logged = append(logged, line)
			}
		}
		if len(logged) != 1 || !strings.Contains(logged[0], "rail x3: a speed of 1e+300 Gbit/s") ||
			!strings.Contains(logged[0], fmt.Sprintf("rails %d to 9999: at most %d are kept", peer.MaxRails,
				peer.MaxRails)) {
			t.Errorf("logged %d times, want once, with what is wrong: %q", len(logged), logged)
		}
	}
}

// TestRailsComeAndGo: two sidecars, both on every interface that there is. One appears, one loses
// its carrier and gets it back, one vanishes; transfers go on all the while, and both sides have
// the change.
func TestRailsComeAndGo(t *testing.T) {
	if !testutil.InNamespace(t) {
		return
	}
	veth(t, "rail0", "10.90.0.1/24")
	veth(t, "other0", "10.99.0.1/24")
	key, err := keys.NewCluster()
	ok(t, err)
	path := filepath.Join(t.TempDir(), "cluster.key")
	ok(t, keys.WriteCluster(path, key))
	change := func(c *config.Config) {
		c.Transports.Order = []string{config.TransTCP}
		c.Transports.TCP.Rails = []config.Rail{{Match: "other*", Exclude: true}, {Match: "rail1",
			Speed: 25e9, Tier: 2}, {Match: "*"}}
		c.Peer.ClusterKeyFile = path
		c.Peer.Listen = "127.0.0.1:0"
	}
	p, d := start(t, change), start(t, change)
	rails := func(n *running) (out []string) {
		for _, r := range n.rails.of(config.TransTCP) {
			s := r.Name
			if r.down() {
				s += "!"
			}
			out = append(out, s)
		}
		return out
	}
	// lanes are pairs of rails that have lanes to the other node, with their state.
	lanes := func(n, to *running) (out []string) {
		for _, q := range n.web.State().Leases.Rails.Pairs {
			if q.Peer == to.Boot().String() && q.Lanes > 0 {
				out = append(out, q.Path.Local+">"+q.Path.Remote+" "+q.State)
			}
		}
		slices.Sort(out)
		return out
	}
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	pe.random()
	var seed uint64
	move := func() {
		t.Helper()
		seed++
		x := begin(t, p, pe, de, seed, 0, msg.PendingStep{Step: seed, End: tokens})
		bound(t, d)
		for l := range testShape.Layers {
			pe.SignalLayer(l, seed)
		}
		pe.SignalStep(seed)
		de.ok(x.dst)
		same(t, pe, de, x.pt, x.dt, tokens, 0)
		pe.ok(x.src)
	}
	wait := func(what string, want []string, get func() []string) {
		t.Helper()
		deadline := time.Now().Add(patience)
		for !slices.Equal(get(), want) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: %q, want %q; routes %+v", what, get(), want, p.web.State().Routes)
			}
		}
	}
	both := func(what string, ours []string, pairs ...string) {
		t.Helper()
		wait(what+": rails", ours, func() []string { return rails(p) })
		wait(what+": rails there", ours, func() []string { return rails(d) })
		if pairs != nil {
			wait(what+": pairs", pairs, func() []string { return lanes(p, d) })
			wait(what+": pairs there", pairs, func() []string { return lanes(d, p) })
		}
	}
	// control waits for a control lane over a rail, whichever side dialed it.
	control := func(what, addr string) {
		t.Helper()
		wait(what, []string{addr}, func() []string {
			for _, l := range append(p.web.State().Control[d.Boot().String()],
				d.web.State().Control[p.Boot().String()]...) {
				if _, far, _ := strings.Cut(l, " "); strings.HasPrefix(far, addr) {
					return []string{addr}
				}
			}
			return nil
		})
	}
	both("at the start", []string{"rail0"})
	move()
	control("control at the start", "10.90.0.1:")
	both("in use", []string{"rail0"}, "rail0>rail0 healthy")

	one, far := veth(t, "rail1", "10.91.0.1/24")
	both("one appeared", []string{"rail0", "rail1"}, "rail0>rail0 healthy", "rail1>rail1 healthy")
	control("control of the one that appeared", "10.91.0.1:")
	if r, _ := p.rails.find(config.TransTCP, "rail1"); r.Gbps != 25 || r.Tier != 2 ||
		r.nic != "rail1" || !r.prefix.IsValid() {
		t.Errorf("%+v", r)
	}
	move()

	ok(t, netlink.LinkSetDown(far))
	both("one lost its carrier", []string{"rail0", "rail1!"}, "rail0>rail0 healthy")
	move()
	var why []string
	for _, c := range p.web.State().Routes[d.Boot().String()] {
		if c.Local == "rail1" {
			why = append(why, c.Why)
		}
	}
	if !slices.Equal(why, []string{"the link of rail1 is down"}) {
		t.Errorf("routes have the reason %q", why)
	}

	ok(t, netlink.LinkSetUp(far))
	both("it has it back", []string{"rail0", "rail1"})
	deadline := time.Now().Add(patience)
	for {
		move() // work is what a rail proves itself with
		if s := strings.Join(lanes(p, d), ", "); s == "rail0>rail0 healthy, rail1>rail1 healthy" {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("not taken back: %s", s)
		}
	}

	ok(t, netlink.LinkDel(one))
	both("one vanished", []string{"rail0"}, "rail0>rail0 healthy")
	move()
	for i := range 3 { // and again under its old name
		veth(t, "rail1", fmt.Sprintf("10.92.%d.1/24", i))
		both("made anew", []string{"rail0", "rail1"})
		l, err := netlink.LinkByName("rail1")
		ok(t, err)
		ok(t, netlink.LinkDel(l))
		both("gone again", []string{"rail0"})
	}
	move()
}
