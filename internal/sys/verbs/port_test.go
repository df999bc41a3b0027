package verbs

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func gid(index int, t GIDType, addr string) GID {
	return GID{Index: index, Raw: netip.MustParseAddr(addr).As16(), Type: t, NetDev: "eth0"}
}

func TestChooseGID(t *testing.T) {
	const local, v6, v4 = "fe80::1", "2001:db8::1", "10.1.2.3"
	for _, c := range []struct {
		name     string
		link     string
		gids     []GID
		pinned   int
		want     int // -1: an error
		contains string
	}{
		{"mlx5 as it comes", "Ethernet", []GID{gid(0, GIDRoCEv1, local), gid(1, GIDRoCEv2, local),
			gid(2, GIDRoCEv1, v4), gid(3, GIDRoCEv2, v4)}, AutoGID, 3, v4},
		{"IPv6 before it", "Ethernet", []GID{gid(1, GIDRoCEv2, v6), gid(4, GIDRoCEv2, v4)},
			AutoGID, 4, v4},
		{"IPv6 only", "Ethernet", []GID{gid(0, GIDRoCEv2, local), gid(2, GIDRoCEv2, v6)}, AutoGID, 2, v6},
		{"two addresses", "Ethernet", []GID{gid(7, GIDRoCEv2, "10.1.2.4"), gid(5, GIDRoCEv2, v4)},
			AutoGID, 5, v4},
		{"RoCEv1 only", "Ethernet", []GID{gid(0, GIDRoCEv1, v4)}, AutoGID, -1,
			"enable RoCEv2 (cma_roce_mode), or pin a GID of [0] in transports.gdr.rails, as mlx5_0@INDEX"},
		{"routable v1, link-local v2", "Ethernet", []GID{gid(0, GIDRoCEv1, v4), gid(1, GIDRoCEv2, local)},
			AutoGID, -1, "give eth0 an IP address, or pin a GID of [0 1] in transports.gdr.rails, as " +
				"mlx5_0@INDEX"},
		{"pinned against it", "Ethernet", []GID{gid(0, GIDRoCEv1, v4), gid(3, GIDRoCEv2, v4)}, 0, 0,
			"configured"},
		{"pinned to nothing", "Ethernet", []GID{gid(0, GIDRoCEv1, v4)}, 9, -1, "pin one of [0] in " +
			"transports.gdr.rails, as mlx5_0@INDEX"},
		{"empty table", "Ethernet", nil, AutoGID, -1, "no GID"},
		{"InfiniBand", "InfiniBand", []GID{gid(0, GIDInfiniBand, local)}, AutoGID, 0, "InfiniBand"},
	} {
		got, why, err := ChooseGID(&Port{Device: "mlx5_0", Num: 1, Link: c.link, GIDs: c.gids}, c.pinned)
		if err != nil {
			why = err.Error()
			got.Index = -1
		}
		if got.Index != c.want || !strings.Contains(why, c.contains) {
			t.Errorf("%s: index %d, %q; want %d, %q", c.name, got.Index, why, c.want, c.contains)
		}
	}
}

func TestPorts(t *testing.T) {
	root := t.TempDir()
	write := func(file, text string) {
		path := filepath.Join(root, "sys/class/infiniband", file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Ports(root); err == nil || !strings.Contains(err.Error(), "no RDMA device") {
		t.Errorf("an empty host: %v", err)
	}
	const p = "mlx5_1/ports/2/"
	write(p+"link_layer", "Ethernet")
	write(p+"state", "4: ACTIVE")
	write(p+"lid", "0x12")
	write(p+"rate", "400 Gb/sec (4X NDR)")
	write("mlx5_1/device/numa_node", "1")
	write(p+"gids/3", "0000:0000:0000:0000:0000:ffff:0a01:0203")
	write(p+"gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001")
	write(p+"gids/1", "0000:0000:0000:0000:0000:0000:0000:0000")
	write(p+"gids/2", "0000:0000:0000:0000:0000:0000:0000:0000")
	write(p+"gid_attrs/types/3", "RoCE v2")
	write(p+"gid_attrs/types/0", "IB/RoCE v1")
	write(p+"gid_attrs/ndevs/3", "eth7")
	ports, err := Ports(root)
	if err != nil || len(ports) != 1 {
		t.Fatalf("%+v %v", ports, err)
	}
	x := ports[0]
	if x.Name() != "mlx5_1/2" || x.State != "ACTIVE" || x.LID != 0x12 || x.Gbps != 400 ||
		x.NUMA != 1 || len(x.GIDs) != 2 {
		t.Errorf("%+v", x)
	}
	if g := x.GIDs[1]; g.Index != 3 || g.Type != GIDRoCEv2 || g.Addr().String() != "10.1.2.3" ||
		g.NetDev != "eth7" || x.GIDs[0].Type != GIDRoCEv1 {
		t.Errorf("%+v", x.GIDs)
	}
}

func TestConfigCheck(t *testing.T) {
	good := Config{Device: "mlx5_0", Timer: DefaultTimer, Retries: DefaultRetries}
	if err := good.check(); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*Config){
		"device":  func(c *Config) { c.Device = "" },
		"MTU":     func(c *Config) { c.MTU = 6 },
		"timer":   func(c *Config) { c.Timer = 0 }, // which waits for ever
		"retries": func(c *Config) { c.Retries = 7 },
		"service": func(c *Config) { c.ServiceLevel = 16 },
	} {
		bad := good
		spoil(&bad)
		if err := bad.check(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCheckPeer(t *testing.T) {
	good := Address{GID: netip.MustParseAddr("10.0.0.1").As16(), QP: 17, PSN: 5, MTU: MTU4096,
		Type: GIDRoCEv2}
	if err := CheckPeer(good, good); err != nil {
		t.Fatal(err)
	}
	for contains, lie := range map[string]func(*Address){
		"RoCEv1 (10.0.0.1)":       func(a *Address) { a.Type = GIDRoCEv1 },
		"is not a host's address": func(a *Address) { a.GID = [16]byte{} },
		"224.0.0.1 is not a host's address": func(a *Address) {
			a.GID = netip.MustParseAddr(
				"224.0.0.1").As16()
		},
		"one is IPv4, one IPv6: pin a GID at one of them, in its transports.gdr.rails: " +
			"DEVICE@INDEX": func(a *Address) {
			a.GID = netip.MustParseAddr("2001:db8::1").As16()
		},
		"MTU number 6":              func(a *Address) { a.MTU = 6 },
		"MTU number 0":              func(a *Address) { a.MTU = 0 },
		"queue pair 0x0":            func(a *Address) { a.QP = 0 },
		"queue pair 0x1000000":      func(a *Address) { a.QP = 1 << 24 },
		"sequence number 0x1000000": func(a *Address) { a.PSN = 1 << 24 },
		"(10.0.0.1): pin a GID at one of them, in its transports.gdr.rails: DEVICE@INDEX": func(
			a *Address) {
			a.Type = GIDInfiniBand
		},
	} {
		bad := good
		lie(&bad)
		if err := CheckPeer(good, bad); err == nil || !strings.Contains(err.Error(), contains) {
			t.Errorf("%s: %v", contains, err)
		}
	}
	ib := Address{Type: GIDInfiniBand, QP: 1, MTU: 5}
	if err := CheckPeer(ib, ib); err == nil || !strings.Contains(err.Error(),
		"neither a LID nor a GID") {
		t.Error(err)
	}
	ib.LID = 9
	if err := CheckPeer(ib, ib); err != nil {
		t.Error(err)
	}
}

func TestParseRail(t *testing.T) {
	for s, want := range map[string]struct {
		device    string
		port, gid int
	}{"mlx5_0": {"mlx5_0", 1, AutoGID}, "mlx5_1/2": {"mlx5_1", 2, AutoGID},
		"rxe0@1": {"rxe0", 1, 1}, "mlx5_1/2@3": {"mlx5_1", 2, 3}} {
		device, port, gid, err := ParseRail(s)
		if err != nil || device != want.device || port != want.port || gid != want.gid {
			t.Errorf("%q: %q %d %d %v", s, device, port, gid, err)
		}
	}
	for _, s := range []string{"", "/1", "a/", "a/0", "a/256", "a@", "a@-1", "a@256", "a/1@x"} {
		if _, _, _, err := ParseRail(s); err == nil {
			t.Errorf("%q was taken", s)
		}
	}
}
