package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/kvspray/kvspray/internal/sys/verbs"
)

// shownGIDs bounds a line; a table has a few entries in use.
const shownGIDs = 16

func transportGDR(_ context.Context, h *Host) Result {
	ports, err := verbs.Ports(cmp.Or(h.Root, "/"))
	if errors.Is(err, verbs.ErrNoDevices) {
		if slices.Contains(h.Config.Transports.Order, "gdr") {
			return warn("use tcp, or a host with an RDMA NIC and its driver", "no RDMA device")
		}
		return skip("tcp and shm need none", "no RDMA device")
	}
	if err != nil {
		return skip("", "%v", err)
	}
	if err := verbs.Library(); err != nil {
		return warn("install libibverbs1 and ibverbs-providers (rdma-core)", "%v", err)
	}
	usable := 0
	for i := range ports {
		if _, _, err := verbs.ChooseGID(&ports[i], h.pinned(&ports[i])); err == nil &&
			ports[i].State == "ACTIVE" {
			usable++
		}
	}
	if usable == 0 {
		return warn("see the lines below", "none of %d ports is active and has a usable GID", len(ports))
	}
	return good("%d of %d ports", usable, len(ports))
}

// pinned is the configured GID index of a port.
func (h *Host) pinned(p *verbs.Port) int {
	for _, r := range h.Config.Transports.GDR.Rails {
		port, index, ok := strings.Cut(r, "@")
		if i, err := strconv.Atoi(index); ok && err == nil && (port == p.Name() ||
			port == fmt.Sprintf("%s/%d", p.Device, p.Num)) {
			return i
		}
	}
	return verbs.AutoGID
}

// gdrRails shows each port's table of GIDs, the choice, and the reason.
func gdrRails(_ context.Context, h *Host) (out []Result) {
	ports, err := verbs.Ports(cmp.Or(h.Root, "/"))
	if err != nil {
		return nil // reported by the previous line
	}
	for i := range ports {
		p := &ports[i]
		var table []string
		for _, g := range p.GIDs[:min(len(p.GIDs), shownGIDs)] {
			table = append(table, fmt.Sprintf("%d %s %s %s", g.Index, g.Type, g.Addr(), g.NetDev))
		}
		if len(p.GIDs) > shownGIDs {
			table = append(table, fmt.Sprintf("and %d more", len(p.GIDs)-shownGIDs))
		}
		state := fmt.Sprintf("%s, %s, %g Gbit/s", cmp.Or(p.State, "state unknown"),
			cmp.Or(p.Link, "link unknown"), p.Gbps)
		g, why, err := verbs.ChooseGID(p, h.pinned(p))
		name := "gdr rail " + p.Name()
		switch shown := "; GIDs: " + strings.Join(table, ", "); {
		case err != nil:
			out = append(out, named(name, warn("assign an IP address to its interface, or pin a GID: "+
				"transports.gdr.rails=["+p.Name()+"@INDEX]", "%s; %v%s", state, err, shown)))
		case p.State != "ACTIVE":
			out = append(out, named(name, warn("check cable, switch, network interface and subnet manager",
				"%s; GID %d: %s%s", state, g.Index, why, shown)))
		default:
			out = append(out, named(name, good("%s; GID %d: %s%s", state, g.Index, why, shown)))
		}
	}
	return out
}
