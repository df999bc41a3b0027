package topo

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Link is rtnetlink's description of one interface.
type Link struct {
	Name   string
	Index  int
	Kind   Kind
	MTU    int
	Admin  bool
	Link   bool
	Master int // index; 0: none
	Parent int // index of a VLAN's parent; 0: none, or in another namespace
	Addrs  []netip.Prefix
}

// Options select the machine. The zero value is this machine.
type Options struct {
	Root  string                 // of /sys; empty: the real one
	Links func() ([]Link, error) // nil: the kernel's
	// from the management library: PCI, Index, UUID and Name; nil: the library
	GPUs func() ([]GPU, error)
}

// Discover examines the host. Host.Trouble lists what could not be read; the error means that
// interfaces could not be listed.
func Discover(opt Options) (*Host, error) {
	links := opt.Links
	if links == nil {
		k, err := openKernel()
		if err != nil {
			return nil, err
		}
		defer k.close()
		links = k.links
	}
	l, err := links()
	if err != nil {
		return nil, err
	}
	h := &Host{Nodes: (&reader{root: opt.Root}).nodes()}
	h.gpus(&opt)
	h.fill(opt.Root, l)
	return h, nil
}

// reader reads small files below a root and keeps nothing open.
type reader struct{ root string }

func (r *reader) path(p ...string) string {
	return filepath.Join(append([]string{r.root, "/sys"}, p...)...)
}

const maxFileBytes = 4 << 10

func (r *reader) text(p ...string) (string, bool) {
	f, err := os.Open(r.path(p...))
	if err != nil {
		return "", false
	}
	defer func() { _ = f.Close() }() // read only
	var b [maxFileBytes]byte
	n, err := f.Read(b[:])
	if err != nil {
		return "", false
	}
	return strings.TrimSpace(string(b[:n])), true
}

func (r *reader) number(p ...string) (int, bool) {
	s, ok := r.text(p...)
	n, err := strconv.Atoi(s)
	return n, ok && err == nil
}

func (r *reader) names(p ...string) []string {
	list, err := os.ReadDir(r.path(p...))
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range list {
		out = append(out, e.Name())
	}
	return out
}

// nodes reads a list like 0-1,3.
func (r *reader) nodes() (out []int) {
	s, _ := r.text("devices/system/node/online")
	for part := range strings.SplitSeq(s, ",") {
		a, b, ranged := strings.Cut(part, "-")
		first, err := strconv.Atoi(a)
		last := first
		if ranged && err == nil {
			last, err = strconv.Atoi(b)
		}
		if err != nil || last-first >= MaxNICs {
			return nil
		}
		for n := first; n <= last; n++ {
			out = append(out, n)
		}
	}
	return out
}

var pciAddress = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)

// SeatOf returns the place of a device that a link in /sys below root leads to.
func SeatOf(root string, link ...string) Seat {
	r := &reader{root: root}
	s, _ := r.seat(r.nodes(), link...)
	return s
}

// seat follows a device link to the device's place. A virtio device has the place of the PCI device
// below it.
func (r *reader) seat(nodes []int, p ...string) (Seat, bool) {
	s := Seat{Node: Unknown}
	real, err := filepath.EvalSymlinks(r.path(p...))
	if err != nil {
		return s, false
	}
	base, err := filepath.EvalSymlinks(r.path("devices"))
	if err != nil {
		return s, false
	}
	rel, err := filepath.Rel(base, real)
	if err != nil || strings.HasPrefix(rel, "..") {
		return s, false
	}
	for _, c := range strings.Split(rel, string(filepath.Separator)) {
		if len(s.Path) == 0 && strings.HasPrefix(c, "pci") || pciAddress.MatchString(c) {
			s.Path = append(s.Path, c)
		} else if len(s.Path) > 0 {
			break // below the PCI device; levels above the host bridge do not matter
		}
	}
	if len(s.Path) > 0 {
		if n, ok := r.number("bus/pci/devices", s.Address(), "numa_node"); ok && n >= 0 {
			s.Node = n
		}
	}
	if s.Node == Unknown {
		if n, ok := r.number(append(p, "numa_node")...); ok && n >= 0 {
			s.Node = n
		}
	}
	if s.Node == Unknown && len(nodes) == 1 {
		s.Node = nodes[0] // there is only one
	}
	return s, true
}

// fill makes interfaces of links, with their data from sysfs.
func (h *Host) fill(root string, links []Link) {
	if len(links) > MaxNICs {
		h.Trouble = append(h.Trouble,
			fmt.Errorf("topo: %d interfaces: only the first %d by index are used", len(links), MaxNICs))
		slices.SortFunc(links, func(a, b Link) int { return cmp.Compare(a.Index, b.Index) })
		links = links[:MaxNICs]
	}
	r := &reader{root: root}
	names := map[int]string{}
	for _, l := range links {
		names[l.Index] = l.Name
	}
	for _, l := range links {
		n := NIC{Name: l.Name, Index: l.Index, Kind: l.Kind, Addrs: slices.Clone(l.Addrs), MTU: l.MTU,
			Admin: l.Admin, Link: l.Link, Master: names[l.Master],
			Node: Unknown}
		if l.Master != 0 && n.Master == "" {
			n.Master = fmt.Sprint("interface ", l.Master)
		}
		slices.SortFunc(n.Addrs, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
		if mbps, ok := r.number("class/net", l.Name, "speed"); ok && mbps > 0 && l.Kind != Veth {
			n.Mbps = mbps // a veth reports 10 Gbit/s, whatever its shaping
		}
		if s, ok := r.seat(h.Nodes, "class/net", l.Name, "device"); ok {
			n.Seats = []Seat{s}
			if d, err := os.Readlink(r.path("class/net", l.Name, "device/driver")); err == nil {
				n.Driver = filepath.Base(d)
			}
		}
		if ib := r.names("class/net", l.Name, "device/infiniband"); len(ib) > 0 {
			n.RDMA = ib[0]
		}
		for _, f := range r.names("class/net", l.Name) {
			if below, ok := strings.CutPrefix(f, "lower_"); ok {
				n.Below = append(n.Below, below)
			}
		}
		if l.Parent != 0 && l.Kind == VLAN && names[l.Parent] != "" && !slices.Contains(n.Below,
			names[l.Parent]) {
			n.Below = append(n.Below, names[l.Parent])
		}
		h.NICs = append(h.NICs, n)
	}
	slices.SortFunc(h.NICs, func(a, b NIC) int { return strings.Compare(a.Name, b.Name) })
	for i := range h.NICs {
		h.NICs[i].settle(h)
	}
}

// maxDepth bounds stacks of interfaces: a VLAN on a bond on a device has three.
const maxDepth = 8

// settle gives a composed interface the places of its parts.
func (n *NIC) settle(h *Host) {
	if len(n.Seats) == 0 {
		for _, b := range h.Carriers(n) {
			if b.Kind == Physical {
				n.Seats = append(n.Seats, b.Seats...)
			}
		}
	}
	for i, s := range n.Seats {
		switch {
		case i == 0:
			n.Node = s.Node
		case s.Node != n.Node:
			n.Node = Unknown // of several parts
		}
	}
}

// gpus finds NVIDIA's 3D and VGA controllers in sysfs, and identifies them by the management
// library.
func (h *Host) gpus(opt *Options) {
	r := &reader{root: opt.Root}
	for _, pci := range r.names("bus/pci/devices") {
		vendor, _ := r.text("bus/pci/devices", pci, "vendor")
		class, _ := r.text("bus/pci/devices", pci, "class")
		if vendor != "0x10de" || !strings.HasPrefix(class, "0x0302") &&
			!strings.HasPrefix(class, "0x0300") {
			continue
		}
		g := GPU{PCI: pci, Index: Unknown}
		g.Seat, _ = r.seat(h.Nodes, "bus/pci/devices", pci)
		h.GPUs = append(h.GPUs, g)
	}
	ask := opt.GPUs
	if ask == nil {
		if opt.Root != "" {
			return // the library describes only this machine
		}
		ask = managed
	}
	known, err := ask()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		h.Trouble = append(h.Trouble, err)
	}
	for _, k := range known {
		g := h.GPU(k.PCI)
		if g == nil {
			// A container may see the device without its place in sysfs.
			h.GPUs = append(h.GPUs, GPU{PCI: k.PCI, Seat: Seat{Node: Unknown}})
			g = &h.GPUs[len(h.GPUs)-1]
		}
		g.Index, g.UUID, g.Name = k.Index, k.UUID, k.Name
	}
	slices.SortFunc(h.GPUs, func(a, b GPU) int { return strings.Compare(a.PCI, b.PCI) })
}
