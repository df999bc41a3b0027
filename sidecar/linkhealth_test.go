package sidecar

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/control/route"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/topo"
	"github.com/kvspray/kvspray/internal/testutil"
)

// railPair is two nodes on two rails, and transfers between them. The clock of the first one's
// verdict of links is the test's.
type railPair struct {
	t      *testing.T
	p, d   *running
	pe, de *engine
	seed   uint64
	late   atomic.Int64 // of the clock
}

func newRailPair(t *testing.T, root string) *railPair {
	t.Helper()
	x := &railPair{t: t}
	key := clusterKey(t)
	cfg := func() *config.Config {
		return testConfig(t, func(c *config.Config) {
			c.Transports.Order = []string{config.TransTCP}
			c.Transports.TCP.Rails = []config.Rail{{Match: "rail*"}}
			c.Peer.ClusterKeyFile = key
		})
	}
	began := time.Now()
	x.p = startConfig(t, cfg(), func(n *Node) {
		n.rails.links.root = root
		n.rails.links.now = func() time.Time { return began.Add(time.Duration(x.late.Load())) }
	})
	x.d = startConfig(t, cfg(), func(n *Node) { n.rails.links.policy = config.Off })
	x.pe, x.de = newEngine(t, x.p, testShape), newEngine(t, x.d, testShape)
	x.pe.random()
	return x
}

func (x *railPair) move() {
	x.t.Helper()
	x.seed++
	m := begin(x.t, x.p, x.pe, x.de, x.seed, tokens)
	x.de.ok(m.dst)
	same(x.t, x.pe, x.de, m.pt, m.dt, tokens, 0)
	x.pe.ok(m.src)
}

// uses moves prompts until the pairs in use, at both ends, are those of the given rails.
func (x *railPair) uses(what string, want ...string) {
	x.t.Helper()
	healthy := func(n, to *running) (out []string) {
		for _, q := range n.web.State().Leases.Rails.Pairs {
			if q.Peer == to.Boot().String() && q.Lanes > 0 && q.State == "healthy" {
				out = append(out, q.Path.Local)
			}
		}
		slices.Sort(out)
		return slices.Compact(out)
	}
	until(x.t, func() bool {
		x.move()
		a, b := healthy(x.p, x.d), healthy(x.d, x.p)
		ok := slices.Equal(a, want)
		for _, r := range b { // a receiver has learned no state of pairs that it never used
			ok = ok && slices.Contains(want, r)
		}
		return ok
	})
	x.t.Log(what, want)
}

// pass lets time pass, and reads the counters.
func (x *railPair) pass(d time.Duration) {
	x.late.Add(int64(d))
	x.p.rails.checkLinks()
}

// TestRailWithErrors: a rail whose interface counts errors is out of use at both ends within two
// readings, long before a transfer's time is over, and status and metrics name it. The last rail
// stays in use, however bad. After a quiet time the rail is used again.
func TestRailWithErrors(t *testing.T) {
	if !testutil.InNamespace(t) {
		return
	}
	veth(t, "rail0", "10.90.0.1/24")
	veth(t, "rail1", "10.91.0.1/24")
	root := t.TempDir()
	packets, errs := map[string]int{}, map[string]int{}
	count := func(nic string, more int) {
		t.Helper()
		packets[nic] += 1e6
		errs[nic] += more
		for name, n := range map[string]int{"statistics/rx_packets": packets[nic],
			"statistics/rx_errors": errs[nic]} {
			file := filepath.Join(root, "sys/class/net", nic, name)
			ok(t, os.MkdirAll(filepath.Dir(file), 0o700))
			ok(t, os.WriteFile(file+"~", fmt.Appendln(nil, n), 0o600))
			ok(t, os.Rename(file+"~", file))
		}
	}
	second := func(bad ...string) {
		t.Helper()
		for _, nic := range []string{"rail0", "rail1"} {
			count(nic, map[bool]int{true: 500}[slices.Contains(bad, nic)])
		}
	}
	second()
	x := newRailPair(t, root)
	x.uses("at the start", "rail0", "rail1")
	for range 2 {
		second("rail1")
		x.pass(linkLooks)
	}
	x.uses("with errors", "rail0")
	v := nodeOf(t, x.p)
	if v.Leaving || len(v.Health.Faults) != 1 || v.Health.Faults[0].Device != "interface rail1" ||
		!slices.ContainsFunc(v.Problems, func(s string) bool {
			return strings.Contains(s, "interface rail1: 500 errors in 1000500 packets")
		}) {
		t.Errorf("%+v", v)
	}
	if c := x.p.web.State().Routes[x.d.Boot().String()]; !slices.ContainsFunc(c,
		func(c route.Candidate) bool {
			return strings.HasPrefix(c.Why, "rail1 is out of use: errors: 500 errors")
		}) {
		t.Errorf("routes: %+v", c)
	}
	if f, up := value(t, x.p, "kvspray_rail_fault", "interface", "rail1", "kind", "errors"),
		value(t, x.p, "kvspray_rail_link_up", "transport", "tcp", "rail", "rail1"); f != 1 || up != 1 {
		t.Errorf("fault %v, link up %v", f, up)
	}
	for range 2 {
		second("rail0", "rail1")
		x.pass(linkLooks)
	}
	x.uses("both are bad", "rail0", "rail1")
	if v := nodeOf(t, x.p); len(v.Health.Faults) != 2 {
		t.Errorf("%+v", v.Health)
	}
	second()
	x.pass(time.Hour)
	if v := nodeOf(t, x.p); len(v.Health.Faults) != 0 {
		t.Errorf("an hour later: %+v", v.Health)
	}
	x.uses("later", "rail0", "rail1")
}

// TestFlappingRail: the kernel's own counters of an interface that loses its carrier again and
// again. Twice it is used again as soon as it is back; after the third time not until it was quiet.
func TestFlappingRail(t *testing.T) {
	if !testutil.InNamespace(t) {
		return
	}
	root := t.TempDir()
	sys := filepath.Join(root, "sys")
	ok(t, os.Mkdir(sys, 0o700))
	// /sys has the interfaces of the namespace in which it was mounted.
	if err := unix.Mount("sysfs", sys, "sysfs", unix.MS_RDONLY, ""); err != nil {
		testutil.Skip(t, "netns", "mount of sysfs: "+err.Error())
	}
	t.Cleanup(func() { ok(t, unix.Unmount(sys, unix.MNT_DETACH)) })
	veth(t, "rail0", "10.90.0.1/24")
	_, far := veth(t, "rail1", "10.91.0.1/24")
	x := newRailPair(t, root)
	x.uses("at the start", "rail0", "rail1")
	at := func(noLink, fault bool) {
		t.Helper()
		until(t, func() bool {
			r, _ := x.p.rails.find(config.TransTCP, "rail1")
			return r.noLink == noLink && (r.fault != "") == fault
		})
	}
	for k := range 3 {
		third := k == 2
		ok(t, netlink.LinkSetDown(far))
		at(true, third)
		x.move()
		ok(t, netlink.LinkSetUp(far))
		at(false, third)
		if !third {
			x.uses("after a loss", "rail0", "rail1")
		}
	}
	x.uses("after the third loss", "rail0")
	x.pass(25 * time.Second)
	at(false, true)
	x.pass(10 * time.Second)
	at(false, false)
	x.uses("after a quiet time", "rail0", "rail1")
}

// TestLinksOfBonds: the counters of a VLAN on a bond are those of the bond's parts, and an
// interface of RDMA is found by its device.
func TestLinksOfBonds(t *testing.T) {
	h := &topo.Host{NICs: []topo.NIC{{Name: "bond0", Kind: topo.Bond, Below: []string{"e0", "e1"}},
		{Name: "e0", Kind: topo.Physical}, {Name: "e1", Kind: topo.Physical, RDMA: "mlx5_1"},
		{Name: "storage", Kind: topo.VLAN, Below: []string{"bond0"}, Link: true}}}
	var names []string
	for _, n := range h.Carriers(h.NIC("storage")) {
		names = append(names, n.Name)
	}
	if !slices.Equal(names, []string{"e0", "e1"}) {
		t.Errorf("%q", names)
	}
	for port, want := range map[string]string{"mlx5_1": "e1", "mlx5_1/2": "e1", "mlx5_11": ""} {
		if got := nicOf(h, port); got != want {
			t.Errorf("%s is of %q, want %q", port, got, want)
		}
	}
}
