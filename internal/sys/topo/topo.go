// Package topo describes a host for the purpose of moving bytes: network interfaces with their
// addresses, speeds and links, GPUs, NUMA nodes, and their distances. It reads sysfs, rtnetlink and
// the NVIDIA management library, and reports when links and addresses appear, vanish, go down or
// come up.
//
// Invariants: a Host is a snapshot and never changes. Lists are sorted. Data that the kernel does
// not provide is unknown, never guessed. At most MaxNICs interfaces are examined. Discover needs no
// privilege and changes nothing.
//
// Goroutines: none. Watch runs in its caller's, and the subscriptions of package netlink in theirs
// until Watch returns.
package topo

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// MaxNICs bounds the examined interfaces: a host of containers has thousands that lead nowhere.
const MaxNICs = 1024

// Unknown is the NUMA node of a device without one, or without data from the kernel.
const Unknown = -1

// Host is a machine, or the part that a container or a virtual machine sees.
type Host struct {
	NICs  []NIC // by name
	GPUs  []GPU // by PCI address
	Nodes []int // NUMA nodes that are online
	// Trouble lists what could not be read; the rest is valid.
	Trouble []error
}

// Kind is the kind of an interface.
type Kind string

// The kinds that matter here. Others keep the kernel's name (bridge, tun, wireguard ...).
const (
	Physical Kind = "device" // has a driver of its own, also a virtual one: virtio, ena
	Loopback Kind = "loopback"
	Bond     Kind = "bond"
	VLAN     Kind = "vlan"
	Veth     Kind = "veth"
	Bridge   Kind = "bridge"
)

// NIC is one network interface.
type NIC struct {
	Name   string
	Index  int
	Kind   Kind
	Addrs  []netip.Prefix
	MTU    int
	Mbps   int    // 0: not reported by the kernel
	Node   int    // NUMA; Unknown
	RDMA   string // its InfiniBand device, for instance mlx5_0
	Driver string
	Admin  bool   // administratively up
	Link   bool   // and has a carrier: bytes can move
	Master string // the bond or bridge that it is a port of
	// Below names the parts of a bond, VLAN or bridge.
	Below []string
	// Seats are the PCI paths of the devices that carry its bytes: one for a device, several for a
	// bond. A path leads from the host bridge to the device. None: not on PCI, as far as visible.
	Seats []Seat
}

// Seat is the place of a device.
type Seat struct {
	Path []string // "pci0000:15", "0000:15:01.0", ..., "0000:18:00.0"
	Node int
}

// Address is the PCI address of the device, or empty.
func (s Seat) Address() string {
	if len(s.Path) == 0 {
		return ""
	}
	return s.Path[len(s.Path)-1]
}

// GPU is one accelerator.
type GPU struct {
	PCI   string // 0000:1b:00.0
	Index int    // of the management library; Unknown
	UUID  string
	Name  string
	Seat  Seat
}

// Memory is a place of bytes: a GPU, or host memory of a NUMA node.
type Memory struct {
	GPU  string // PCI address; empty: host memory
	Node int    // of host memory; Unknown
}

// Distance between two devices, in the terms of nvidia-smi topo.
type Distance int

// From near to far.
const (
	NotKnown   Distance = iota
	Switch              // PIX: one PCIe switch, or the same device
	Switches            // PXB: several PCIe switches, not the host bridge
	HostBridge          // PHB: through the host bridge
	SameNode            // NODE: several host bridges of one NUMA node
	System              // SYS: from one NUMA node to another
)

func (d Distance) String() string {
	return [...]string{"unknown", "PIX", "PXB", "PHB", "NODE", "SYS"}[d]
}

// Between is how far two seats are from each other.
func Between(a, b Seat) Distance {
	n := 0
	for n < len(a.Path) && n < len(b.Path) && a.Path[n] == b.Path[n] {
		n++
	}
	switch {
	case n >= 2:
		// Below the common part: the device itself and a port of the one switch.
		if len(a.Path)-n <= 2 && len(b.Path)-n <= 2 {
			return Switch
		}
		return Switches
	case n == 1:
		return HostBridge
	case a.Node == Unknown || b.Node == Unknown:
		return NotKnown
	case a.Node == b.Node:
		return SameNode
	}
	return System
}

// The tiers of a rail for some memory. A far rail costs only if a nearer one exists.
const (
	Near   = 1 // the same PCIe switch, the same process space
	Middle = 2 // the same NUMA node, or unknown
	Far    = 3 // another NUMA node
)

// Tier classifies an interface for some memory. For several devices the farthest counts, because a
// byte may take any of them.
func (h *Host) Tier(n *NIC, m Memory) int {
	if n.Kind == Loopback {
		return Near
	}
	seats := n.Seats
	if len(seats) == 0 {
		seats = []Seat{{Node: n.Node}}
	}
	var gpu *GPU
	if m.GPU != "" {
		if gpu = h.GPU(m.GPU); gpu == nil {
			return Middle
		}
	}
	worst := Near
	for _, s := range seats {
		d := NotKnown
		switch {
		case gpu != nil:
			d = Between(s, gpu.Seat)
		case s.Node != Unknown && m.Node != Unknown && s.Node != m.Node:
			d = System
		}
		switch d {
		case Switch, Switches:
		case System:
			worst = Far
		default:
			worst = max(worst, Middle)
		}
	}
	return worst
}

// GPU finds a GPU by its PCI address, its UUID, or its index in decimal; nil: none.
func (h *Host) GPU(name string) *GPU {
	for i := range h.GPUs {
		g := &h.GPUs[i]
		if g.PCI == name || g.UUID != "" && g.UUID == name || g.Index != Unknown &&
			fmt.Sprint(g.Index) == name {
			return g
		}
	}
	return nil
}

// NIC finds an interface by its name; nil: none.
func (h *Host) NIC(name string) *NIC {
	i, ok := slices.BinarySearchFunc(h.NICs, name,
		func(n NIC, name string) int { return strings.Compare(n.Name, name) })
	if !ok {
		return nil
	}
	return &h.NICs[i]
}

// Carriers are the devices that carry the bytes of an interface: itself, or the parts of a bond or
// VLAN.
func (h *Host) Carriers(n *NIC) []*NIC { return h.carriers(n, maxDepth) }

func (h *Host) carriers(n *NIC, depth int) (out []*NIC) {
	if len(n.Below) == 0 || n.Kind == Physical || depth == 0 {
		return []*NIC{n}
	}
	for _, name := range n.Below {
		if b := h.NIC(name); b != nil && b != n {
			out = append(out, h.carriers(b, depth-1)...)
		}
	}
	return out
}

// At finds the interface with an address; nil: none. All of 127.0.0.0/8 is on the loopback
// interface.
func (h *Host) At(a netip.Addr) *NIC {
	a = a.Unmap().WithZone("")
	for i := range h.NICs {
		for _, p := range h.NICs[i].Addrs {
			if p.Addr() == a || a.IsLoopback() && p.Contains(a) {
				return &h.NICs[i]
			}
		}
	}
	return nil
}

// Route returns the address for a rail over the interface, or why the interface is not a rail, now
// or by its nature.
func (n *NIC) Route() (netip.Prefix, error) {
	switch {
	case n.Master != "":
		return netip.Prefix{}, fmt.Errorf("a port of %s, which is the rail", n.Master)
	case n.Kind == Loopback:
		return netip.Prefix{}, fmt.Errorf("the loopback interface leads nowhere")
	case n.Kind == Bridge && !slices.ContainsFunc(n.Seats,
		func(s Seat) bool { return len(s.Path) > 0 }):
		return netip.Prefix{}, fmt.Errorf("a bridge between containers of this host")
	case !slices.Contains([]Kind{Physical, Bond, VLAN, Veth, Bridge, "macvlan", "ipvlan", "team",
		"ipoib", "netdevsim"}, n.Kind):
		return netip.Prefix{}, fmt.Errorf("of kind %s, which has no wire of its own", n.Kind)
	}
	var six netip.Prefix
	for _, p := range n.Addrs {
		a := p.Addr()
		switch {
		case a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsMulticast():
		case a.Is4():
			return p, nil
		case !six.IsValid():
			six = p
		}
	}
	if !six.IsValid() {
		return netip.Prefix{}, fmt.Errorf("no address that reaches beyond its link")
	}
	return six, nil
}

// equal reports whether no reported property differs.
func (n *NIC) equal(o *NIC) bool {
	return n.Name == o.Name && n.Index == o.Index && n.Kind == o.Kind && slices.Equal(n.Addrs,
		o.Addrs) && n.MTU == o.MTU && n.Mbps == o.Mbps &&
		n.Node == o.Node && n.RDMA == o.RDMA && n.Admin == o.Admin && n.Link == o.Link &&
		n.Master == o.Master && slices.Equal(n.Below, o.Below) &&
		slices.EqualFunc(n.Seats, o.Seats, func(a, b Seat) bool {
			return a.Node == b.Node &&
				slices.Equal(a.Path, b.Path)
		})
}

// Change is a kind of change of an interface.
type Change uint8

// The changes, at most one per interface and look: the most important.
const (
	Appeared Change = iota + 1
	Vanished
	Down    // the link
	Up      // the link
	Changed // addresses, speed or other properties; the link is unchanged
)

func (c Change) String() string {
	return [...]string{"", "appeared", "vanished", "down", "up", "changed"}[c]
}

// Event is one change; NIC is the interface as it is now, or was last.
type Event struct {
	Change Change
	NIC    NIC
}

// Diff lists the changes from one snapshot to another, by name. An interface that was remade under
// an old name is reported as Vanished and Appeared.
func Diff(old, now *Host) (out []Event) {
	for i := range old.NICs {
		o := &old.NICs[i]
		if n := now.NIC(o.Name); n == nil || n.Index != o.Index {
			out = append(out, Event{Vanished, *o})
		}
	}
	for i := range now.NICs {
		n := &now.NICs[i]
		o := old.NIC(n.Name)
		switch {
		case o == nil || o.Index != n.Index:
			out = append(out, Event{Appeared, *n})
		case o.Link && !n.Link:
			out = append(out, Event{Down, *n})
		case !o.Link && n.Link:
			out = append(out, Event{Up, *n})
		case !o.equal(n):
			out = append(out, Event{Changed, *n})
		}
	}
	return out
}
