package doctor

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/kvspray/kvspray/internal/sys/topo"
	"github.com/kvspray/kvspray/internal/sys/verbs"
)

// What a host needs for RDMA at full speed.
const (
	fullMTU   = 4200      // of an interface, for RDMA packets of 4096 bytes
	smallBAR1 = 512 << 20 // GPUs for desktops map 256 MiB of their memory
	maxBARs   = 16
)

// RDMA makes the checks that concern RDMA, with more about each port than Run.
func RDMA(ctx context.Context, h *Host) (out []Result) {
	out = append(out, named("kernel", kernel(ctx, h)), named("transport gdr", transportGDR(ctx, h)))
	out = append(out, gdrRails(ctx, h)...)
	out = append(out, named("memlock", memlock(ctx, h)))
	ports, err := verbs.Ports(h.root())
	if err != nil {
		return out // a line of transportGDR
	}
	host, err := topo.Discover(topo.Options{Root: h.Root, Links: h.Links})
	if err != nil {
		host = &topo.Host{}
		out = append(out, named("topology", skip("", "%v", err)))
	}
	var nics []topo.Seat
	for i := range ports {
		p := &ports[i]
		seat := topo.SeatOf(h.Root, "class/infiniband", p.Device, "device")
		nics = append(nics, seat)
		out = append(out, named("device "+p.Name(), h.portDevice(p)))
		if p.Link == "Ethernet" {
			out = append(out, named("MTU "+p.Name(), h.portMTU(p)),
				named("congestion "+p.Name(), h.congestion(p)))
		}
		if seat.Address() != "" {
			out = append(out, named("PCIe "+p.Name(), h.pcie(seat.Address())))
		}
	}
	return append(out, h.gpuPaths(host, ports, nics)...)
}

func (h *Host) root() string {
	if h.Root == "" {
		return "/"
	}
	return h.Root
}

// text is the content of a file, or empty.
func (h *Host) text(path ...string) string {
	s, err := h.read(filepath.Join(path...))
	if err != nil {
		return ""
	}
	return s
}

func (h *Host) portDevice(p *verbs.Port) Result {
	dir := "/sys/class/infiniband/" + p.Device
	parts := []string{"driver unknown"}
	if driver, err := os.Readlink(h.path(dir + "/device/driver")); err == nil {
		parts[0] = "driver " + filepath.Base(driver)
	} else if h.text(dir, "parent") != "" { // soft-RoCE and siw name the interface below them
		parts[0] = "a software device"
	}
	for _, x := range []struct{ name, file string }{{"firmware", "fw_ver"}, {"board", "board_id"},
		{"type", "hca_type"}} {
		if s := h.text(dir, x.file); s != "" {
			parts = append(parts, x.name+" "+s)
		}
	}
	if vendor, id := h.text(dir, "device/vendor"), h.text(dir, "device/device"); vendor != "" {
		parts = append(parts, fmt.Sprintf("PCI id %s:%s", strings.TrimPrefix(vendor, "0x"),
			strings.TrimPrefix(id, "0x")))
	}
	if p.NUMA >= 0 {
		parts = append(parts, fmt.Sprintf("NUMA node %d", p.NUMA))
	}
	return good("%s", strings.Join(parts, ", "))
}

// netDev is the interface of a port.
func netDev(p *verbs.Port) string {
	for _, g := range p.GIDs {
		if g.NetDev != "" {
			return g.NetDev
		}
	}
	return ""
}

func (h *Host) portMTU(p *verbs.Port) Result {
	dev := netDev(p)
	mtu, err := strconv.Atoi(h.text("/sys/class/net", dev, "mtu"))
	if dev == "" || err != nil {
		return skip("", "its network interface is not in the table of GIDs")
	}
	if mtu < fullMTU {
		return warn(fmt.Sprintf("ip link set %s mtu %d, there, at the peers and on every switch between "+
			"them", dev, fullMTU), "%s has an MTU of %d: packets of RDMA have less than 4096 bytes", dev,
			mtu)
	}
	return good("%s has an MTU of %d: packets of 4096 bytes", dev, mtu)
}

// congestion reports what keeps packets from being lost: PFC and ECN, and what their counters have.
func (h *Host) congestion(p *verbs.Port) Result {
	dev := netDev(p)
	var parts []string
	lossless := false
	if h.Root == "" {
		if enabled, err := topo.PFC(dev); err == nil {
			lossless = enabled != 0
			parts = append(parts, "PFC "+priorities(enabled))
		}
	}
	if len(parts) == 0 {
		parts = append(parts, "PFC unknown (the driver does not report it)")
	}
	ecn := ""
	for _, point := range []string{"roce_np", "roce_rp"} {
		var on []string
		for prio := range 8 {
			if h.text("/sys/class/net", dev, "ecn", point, "enable", strconv.Itoa(prio)) == "1" {
				on = append(on, strconv.Itoa(prio))
			}
		}
		if len(on) > 0 {
			ecn += fmt.Sprintf(" %s %s", point, strings.Join(on, " "))
		}
	}
	if ecn != "" {
		parts = append(parts, "ECN"+ecn)
	}
	lost := 0
	base := fmt.Sprintf("/sys/class/infiniband/%s/ports/%d/hw_counters", p.Device, p.Num)
	for _, c := range []struct {
		name string
		loss bool
	}{{"np_cnp_sent", false}, {"rp_cnp_handled", false}, {"np_ecn_marked_roce_packets", false},
		{"out_of_sequence", true}, {"packet_seq_err", true}, {"local_ack_timeout_err", true},
		{"rnr_nak_retry_err", false}, {"rx_icrc_encapsulated", false}, {"retry_exceeded_err", false}} {
		if n, err := strconv.Atoi(h.text(base, c.name)); err == nil && n > 0 {
			parts = append(parts, fmt.Sprintf("%s %d", c.name, n))
			if c.loss {
				lost += n
			}
		}
	}
	if lost > 0 && !lossless {
		return warn("enable PFC on one priority and ECN (DCQCN) on interfaces and switches, and set "+
			"transports.gdr.traffic_class to its DSCP times four", "packets were lost since the driver "+
			"started: %s", strings.Join(parts, ", "))
	}
	return good("%s", strings.Join(parts, ", "))
}

func priorities(enabled byte) string {
	if enabled == 0 {
		return "off"
	}
	var on []string
	for i := range 8 {
		if enabled&(1<<i) != 0 {
			on = append(on, strconv.Itoa(i))
		}
	}
	return "on priority " + strings.Join(on, " ")
}

// PCI configuration space (PCI Express Base Specification).
const (
	maxConfig       = 4096
	capPointer      = 0x34
	capPCIe         = 0x10
	maxCaps         = 48
	deviceControl   = 8 // of the capability
	relaxedOrdering = 1 << 4
	extendedStart   = 0x100
	extendedACS     = 0x0d
	acsControl      = 6
	// Requests, or completions, between devices below a switch go up to the root complex.
	acsRedirect = 1<<2 | 1<<3
)

func (h *Host) config(address string) []byte {
	f, err := os.Open(h.path("/sys/bus/pci/devices/" + address + "/config"))
	if err != nil {
		return nil
	}
	defer func() { _ = f.Close() }() // read only
	b, err := io.ReadAll(io.LimitReader(f, maxConfig))
	if err != nil {
		return nil
	}
	return b
}

// ordering reads whether a device may use relaxed ordering. false: it was not readable.
func ordering(config []byte) (relaxed, known bool) {
	if len(config) <= capPointer {
		return false, false
	}
	for at, n := int(config[capPointer]), 0; at >= 0x40 && at+deviceControl+2 <= len(config) &&
		n < maxCaps; n++ {
		if config[at] == capPCIe {
			return binary.LittleEndian.Uint16(config[at+deviceControl:])&relaxedOrdering != 0, true
		}
		at = int(config[at+1])
	}
	return false, false
}

// redirects reads whether ACS of a bridge sends traffic between its devices to the root complex.
func redirects(config []byte) (yes, known bool) {
	if len(config) < maxConfig {
		return false, false // without the privilege the kernel shows 64 bytes
	}
	for at, n := extendedStart, 0; at >= extendedStart && at+8 <= len(config) && n < maxCaps; n++ {
		head := binary.LittleEndian.Uint32(config[at:])
		if head&0xffff == extendedACS {
			return binary.LittleEndian.Uint16(config[at+acsControl:])&acsRedirect != 0, true
		}
		at = int(head >> 20)
	}
	return false, true // it has none
}

// pcie reports a NIC's slot.
func (h *Host) pcie(address string) Result {
	dir := "/sys/bus/pci/devices/" + address
	speed, width := h.text(dir, "current_link_speed"), h.text(dir, "current_link_width")
	maxSpeed, maxWidth := h.text(dir, "max_link_speed"), h.text(dir, "max_link_width")
	what := address
	if speed != "" {
		what += fmt.Sprintf(", %s x%s", speed, width)
	}
	switch relaxed, known := ordering(h.config(address)); {
	case !known:
		what += ", relaxed ordering unknown (run as root)"
	case relaxed:
		what += ", relaxed ordering on"
	default:
		what += ", relaxed ordering off"
		return warn("setpci -s "+address+" CAP_EXP+8.w=10:10, or PCI_WR_ORDERING in the firmware's "+
			"settings: without it many hosts write at half the rate", "%s", what)
	}
	if speed != "" && (speed != maxSpeed || width != maxWidth) && maxSpeed != "" {
		return warn("put the NIC into a slot of that width, or reseat it; look for PCIe errors in the "+
			"kernel's log", "%s, of %s x%s", what, maxSpeed, maxWidth)
	}
	return good("%s", what)
}

// gpuPaths reports how each GPU reaches the nearest NIC, how NICs can reach its memory, and what is
// in the way.
func (h *Host) gpuPaths(host *topo.Host, ports []verbs.Port, nics []topo.Seat) (out []Result) {
	if len(host.GPUs) == 0 {
		return []Result{named("GPU memory", skip("", "no GPU"))}
	}
	peermem := strings.Contains("\n"+h.text("/proc/modules"), "\nnvidia_peermem ")
	open := strings.Contains(h.text("/proc/driver/nvidia/version"), "Open Kernel Module")
	how := "peermem loaded"
	if !peermem {
		how = "peermem not loaded"
	}
	if open {
		how += ", open kernel modules (dma-buf)"
	} else {
		how += ", no open kernel modules (no dma-buf)"
	}
	if !peermem && !open {
		out = append(out, named("GPU memory", warn("load nvidia-peermem, or install NVIDIA's open "+
			"kernel modules (515 or later, with Linux 5.12 and rdma-core 34)", "%s", how)))
	} else {
		out = append(out, named("GPU memory", good("%s", how)))
	}
	for i := range host.GPUs {
		g := &host.GPUs[i]
		name := "GPU " + g.PCI
		best, nearest := topo.NotKnown, -1
		for k := range nics {
			if d := topo.Between(nics[k], g.Seat); d != topo.NotKnown && (best == topo.NotKnown ||
				d < best) {
				best, nearest = d, k
			}
		}
		what := "no NIC near it is known"
		var acs []string
		if nearest >= 0 {
			what = fmt.Sprintf("nearest NIC %s (%s)", ports[nearest].Name(), best)
			acs = h.redirecting(g.Seat, nics[nearest])
		}
		bar := h.bar1(g.PCI)
		if bar > 0 {
			what += fmt.Sprintf(", BAR1 %s", bytesText(bar))
		}
		if t := h.text("/sys/bus/pci/devices", g.PCI, "iommu_group/type"); strings.HasPrefix(t, "DMA") {
			what += ", IOMMU translates (" + t + ")"
		}
		switch {
		case len(acs) > 0:
			out = append(out, named(name, warn("switch ACS off on them: setpci -s ADDRESS "+
				"ECAP_ACS+6.w=0000, or in the BIOS; under a hypervisor use ATS", "%s; ACS of %s sends "+
				"its traffic through the root complex", what, strings.Join(acs, ", "))))
		case bar > 0 && bar <= smallBAR1:
			out = append(out, named(name, warn("enable 'Above 4G decoding' and 'Resizable BAR' in the "+
				"BIOS: a cache larger than BAR1 cannot be registered", "%s", what)))
		case best == topo.System:
			out = append(out, named(name, warn("put a NIC below the GPU's NUMA node, or pin the "+
				"engine's rails",
				"%s: another NUMA node", what)))
		default:
			out = append(out, named(name, good("%s", what)))
		}
	}
	return out
}

// redirecting are the bridges between two devices whose ACS sends traffic to the root complex.
func (h *Host) redirecting(a, b topo.Seat) (out []string) {
	common := 0
	for common < min(len(a.Path), len(b.Path)) && a.Path[common] == b.Path[common] {
		common++
	}
	for _, s := range []topo.Seat{a, b} {
		if common >= len(s.Path) {
			continue
		}
		for _, bridge := range s.Path[max(common, 1) : len(s.Path)-1] {
			if yes, _ := redirects(h.config(bridge)); yes && !slices.Contains(out, bridge) {
				out = append(out, bridge)
			}
		}
	}
	return out
}

// bar1 is the size of a GPU's window into its memory; 0: unknown.
func (h *Host) bar1(address string) uint64 {
	n := 0
	for line := range strings.Lines(h.text("/sys/bus/pci/devices", address, "resource")) {
		if n++; n > maxBARs {
			break
		}
		f := strings.Fields(line)
		if n != 2 || len(f) != 3 {
			continue
		}
		first, err1 := strconv.ParseUint(f[0], 0, 64)
		last, err2 := strconv.ParseUint(f[1], 0, 64)
		if err1 == nil && err2 == nil && last > first {
			return last - first + 1
		}
	}
	return 0
}
