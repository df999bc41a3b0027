package doctor

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/topo"
)

// pciConfig is the configuration space of a device, or of a bridge with ACS.
func pciConfig(control uint16, acs ...uint16) string {
	b := make([]byte, maxConfig)
	b[capPointer] = 0x50
	b[0x50], b[0x51] = 0x05, 0x70 // another capability first
	b[0x70] = capPCIe
	binary.LittleEndian.PutUint16(b[0x70+deviceControl:], control)
	binary.LittleEndian.PutUint32(b[extendedStart:], 0x0001|0x140<<20)
	if len(acs) > 0 {
		binary.LittleEndian.PutUint32(b[0x140:], extendedACS)
		binary.LittleEndian.PutUint16(b[0x140+acsControl:], acs[0])
	}
	return string(b)
}

// rdmaHost is a host with a NIC and a GPU below one switch. change edits the files.
func rdmaHost(t *testing.T, change func(files map[string]string)) *Host {
	t.Helper()
	const (
		up   = "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/"
		nic  = up + "0000:17:00.0/0000:18:00.0/"
		gpu  = up + "0000:17:02.0/0000:1b:00.0/"
		ib   = nic + "infiniband/mlx5_0/"
		port = ib + "ports/1/"
		eth  = nic + "net/ens1/"
	)
	files := map[string]string{
		"sys/devices/system/node/online": "0-1", nic + "numa_node": "0", gpu + "numa_node": "0",
		gpu + "vendor": "0x10de", gpu + "class": "0x030200",
		gpu + "resource": "0x0 0xffffff 0x0\n0x2000000000 0x3fffffffff 0x0\n",
		nic + "vendor":   "0x15b3", nic + "device": "0x1021", nic + "config": pciConfig(relaxedOrdering),
		nic + "current_link_speed": "32.0 GT/s PCIe", nic + "current_link_width": "16",
		nic + "max_link_speed": "32.0 GT/s PCIe", nic + "max_link_width": "16",
		up + "0000:17:00.0/config": pciConfig(0), up + "0000:17:02.0/config": pciConfig(0, 0),
		ib + "fw_ver": "28.39.1002", ib + "board_id": "MT_0000000838",
		port + "state": "4: ACTIVE", port + "link_layer": "Ethernet",
		port + "rate":   "400 Gb/sec (4X NDR)",
		port + "gids/0": "0000:0000:0000:0000:0000:ffff:0a00:0005", port + "gid_attrs/types/0": "RoCE v2",
		port + "gid_attrs/ndevs/0": "ens1", eth + "mtu": "9000", eth + "speed": "400000",
		eth + "ecn/roce_np/enable/3": "1",
		"proc/modules":               "nvidia_peermem 16384 0 - Live 0x0\n",
		"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54",
	}
	change(files)
	h := root(t, files)
	for from, to := range map[string]string{"sys/class/infiniband/mlx5_0": ib,
		ib + "device": nic, "sys/bus/pci/devices/0000:18:00.0": nic,
		"sys/bus/pci/devices/0000:1b:00.0": gpu,
		"sys/bus/pci/devices/0000:17:00.0": up + "0000:17:00.0",
		"sys/bus/pci/devices/0000:17:02.0": up + "0000:17:02.0", "sys/class/net/ens1": eth} {
		at := filepath.Join(h.Root, from)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(filepath.Join(h.Root, to), at); err != nil {
			t.Fatal(err)
		}
	}
	h.Links = func() ([]topo.Link, error) { return nil, nil }
	return h
}

// Each thing that makes RDMA slow or impossible has a line with its remedy.
func TestRDMAHost(t *testing.T) {
	const dev = "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/"
	for _, x := range []struct {
		name, line, detail, remedy string
		change                     func(files map[string]string)
	}{
		{name: "sound", line: "device mlx5_0", detail: "firmware 28.39.1002"},
		{name: "sound", line: "PCIe mlx5_0", detail: "32.0 GT/s PCIe x16, relaxed ordering on"},
		{name: "sound", line: "MTU mlx5_0", detail: "packets of 4096 bytes"},
		{name: "sound", line: "congestion mlx5_0", detail: "ECN roce_np 3"},
		{name: "sound", line: "GPU 0000:1b:00.0", detail: "nearest NIC mlx5_0 (PIX), BAR1 128.0 GiB"},
		{name: "sound", line: "GPU memory", detail: "peermem loaded, open kernel modules"},
		{"MTU", "MTU mlx5_0", "ens1 has an MTU of 1500", "mtu 4200", func(f map[string]string) {
			f[dev+"0000:17:00.0/0000:18:00.0/net/ens1/mtu"] = "1500"
		}},
		{"losses", "congestion mlx5_0", "packet_seq_err 12", "DCQCN", func(f map[string]string) {
			f[dev+"0000:17:00.0/0000:18:00.0/infiniband/mlx5_0/ports/1/hw_counters/packet_seq_err"] = "12"
		}},
		{"no relaxed ordering", "PCIe mlx5_0", "relaxed ordering off", "setpci",
			func(f map[string]string) { f[dev+"0000:17:00.0/0000:18:00.0/config"] = pciConfig(0) }},
		{"few lanes", "PCIe mlx5_0", "x8, relaxed ordering on, of 32.0 GT/s PCIe x16", "slot",
			func(f map[string]string) { f[dev+"0000:17:00.0/0000:18:00.0/current_link_width"] = "8" }},
		{"ACS", "GPU 0000:1b:00.0", "ACS of 0000:17:02.0", "ECAP_ACS", func(f map[string]string) {
			f[dev+"0000:17:02.0/config"] = pciConfig(0, 0x1d)
		}},
		{"small BAR1", "GPU 0000:1b:00.0", "BAR1 256.0 MiB", "Resizable BAR", func(f map[string]string) {
			f[dev+"0000:17:02.0/0000:1b:00.0/resource"] = "0x0 0xffffff 0x0\n0x20000000 0x2fffffff 0x0\n"
		}},
		{"no way to GPU memory", "GPU memory", "peermem not loaded, no open", "load nvidia-peermem",
			func(f map[string]string) {
				f["proc/modules"], f["proc/driver/nvidia/version"] = "", "NVRM version: NVIDIA UNIX"
			}},
		{"no GID", "gdr rail mlx5_0", "has no GID", "assign an IP address", func(f map[string]string) {
			f[dev+"0000:17:00.0/0000:18:00.0/infiniband/mlx5_0/ports/1/gids/0"] =
				"0000:0000:0000:0000:0000:0000:0000:0000"
		}},
	} {
		change := x.change
		if change == nil {
			change = func(map[string]string) {}
		}
		var found *Result
		for _, r := range RDMA(t.Context(), rdmaHost(t, change)) {
			if r.Name == x.line {
				found = &r
			}
		}
		state := OK
		if x.remedy != "" {
			state = Warn
		}
		if found == nil || found.State != state || !strings.Contains(found.Detail, x.detail) ||
			!strings.Contains(found.Remedy, x.remedy) {
			t.Errorf("%s: %+v: want %s with %q and the remedy %q", x.name, found, state, x.detail, x.remedy)
		}
	}
}

// Configuration spaces that are short, or whose lists have no end, are unknown.
func TestForeignConfigurationSpace(t *testing.T) {
	loop := []byte(pciConfig(0))
	loop[0x70], loop[0x71] = 0x09, 0x50
	binary.LittleEndian.PutUint32(loop[extendedStart:], 0x0001|extendedStart<<20)
	for _, b := range [][]byte{nil, loop[:10], loop[:64], loop, make([]byte, maxConfig)} {
		if _, known := ordering(b); known {
			t.Errorf("%d bytes have no PCIe capability", len(b))
		}
		if yes, _ := redirects(b); yes {
			t.Errorf("%d bytes have no ACS", len(b))
		}
	}
}
