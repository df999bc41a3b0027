package doctor

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/kvspray/kvspray/internal/sys/health"
	"github.com/kvspray/kvspray/internal/sys/topo"
)

// rails reports for each interface whether it is a rail and its PCI position; then the configured
// rails without an interface.
func rails(_ context.Context, h *Host) []Result {
	links := h.Links
	host, err := topo.Discover(topo.Options{Root: h.Root, Links: links})
	if err != nil {
		return []Result{skip("", "interfaces: %v", err)}
	}
	var out []Result
	for _, err := range host.Trouble {
		out = append(out, skip("", "%v", err))
	}
	wanted := h.Config.RailsOrDefault()
	found := make([]bool, len(wanted))
	for i := range host.NICs {
		n := &host.NICs[i]
		var used []string
		for k, r := range wanted {
			if on(r.Listen, n) {
				found[k] = true
				used = append(used, r.Name)
			}
		}
		if r, ok := nicLine(h, host, n, used); ok {
			out = append(out, r)
		}
	}
	for k, r := range wanted {
		if host, _, err := net.SplitHostPort(r.Listen); !found[k] && err == nil && !everywhere(host) {
			out = append(out, named("rail "+r.Name, warn("assign the address to an interface, or correct "+
				"transports.tcp.rails", "no interface has %s", host)))
		}
	}
	return out
}

// nicLine describes an interface; false: it is irrelevant.
func nicLine(h *Host, host *topo.Host, n *topo.NIC, used []string) (Result, bool) {
	entry, auto := h.Config.RailFor(n.Name)
	route, why := n.Route()
	switch {
	case len(used) == 0 && why != nil && (!auto || entry.Match == "*"):
		return Result{}, false // leads nowhere, and no entry names it
	case auto && len(used) == 0 && why == nil:
		used = []string{n.Name + " by the pattern " + entry.Match}
	}
	parts := []string{route.Addr().String()}
	if why != nil {
		parts[0] = why.Error()
	}
	if n.Kind == topo.Loopback && len(n.Addrs) > 0 {
		parts[0] = n.Addrs[0].Addr().String()
	}
	parts = append(parts, speedText(n))
	mtu := fmt.Sprintf("MTU %d", n.MTU)
	if n.MTU < 1500 {
		mtu += " (small; 9000 is faster if the network permits it)"
	}
	parts = append(parts, mtu)
	if where := seatText(host, n); where != "" {
		parts = append(parts, where)
	}
	switch {
	case len(used) > 0:
		parts = append(parts, "rail "+strings.Join(used, ", "))
		if text := countersText(h, host, n); text != "" {
			parts = append(parts, text)
		}
	case entry.Exclude:
		parts = append(parts, "excluded by the pattern "+entry.Match)
	default:
		parts = append(parts, "not used")
	}
	text := strings.Join(parts, ", ")
	switch {
	case auto && why != nil:
		return named("rail "+n.Name,
			warn("assign an address to it, or exclude it in transports.tcp.rails", "%s", text)), true
	case len(used) > 0 && !n.Admin:
		return named("rail "+n.Name, warn("ip link set "+n.Name+" up", "%s; it is administratively down",
			text)), true
	case len(used) > 0 && !n.Link:
		return named("rail "+n.Name, warn("check cable and switch; transfers use the other rails "+
			"meanwhile", "%s; its link has no carrier", text)), true
	}
	return named("rail "+n.Name, good("%s", text)), true
}

// countersText is what a link's counters have against it since its driver started; empty: nothing.
func countersText(h *Host, host *topo.Host, n *topo.NIC) string {
	var ports []health.Port
	for _, c := range host.Carriers(n) {
		ports = append(ports, health.Port{NIC: c.Name, RDMA: c.RDMA})
	}
	s := health.Counters(h.Root, n.Link, ports)
	if n.Kind == topo.Loopback || s.Errors == 0 && s.Resent == 0 {
		return ""
	}
	return fmt.Sprintf("since its driver started %d errors in %d packets, %d retransmissions, %d "+
		"losses of the carrier", s.Errors, s.Packets, s.Resent, s.Losses)
}

func speedText(n *topo.NIC) string {
	switch {
	case n.Kind == topo.Loopback:
		return "speed of memory"
	case n.Mbps > 0:
		return fmt.Sprintf("%g Gbit/s", float64(n.Mbps)/1000)
	}
	return "speed unknown (a virtual interface); set rails[].speed"
}

// seatText describes the position of an interface and its nearest GPU, in the terms of nvidia-smi
// topo.
func seatText(host *topo.Host, n *topo.NIC) string {
	var parts []string
	if len(n.Seats) == 1 && n.Seats[0].Address() != "" {
		at := "PCI " + n.Seats[0].Address()
		if n.RDMA != "" {
			at += " (" + n.RDMA + ")"
		}
		parts = append(parts, at)
	} else if len(n.Seats) > 1 {
		parts = append(parts, "on "+strings.Join(n.Below, " and "))
	}
	if n.Node != topo.Unknown && len(host.Nodes) > 1 {
		parts = append(parts, fmt.Sprintf("NUMA node %d", n.Node))
	}
	var near []string
	best := topo.NotKnown
	for i := range host.GPUs {
		g := &host.GPUs[i]
		for _, s := range n.Seats {
			d := topo.Between(s, g.Seat)
			if d == topo.NotKnown || best != topo.NotKnown && d > best {
				continue
			}
			if d != best {
				best, near = d, nil
			}
			name := g.PCI
			if g.Index != topo.Unknown {
				name = strconv.Itoa(g.Index)
			}
			if !slices.Contains(near, name) {
				near = append(near, name)
			}
		}
	}
	if len(near) > 0 {
		parts = append(parts, fmt.Sprintf("nearest GPU %s (%s)", strings.Join(near, ", "), best))
	}
	return strings.Join(parts, ", ")
}

func everywhere(host string) bool { return host == "" || net.ParseIP(host).IsUnspecified() }

// on reports whether a listening address belongs to an interface. All of 127.0.0.0/8 is on the
// loopback interface.
func on(listen string, n *topo.NIC) bool {
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return false
	}
	if host == "localhost" {
		host = "127.0.0.1"
	}
	a, err := netip.ParseAddr(host)
	if err != nil {
		return false
	}
	a = a.Unmap().WithZone("")
	return slices.ContainsFunc(n.Addrs, func(p netip.Prefix) bool {
		return p.Addr() == a ||
			a.IsLoopback() && p.Contains(a)
	})
}
