package sidecar

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/topo"
	"github.com/kvspray/kvspray/transport/gdr"
	"github.com/kvspray/kvspray/transport/tcp"
)

// look adapts the rails to the host once, before peers receive them.
func (s *railSet) look() {
	h, err := topo.Discover(topo.Options{})
	if err != nil {
		s.log.Warn("interfaces cannot be listed; only rails with a configured address are used", "err",
			err)
		return
	}
	s.hostChanged(h)
}

// watch follows links and addresses until ctx ends.
func (s *railSet) watch(ctx context.Context) {
	for ctx.Err() == nil {
		err := topo.Watch(ctx, topo.Options{}, func(h *topo.Host, events []topo.Event) {
			for _, e := range events {
				s.log.Debug("interface "+e.Change.String(), "interface", e.NIC.Name, "link", e.NIC.Link,
					"addresses", e.NIC.Addrs)
			}
			s.hostChanged(h)
		})
		if err == nil {
			return
		}
		if s.once("watch: " + err.Error()) {
			s.log.Warn("links are not watched: a link that goes down is detected by its silence", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(watchRetry):
		}
	}
}

// hostChanged adds and removes rails by patterns and interfaces, follows links, and notifies
// executor and peers of changes.
func (s *railSet) hostChanged(h *topo.Host) {
	s.apply.Lock()
	defer s.apply.Unlock()
	s.applyHost(h)
}

// applyHost is hostChanged; the caller holds apply.
func (s *railSet) applyHost(h *topo.Host) {
	before := s.of(config.TransTCP)
	now, again := s.follow(h, before)
	s.links.look(h, now)
	s.links.exclude(now)
	s.mu.Lock()
	s.host = h
	s.byB[config.TransTCP] = now
	s.mu.Unlock()
	if again {
		s.lookAgain(h)
	}
	if slices.Equal(before, now) {
		return
	}
	s.changed(config.TransTCP, before, now)
}

// follow returns the rails of tcp adapted to the host. again: an address could not be bound yet.
func (s *railSet) follow(h *topo.Host, before []rail) (now []rail, again bool) {
	b, dynamic := s.tcp()
	auto := 0
	for _, r := range before {
		nic := h.At(addrOf(r.Address))
		switch {
		case !r.auto:
			// an address without an interface, for instance of a proxy, has no link to follow
			if nic != nil || r.nic != "" {
				r.noLink = nic == nil || !nic.Link
			}
			if nic != nil {
				r.nic = nic.Name
				r.place(nic, addrOf(r.Address))
			}
		case nic == nil || nic.Name != r.nic || !s.wanted(nic):
			if dynamic {
				b.RemoveRail(r.Name)
			}
			s.log.Info("rail gone", "rail", r.Name, "address", r.Address)
			continue
		default:
			r.noLink = !nic.Link
			r.speed(s.cfg, nic)
			r.place(nic, addrOf(r.Address))
			auto++
		}
		now = append(now, r)
	}
	for i := range h.NICs {
		nic := &h.NICs[i]
		if !dynamic || !s.wanted(nic) || slices.ContainsFunc(now,
			func(r rail) bool { return r.nic == nic.Name }) {
			continue
		}
		p, err := nic.Route()
		if err != nil {
			if s.once(nic.Name + ": " + err.Error()) {
				s.log.Debug("an interface that matches a pattern is not a rail", "interface",
					nic.Name, "why", err)
			}
			continue
		}
		if auto >= maxAutoRails {
			if s.once("bound") {
				s.log.Warn("too many interfaces match transports.tcp.rails; exclude some", "most", maxAutoRails)
			}
			break
		}
		rc, _ := s.cfg.RailFor(nic.Name)
		opened, err := b.AddRail(s.proc.Context(), tcp.Rail{Name: nic.Name,
			Listen: net.JoinHostPort(p.Addr().String(), "0"), Tier: rc.Tier})
		if err != nil {
			again = true
			if s.once(nic.Name + " at " + p.String()) {
				s.log.Warn("interface not usable yet, retrying", "interface", nic.Name, "err", err)
			}
			continue
		}
		auto++
		r := rail{Rail: opened, nic: nic.Name, auto: true, noLink: !nic.Link}
		r.speed(s.cfg, nic)
		r.place(nic, p.Addr())
		now = append(now, r)
		s.log.Info("rail added", "rail", r.Name, "address", r.Address, "gbps", r.Gbps, "mtu", r.MTU,
			"numa", r.NUMA, "link", nic.Link)
	}
	return now, again
}

// wanted reports whether a pattern makes an interface a rail: it is administratively up, even if
// its link is down.
func (s *railSet) wanted(nic *topo.NIC) bool {
	_, ok := s.cfg.RailFor(nic.Name)
	return ok && nic.Admin
}

// speed is the configured speed, else the kernel's.
func (r *rail) speed(cfg *config.Config, nic *topo.NIC) {
	rc, _ := cfg.RailFor(nic.Name)
	if r.Gbps = float64(rc.Speed) / bitsPerGbit; r.Gbps == 0 {
		r.Gbps = float64(nic.Mbps) * gbitPerMbit
	}
}

func (r *rail) place(nic *topo.NIC, a netip.Addr) {
	r.MTU, r.NUMA = nic.MTU, nic.Node
	for _, p := range nic.Addrs {
		if p.Addr() == a {
			r.prefix = p.Masked()
		}
	}
}

func addrOf(address string) netip.Addr {
	a, err := netip.ParseAddrPort(address)
	if err != nil {
		return netip.Addr{}
	}
	return a.Addr().Unmap().WithZone("")
}

// tcp returns the backend with changing rails.
func (s *railSet) tcp() (*tcp.Backend, bool) {
	b, ok := s.live.Get(config.TransTCP)
	if !ok {
		return nil, false
	}
	t, ok := b.(*tcp.Backend)
	return t, ok
}

// lookAgain retries later after a failed bind.
func (s *railSet) lookAgain(h *topo.Host) {
	s.proc.Run(func(ctx context.Context) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(railRetry):
		}
		select {
		case <-ctx.Done(): // it may never start
			return
		case <-s.started:
		}
		s.mu.RLock()
		last := s.host
		s.mu.RUnlock()
		if last == h { // else a newer look has covered it
			s.hostChanged(h)
		}
	})
}

// gdrChanged: a port of gdr went down or up, or has another address.
func (s *railSet) gdrChanged() {
	select {
	case s.gdrNews <- struct{}{}:
	default: // the pending check covers this change too
	}
}

// watchGDR follows gdr's rails until ctx ends.
func (s *railSet) watchGDR(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.gdrNews:
			s.takeGDR()
		}
	}
}

// takeGDR applies the current rails of gdr and notifies executor and peers.
func (s *railSet) takeGDR() {
	b, ok := s.live.Get(config.TransGDR)
	g, dynamic := b.(*gdr.Backend)
	if !ok || !dynamic {
		return
	}
	s.apply.Lock()
	defer s.apply.Unlock()
	before := s.of(config.TransGDR)
	now := slices.Clone(before)
	for _, x := range g.Rails() {
		i := slices.IndexFunc(now, func(r rail) bool { return r.Name == x.Name })
		if i < 0 {
			continue
		}
		r := &now[i]
		if r.noLink != x.Down || r.Address != x.Address {
			s.log.Info("rail changed", "transport", config.TransGDR, "rail", r.Name, "down", x.Down,
				"address", x.Address)
		}
		r.noLink, r.Address = x.Down, x.Address
		r.nic = nicOf(s.host, r.Name)
	}
	s.links.exclude(now)
	if slices.Equal(before, now) {
		return
	}
	s.mu.Lock()
	s.byB[config.TransGDR] = now
	s.mu.Unlock()
	s.changed(config.TransGDR, before, now)
}
