package topo

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// machine builds /sys of a machine in testdata, and returns where to look.
func machine(t testing.TB, name string) Options {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	sys := func(p ...string) string { return filepath.Join(append([]string{root, "sys"}, p...)...) }
	put := func(content string, p ...string) {
		t.Helper()
		must(t, os.MkdirAll(filepath.Dir(sys(p...)), 0o700))
		must(t, os.WriteFile(sys(p...), []byte(content+"\n"), 0o600))
	}
	link := func(from, to string) {
		t.Helper()
		must(t, os.MkdirAll(filepath.Dir(sys(from)), 0o700))
		rel, err := filepath.Rel(filepath.Dir(sys(from)), sys(to))
		must(t, err)
		must(t, os.Symlink(rel, sys(from)))
	}
	device := func(path, node, vendor, class string) string {
		dev := filepath.Join("devices", path)
		must(t, os.MkdirAll(sys(dev), 0o700))
		pci := dev
		for !pciAddress.MatchString(filepath.Base(pci)) {
			pci = filepath.Dir(pci)
		}
		put(node, pci, "numa_node")
		put(vendor, pci, "vendor")
		put(class, pci, "class")
		link(filepath.Join("bus/pci/devices", filepath.Base(pci)), pci)
		return dev
	}
	var links []Link
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] == "#" {
			continue
		}
		switch f[0] {
		case "nodes":
			put(f[1], "devices/system/node/online")
		case "gpu":
			device(f[1], f[2], "0x10de", "0x030200")
		case "nic":
			dev := device(f[2], f[3], "0x15b3", "0x020000")
			put(f[4], "class/net", f[1], "speed")
			if len(f) > 5 {
				put("", dev, "infiniband", f[5], "name")
			}
			link(filepath.Join("class/net", f[1], "device"), dev)
		case "virtio":
			link(filepath.Join("class/net", f[1], "device"), device(f[2], f[3], "0x1af4", "0x020000"))
		case "file":
			put(f[2], f[1])
		case "link":
			l := Link{Name: f[1], Index: number(t, f[2]), Kind: Kind(f[3]), MTU: number(t, f[4]),
				Admin: true, Link: f[5] == "up"}
			for _, x := range f[6:] {
				if v, ok := strings.CutPrefix(x, "master="); ok {
					l.Master = number(t, v)
				} else if v, ok := strings.CutPrefix(x, "parent="); ok {
					l.Parent = number(t, v)
				} else {
					l.Addrs = append(l.Addrs, netip.MustParsePrefix(x))
				}
			}
			links = append(links, l)
		default:
			t.Fatalf("%s: what is %q?", name, f[0])
		}
	}
	return Options{Root: root, Links: func() ([]Link, error) { return slices.Clone(links), nil }}
}

func number(t testing.TB, s string) int {
	n, err := strconv.Atoi(s)
	must(t, err)
	return n
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func discover(t testing.TB, opt Options) *Host {
	t.Helper()
	h, err := Discover(opt)
	must(t, err)
	for _, e := range h.Trouble {
		t.Error(e)
	}
	return h
}

func TestHGX(t *testing.T) {
	h := discover(t, machine(t, "hgx-h100"))
	if len(h.GPUs) != 8 || !slices.Equal(h.Nodes, []int{0, 1}) {
		t.Fatalf("%d GPUs, nodes %v", len(h.GPUs), h.Nodes)
	}
	// Each GPU has one NIC behind its switch, three on its socket, four across.
	for i, g := range h.GPUs {
		for k := range 8 {
			n := h.NIC(fmt.Sprintf("ens%dnp0", k+1))
			want, tier := System, Far
			switch {
			case i == k:
				want, tier = Switch, Near
			case i/4 == k/4:
				want, tier = SameNode, Middle
			}
			if d := Between(n.Seats[0], g.Seat); d != want {
				t.Errorf("GPU %s and %s are %s apart, want %s", g.PCI, n.Name, d, want)
			}
			if got := h.Tier(n, Memory{GPU: g.PCI}); got != tier {
				t.Errorf("GPU %s, %s: tier %d, want %d", g.PCI, n.Name, got, tier)
			}
		}
	}
	n := h.NIC("ens6np0")
	if n.Mbps != 400000 || n.MTU != 9000 || n.Node != 1 || n.RDMA != "mlx5_9" ||
		n.Seats[0].Address() != "0000:c0:00.0" {
		t.Errorf("%+v", n)
	}
	for _, x := range []struct {
		nic  string
		m    Memory
		tier int
	}{
		{"ens6np0", Memory{Node: 1}, Middle},
		{"ens6np0", Memory{Node: 0}, Far},
		{"ens6np0", Memory{Node: Unknown}, Middle},
		{"storage", Memory{Node: 0}, Middle}, // a VLAN on a bond of two ports of node 0
		{"storage", Memory{Node: 1}, Far},
		{"storage", Memory{GPU: "0000:1b:00.0"}, Middle},
		{"storage", Memory{GPU: "0000:df:00.0"}, Far},
		{"eno1", Memory{GPU: "0000:1b:00.0"}, Middle},
		{"lo", Memory{GPU: "0000:1b:00.0"}, Near},
		{"ens1np0", Memory{GPU: "no such GPU"}, Middle},
	} {
		if got := h.Tier(h.NIC(x.nic), x.m); got != x.tier {
			t.Errorf("%s, memory %+v: tier %d, want %d", x.nic, x.m, got, x.tier)
		}
	}
	s := h.NIC("storage")
	if len(s.Seats) != 2 || s.Node != 0 || Between(s.Seats[0], s.Seats[1]) != Switch {
		t.Errorf("a VLAN on a bond sits at %v, node %d", s.Seats, s.Node)
	}
}

// What would be a rail, and why not.
func TestRoutes(t *testing.T) {
	for _, x := range []struct{ machine, nic, want string }{
		{"hgx-h100", "ens1np0", "192.168.1.11/24"},
		{"hgx-h100", "storage", "10.9.0.11/16"},
		{"hgx-h100", "ens9f0np0", "a port of bond0"},
		{"hgx-h100", "bond0", "no address"},
		{"hgx-h100", "docker0", "a bridge between containers"},
		{"hgx-h100", "veth1a2b", "a port of docker0"},
		{"hgx-h100", "lo", "the loopback interface leads nowhere"},
		{"h200-vm", "eth0", "192.0.2.2/24"},
		{"h200-vm", "ifb0", "of kind ifb"},
		{"pod", "eth0", "10.244.1.7/24"},
		{"pod", "net1", "2001:db8:1::7/64"},
		{"pod", "tunl0", "of kind ipip"},
	} {
		h := discover(t, machine(t, x.machine))
		p, err := h.NIC(x.nic).Route()
		got := p.String()
		if err != nil {
			got = err.Error()
		}
		if !strings.HasPrefix(got, x.want) {
			t.Errorf("%s of %s: %q, want %q", x.nic, x.machine, got, x.want)
		}
	}
}

// Where nothing is known nothing is far: every tier is the same, and the one node that there is is
// the node.
func TestVirtualMachine(t *testing.T) {
	h := discover(t, machine(t, "h200-vm"))
	n := h.NIC("eth0")
	if n.Mbps != 0 || n.Node != 0 || len(h.GPUs) != 1 || h.GPUs[0].Seat.Node != 0 {
		t.Errorf("%+v, %+v", n, h.GPUs)
	}
	if d := Between(n.Seats[0], h.GPUs[0].Seat); d != HostBridge {
		t.Errorf("%s", d)
	}
	for _, m := range []Memory{{GPU: "0000:00:06.0"}, {Node: 0}, {Node: Unknown}} {
		if got := h.Tier(n, m); got != Middle {
			t.Errorf("%+v: tier %d", m, got)
		}
	}
	h = discover(t, machine(t, "pod"))
	if n := h.NIC("eth0"); n.Node != Unknown || h.Tier(n, Memory{Node: 1}) != Middle || n.Mbps != 0 {
		t.Errorf("%+v", n)
	}
}

func TestBetween(t *testing.T) {
	at := func(node int, path string) Seat {
		s := Seat{Node: node}
		if path != "" {
			s.Path = strings.Split(path, "/")
		}
		return s
	}
	for _, x := range []struct {
		a, b Seat
		want Distance
	}{
		{at(0, "pci0000:15/0000:15:01.0/0000:18:00.0"), at(0, "pci0000:15/0000:15:01.0/0000:18:00.0"),
			Switch},
		{at(0, "pci0000:15/0000:15:01.0/0000:18:00.0"), at(0, "pci0000:15/0000:15:01.0/0000:18:00.1"),
			Switch},
		{at(0, "pci0000:15/0000:15:01.0/a/b/c/dev"), at(0, "pci0000:15/0000:15:01.0/a/x/dev"), Switches},
		{at(0, "pci0000:15/0000:15:01.0/dev"), at(0, "pci0000:15/0000:15:02.0/dev"), HostBridge},
		{at(0, "pci0000:15/0000:15:01.0/dev"), at(0, "pci0000:16/0000:15:02.0/dev"), SameNode},
		{at(0, "pci0000:15/0000:15:01.0/dev"), at(1, "pci0000:16/0000:15:02.0/dev"), System},
		{at(Unknown, "pci0000:15/0000:15:01.0/dev"), at(1, "pci0000:16/0000:15:02.0/dev"), NotKnown},
		{at(0, ""), at(0, ""), SameNode},
		{at(0, ""), at(Unknown, ""), NotKnown},
	} {
		if a, b := Between(x.a, x.b), Between(x.b, x.a); a != x.want || b != x.want {
			t.Errorf("%v and %v: %s and %s, want %s", x.a, x.b, a, b, x.want)
		}
	}
}

func TestDiff(t *testing.T) {
	nic := func(name string, index int, link bool, addrs ...string) NIC {
		n := NIC{Name: name, Index: index, Admin: true, Link: link, Node: Unknown}
		for _, a := range addrs {
			n.Addrs = append(n.Addrs, netip.MustParsePrefix(a))
		}
		return n
	}
	old := &Host{NICs: []NIC{nic("a", 1, true), nic("b", 2, true), nic("c", 3, false),
		nic("d", 4, true), nic("e", 5, true), nic("f", 6, true)}}
	now := &Host{NICs: []NIC{nic("a", 1, true), nic("b", 2, false), nic("c", 3, true),
		nic("d", 14, true), nic("e", 5, true, "10.0.0.1/8"), nic("g", 7, false)}}
	var got []string
	for _, e := range Diff(old, now) {
		got = append(got, e.NIC.Name+" "+e.Change.String())
	}
	want := []string{"d vanished", "f vanished", "b down", "c up", "d appeared", "e changed",
		"g appeared"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if e := Diff(now, now); len(e) != 0 {
		t.Errorf("nothing happened: %v", e)
	}
}

// More interfaces than any host has, names that the tree lacks, malformed lists:
// bounded, logged, and the rest stands.
func TestMalformedSysfs(t *testing.T) {
	var many []Link
	for i := range 10 * MaxNICs {
		many = append(many, Link{Name: fmt.Sprint("veth", i), Index: i + 1, Kind: Veth, Master: 1 << 20})
	}
	h, err := Discover(Options{Root: t.TempDir(), Links: func() ([]Link, error) { return many, nil }})
	must(t, err)
	if len(h.NICs) != MaxNICs || len(h.Trouble) != 1 {
		t.Errorf("%d interfaces, trouble %v", len(h.NICs), h.Trouble)
	}
	opt := machine(t, "pod")
	must(t, os.WriteFile(filepath.Join(opt.Root, "sys/devices/system/node/online"),
		[]byte("0-99999999\n"), 0o600))
	if h := discover(t, opt); len(h.Nodes) != 0 {
		t.Errorf("%d nodes", len(h.Nodes))
	}
	broken := errors.New("broken")
	if _, err := Discover(Options{Links: func() ([]Link, error) { return nil, broken },
		GPUs: func() ([]GPU, error) { return nil, nil }}); !errors.Is(err, broken) {
		t.Errorf("%v", err)
	}
	opt.GPUs = func() ([]GPU, error) {
		return []GPU{{PCI: "0000:aa:00.0", Index: 3, UUID: "GPU-x", Name: "n"}}, broken
	}
	h, err = Discover(opt)
	must(t, err)
	if len(h.Trouble) != 1 || h.GPU("3") == nil || h.GPU("GPU-x") != h.GPU("0000:aa:00.0") ||
		h.GPU("3").Seat.Node != Unknown {
		t.Errorf("%v, %+v", h.Trouble, h.GPUs)
	}
}

// Interfaces made of each other without end.
func TestLoopOfInterfaces(t *testing.T) {
	root := t.TempDir()
	for _, p := range []string{"a/lower_b", "b/lower_a"} {
		must(t, os.MkdirAll(filepath.Join(root, "sys/class/net", p), 0o700))
	}
	h, err := Discover(Options{Root: root, Links: func() ([]Link, error) {
		return []Link{{Name: "a", Index: 1, Kind: VLAN}, {Name: "b", Index: 2, Kind: Bond}}, nil
	}})
	must(t, err)
	if len(h.NICs) != 2 || len(h.NICs[0].Seats) != 0 {
		t.Errorf("%+v", h.NICs)
	}
}

// This machine can be looked at, whatever it is.
func TestHere(t *testing.T) {
	h, err := Discover(Options{})
	must(t, err)
	lo := h.At(netip.MustParseAddr("127.0.0.53"))
	if lo == nil || lo.Kind != Loopback || !lo.Link {
		t.Errorf("loopback: %+v", lo)
	}
	for _, n := range h.NICs {
		t.Logf("%+v", n)
	}
	for _, g := range h.GPUs {
		t.Logf("%+v", g)
	}
}
