package sidecar

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/health"
	"github.com/kvspray/kvspray/internal/sys/topo"
)

// Times between two readings of the interfaces' counters.
const (
	linkLooks     = time.Second // while leases are open
	idleLinkLooks = 10          // otherwise, as a multiple of linkLooks
)

// linkHealth detects faults of the rails' interfaces by their counters.
type linkHealth struct {
	policy string           // health.rails
	root   string           // of /sys; empty: this machine's
	now    func() time.Time // replaced by tests

	mu sync.Mutex // protects all below
	of map[string]*health.Link
}

func newLinkHealth(policy string) *linkHealth {
	return &linkHealth{policy: policy, now: time.Now, of: map[string]*health.Link{}}
}

// look reads the counters of the rails' interfaces, and forgets other interfaces. It reports
// whether a fault has begun or ended.
func (l *linkHealth) look(h *topo.Host, rails ...[]rail) (changed bool) {
	if l.policy == config.Off {
		return false
	}
	samples := map[string]health.Sample{}
	for _, r := range slices.Concat(rails...) {
		nic := h.NIC(r.nic)
		if _, seen := samples[r.nic]; seen || nic == nil || nic.Kind == topo.Loopback {
			continue
		}
		var ports []health.Port
		for _, c := range h.Carriers(nic) {
			ports = append(ports, health.Port{NIC: c.Name, RDMA: c.RDMA})
		}
		samples[r.nic] = health.Counters(l.root, nic.Link, ports)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	for name, s := range samples {
		if l.of[name] == nil {
			l.of[name] = &health.Link{}
		}
		before := l.of[name].Fault().Kind
		l.of[name].Look(now, s)
		changed = changed || l.of[name].Fault().Kind != before
	}
	return changed
}

// keep forgets the interfaces that are not of rails.
func (l *linkHealth) keep(rails ...[]rail) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name := range l.of {
		if !slices.ContainsFunc(slices.Concat(rails...), func(r rail) bool { return r.nic == name }) {
			delete(l.of, name)
		}
	}
}

// exclude takes the rails of one transport whose interfaces have a fault out of use. If no other
// rail has a link, it keeps all in use: a bad rail is better than none.
func (l *linkHealth) exclude(rails []rail) {
	l.mu.Lock()
	defer l.mu.Unlock()
	good := false
	for i := range rails {
		r := &rails[i]
		r.fault = ""
		if j := l.of[r.nic]; j != nil && l.policy == config.Exclude {
			if f := j.Fault(); f.Kind != "" {
				r.fault = string(f.Kind) + ": " + f.Text
			}
		}
		good = good || !r.down()
	}
	for i := range rails {
		if !good {
			rails[i].fault = ""
		}
	}
}

// faults are those of the interfaces.
func (l *linkHealth) faults() map[string]health.Fault {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[string]health.Fault{}
	for name, j := range l.of {
		if f := j.Fault(); f.Kind != "" {
			out[name] = f
		}
	}
	return out
}

// watchLinks reads the counters until ctx ends. busy reports whether leases are open.
func (s *railSet) watchLinks(ctx context.Context, busy func() bool) {
	if s.links.policy == config.Off {
		return
	}
	t := time.NewTicker(linkLooks)
	defer t.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if busy() || n%idleLinkLooks == 0 {
			s.checkLinks()
		}
	}
}

// checkLinks reads the counters once, and applies a change.
func (s *railSet) checkLinks() {
	s.apply.Lock()
	tcp, rdma := s.of(config.TransTCP), s.of(config.TransGDR)
	changed := s.links.look(s.host, tcp, rdma)
	s.links.keep(tcp, rdma)
	if changed {
		s.applyHost(s.host)
	}
	s.apply.Unlock()
	if changed || slices.ContainsFunc(rdma, func(r rail) bool { return r.nic == "" }) {
		s.takeGDR()
	}
}

// nicOf is the interface of an RDMA device's port; empty: unknown.
func nicOf(h *topo.Host, port string) string {
	device, _, _ := strings.Cut(port, "/")
	i := slices.IndexFunc(h.NICs, func(n topo.NIC) bool { return n.RDMA == device })
	if i < 0 {
		return ""
	}
	return h.NICs[i].Name
}
