package verbs

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// GIDType is the kind of packets of a GID.
type GIDType uint8

// The types of GIDs.
const (
	GIDInfiniBand GIDType = iota + 1
	GIDRoCEv1             // Ethernet frames that no router forwards
	GIDRoCEv2             // UDP
)

func (t GIDType) String() string {
	switch t {
	case GIDInfiniBand:
		return "IB"
	case GIDRoCEv1:
		return "RoCEv1"
	case GIDRoCEv2:
		return "RoCEv2"
	}
	return fmt.Sprintf("gid type %d", uint8(t))
}

// GID is one entry of a port's table.
type GID struct {
	Index  int
	Raw    [16]byte
	Type   GIDType
	NetDev string // the interface that it belongs to
}

// Addr is the GID as an IP address; an IPv4 address if it represents one.
func (g GID) Addr() netip.Addr { return netip.AddrFrom16(g.Raw).Unmap() }

// Port is one port of an RDMA device, as sysfs shows it.
type Port struct {
	Device string
	Num    int
	State  string // "ACTIVE", "DOWN" ...
	Link   string // "Ethernet" or "InfiniBand"
	LID    uint16
	Gbps   float64
	NUMA   int // -1: unknown
	GIDs   []GID
}

// Name is the device's name, with the port's number unless it is the first.
func (p *Port) Name() string {
	if p.Num == 1 {
		return p.Device
	}
	return fmt.Sprintf("%s/%d", p.Device, p.Num)
}

// ParseRail parses device[/port][@gid index].
func ParseRail(s string) (device string, port, gid int, err error) {
	bad := func() (string, int, int, error) {
		return "", 0, 0, fmt.Errorf("verbs: rail %q: write device, device/port or device/port@gid-index"+
			", for instance mlx5_0 or mlx5_1/2@3", s)
	}
	port, gid = 1, AutoGID
	s0, index, pinned := strings.Cut(s, "@")
	device, num, numbered := strings.Cut(s0, "/")
	if device == "" {
		return bad()
	}
	if numbered {
		if port, err = strconv.Atoi(num); err != nil || port < 1 || port > 255 {
			return bad()
		}
	}
	if pinned {
		if gid, err = strconv.Atoi(index); err != nil || gid < 0 || gid > 255 {
			return bad()
		}
	}
	return device, port, gid, nil
}

// ErrNoDevices: this kernel shows no RDMA device.
var ErrNoDevices = errors.New("no RDMA device: is the NIC's driver loaded, and " +
	"/sys/class/infiniband visible in this container?")

const (
	maxPorts = 64   // of a host
	maxGIDs  = 4096 // of a port
	// maxGap ends the search of a table, which may have a thousand entries with a file each: the
	// kernel fills the first free one, so entries after that many empty ones can only be left over
	// from a time with that many addresses.
	maxGap = 64
)

// Ports lists the ports of this host. root is "/" except in tests.
func Ports(root string) ([]Port, error) {
	base := filepath.Join(root, "sys/class/infiniband")
	devices, err := os.ReadDir(base)
	if errors.Is(err, os.ErrNotExist) || err == nil && len(devices) == 0 {
		return nil, fmt.Errorf("%w: %w", ErrNotSupported, ErrNoDevices)
	}
	if err != nil {
		return nil, fmt.Errorf("verbs: list devices: %w", err)
	}
	var all []Port
	for _, d := range devices {
		dir := filepath.Join(base, d.Name(), "ports")
		nums, err := os.ReadDir(dir)
		if err != nil {
			return nil, fmt.Errorf("verbs: ports of %s: %w", d.Name(), err)
		}
		for _, n := range nums {
			num, err := strconv.Atoi(n.Name())
			if err != nil || num < 1 || num > 255 {
				continue
			}
			if len(all) == maxPorts {
				return all, fmt.Errorf("verbs: more than %d ports", maxPorts)
			}
			p := readPort(filepath.Join(base, d.Name()), d.Name(), num)
			p.GIDs = readGIDs(filepath.Join(dir, n.Name()), p.Link)
			all = append(all, p)
		}
	}
	return all, nil
}

func readPort(dev, name string, num int) Port {
	dir := filepath.Join(dev, "ports", strconv.Itoa(num))
	p := Port{Device: name, Num: num, Link: line(dir, "link_layer"), NUMA: -1}
	_, p.State, _ = strings.Cut(line(dir, "state"), ": ")
	if lid, err := strconv.ParseUint(line(dir, "lid"), 0, 16); err == nil {
		p.LID = uint16(lid)
	}
	if rate, _, ok := strings.Cut(line(dir, "rate"), " "); ok {
		p.Gbps, _ = strconv.ParseFloat(rate, 64) // 0: unknown
	}
	if n, err := strconv.Atoi(line(dev, "device/numa_node")); err == nil {
		p.NUMA = n
	}
	return p
}

func readGIDs(dir, link string) (gids []GID) {
	for i, gap := 0, 0; i < maxGIDs && gap < maxGap; i++ {
		index := strconv.Itoa(i)
		text := line(dir, "gids/"+index)
		if text == "" {
			break // the end of the table
		}
		raw, err := hex.DecodeString(strings.ReplaceAll(text, ":", ""))
		g := GID{Index: i}
		if err != nil || copy(g.Raw[:], raw) != 16 || g.Raw == [16]byte{} {
			gap++
			continue
		}
		gap = 0
		g.NetDev = line(dir, "gid_attrs/ndevs/"+index)
		switch t := line(dir, "gid_attrs/types/"+index); {
		case strings.Contains(t, "v2"):
			g.Type = GIDRoCEv2
		case strings.Contains(t, "RoCE v1") || link == "Ethernet":
			g.Type = GIDRoCEv1
		default:
			g.Type = GIDInfiniBand
		}
		gids = append(gids, g)
	}
	return gids
}

func line(dir, file string) string {
	b, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// AutoGID makes ChooseGID choose.
const AutoGID = -1

// ChooseGID picks the entry for queue pairs of the port, with the reason. pinned is an index, or
// AutoGID.
//
// On Ethernet: RoCEv2 before RoCEv1, since only UDP is routed and hashed over links; a link-local
// address only without another, since no router forwards it; IPv4 before IPv6, the usual
// configuration of fabrics; then the lowest index, which does not change when addresses are added.
func ChooseGID(p *Port, pinned int) (GID, string, error) {
	if pinned != AutoGID {
		for _, g := range p.GIDs {
			if g.Index == pinned {
				return g, fmt.Sprintf("index %d is configured", pinned), nil
			}
		}
		return GID{}, "", fmt.Errorf("verbs: port %s: GID index %d is empty: pin one of %v in "+
			"transports.gdr.rails, as %s@INDEX, or omit the index", p.Name(), pinned,
			indexes(p.GIDs), p.Name())
	}
	if len(p.GIDs) == 0 {
		return GID{}, "", fmt.Errorf("verbs: port %s has no GID: give its network interface an address",
			p.Name())
	}
	if p.Link != "Ethernet" {
		return p.GIDs[0], "InfiniBand: the first one", nil
	}
	rank := func(g GID) int {
		r := 0
		if g.Type != GIDRoCEv2 {
			r += 4
		}
		if a := g.Addr(); a.IsLinkLocalUnicast() {
			r += 2
		} else if !a.Is4() {
			r++
		}
		return r
	}
	best := slices.MinFunc(p.GIDs, func(a, b GID) int {
		if d := rank(a) - rank(b); d != 0 {
			return d
		}
		return a.Index - b.Index
	})
	switch {
	case best.Type != GIDRoCEv2:
		return GID{}, "", fmt.Errorf("verbs: port %s has RoCEv1 GIDs only: enable RoCEv2 "+
			"(cma_roce_mode), or pin a GID of %v in transports.gdr.rails, as %s@INDEX", p.Name(),
			indexes(p.GIDs), p.Name())
	case best.Addr().IsLinkLocalUnicast():
		return GID{}, "", fmt.Errorf("verbs: port %s has link-local GIDs only, which no router "+
			"forwards: give %s an IP address, or pin a GID of %v in transports.gdr.rails, as %s@INDEX",
			p.Name(), best.NetDev, indexes(p.GIDs), p.Name())
	}
	why := "RoCEv2, " + best.Addr().String() + " of " + best.NetDev
	if others := len(p.GIDs) - 1; others > 0 {
		why += fmt.Sprintf("; before %d others that are RoCEv1, link-local, IPv6 or of a higher index",
			others)
	}
	return best, why, nil
}

func indexes(gids []GID) (out []int) {
	for _, g := range gids {
		out = append(out, g.Index)
	}
	return out
}

// CheckPeer checks whether two ends can be connected at all; the error names both.
func CheckPeer(local, remote Address) error {
	switch {
	case local.Type != remote.Type:
		return fmt.Errorf("verbs: this end uses %s (%s), the peer %s (%s): pin a GID at one of them, "+
			"in its transports.gdr.rails: DEVICE@INDEX", local.Type, show(local), remote.Type, show(remote))
	case local.Type == GIDInfiniBand:
		if remote.LID == 0 && remote.GID == [16]byte{} {
			return errors.New("verbs: the peer sent neither a LID nor a GID")
		}
		if remote.LID != 0 && [8]byte(local.GID[:8]) != [8]byte(remote.GID[:8]) {
			return fmt.Errorf("verbs: this end's GID is %s, the peer's %s: two InfiniBand subnets, and a "+
				"LID leads nowhere in another one: use ports of one subnet, or tcp",
				show(local), show(remote))
		}
	case remote.GID == [16]byte{} || netip.AddrFrom16(remote.GID).Unmap().IsMulticast() ||
		netip.AddrFrom16(remote.GID).Unmap().IsUnspecified():
		return fmt.Errorf("verbs: the peer's GID %s is not a host's address", show(remote))
	case netip.AddrFrom16(local.GID).Is4In6() != netip.AddrFrom16(remote.GID).Is4In6():
		return fmt.Errorf("verbs: this end's GID is %s, the peer's %s: one is IPv4, one IPv6: pin a "+
			"GID at one of them, in its transports.gdr.rails: DEVICE@INDEX", show(local), show(remote))
	}
	if !remote.MTU.Valid() {
		return fmt.Errorf("verbs: the peer sent MTU number %d: 1 to %d", remote.MTU, MTU4096)
	}
	if remote.QP == 0 || remote.QP >= 1<<24 || remote.PSN >= 1<<24 {
		return fmt.Errorf(
			"verbs: the peer sent queue pair %#x and sequence number %#x: both have 24 bits",
			remote.QP, remote.PSN)
	}
	return nil
}

func show(a Address) string { return netip.AddrFrom16(a.GID).Unmap().String() }

// Config of a device that Open opens.
type Config struct {
	Device       string
	Port         int // from 1; 0: the first
	GIDIndex     int // or AutoGID
	MTU          MTU // limit; 0: the port's
	TrafficClass uint8
	ServiceLevel uint8
	// Timer is the exponent of an acknowledgement's time-out, 4.096us << Timer; Retries is the
	// number of repetitions after it. A dead path is detected after about 2 x (Retries+1) x
	// time-out. Soft-RoCE treats 7 as "for ever".
	Timer   uint8
	Retries uint8
}

// Timers that detect a dead path within about 50 ms.
const (
	DefaultTimer   = 10 // 4.2 ms
	DefaultRetries = 3
	maxTimer       = 31
	maxRetries     = 6
)

func (c *Config) check() error {
	switch {
	case c.Device == "":
		return errors.New("verbs: the device is missing")
	case c.MTU > MTU4096:
		return fmt.Errorf("verbs: MTU number %d: 1 to %d", c.MTU, MTU4096)
	case c.Timer == 0 || c.Timer > maxTimer:
		return fmt.Errorf("verbs: timer %d: 1 to %d", c.Timer, maxTimer)
	case c.Retries == 0 || c.Retries > maxRetries:
		return fmt.Errorf("verbs: %d retries: 1 to %d", c.Retries, maxRetries)
	case c.ServiceLevel > 15:
		return fmt.Errorf("verbs: service level %d: 0 to 15", c.ServiceLevel)
	}
	return nil
}
