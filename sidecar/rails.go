package sidecar

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/peer"
	"github.com/kvspray/kvspray/control/route"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/topo"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/tcp"
)

// Times and bounds of rails.
const (
	railRetry    = time.Second     // between tries to listen on an address that cannot be bound yet
	watchRetry   = 5 * time.Second // between tries to watch links
	gbitPerMbit  = 1e-3
	maxAutoRails = 32 // rails from patterns
)

// rail is the current state of a local rail.
type rail struct {
	transport.Rail
	nic    string       // its interface; empty: none, or unknown
	prefix netip.Prefix // its link's network
	down   bool
	auto   bool // made by a pattern; it goes with its interface
}

// railSet holds the local rails, by backend. The host changes them while the node runs.
type railSet struct {
	apply sync.Mutex // held while the set is adapted to the host; above mu

	mu   sync.RWMutex // protects all below
	byB  map[string][]rail
	host *topo.Host // from the last look at the host; never nil
	told map[string]bool
}

func (s *railSet) of(backend string) []rail {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.Clone(s.byB[backend])
}

func (s *railSet) find(backend, name string) (rail, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	i := slices.IndexFunc(s.byB[backend], func(r rail) bool { return r.Name == name })
	if i < 0 {
		return rail{}, false
	}
	return s.byB[backend][i], true
}

// put records the rails that a backend has opened.
func (s *railSet) put(backend string, opened []transport.Rail) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range opened {
		s.byB[backend] = append(s.byB[backend], rail{Rail: r})
	}
}

// once reports whether a text is new, for logging it once.
func (s *railSet) once(what string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	const most = 256 // remembered texts
	if s.told[what] || len(s.told) >= most {
		return false
	}
	s.told[what] = true
	return true
}

// look adapts the rails to the host once, before peers receive them.
func (n *Node) look() {
	h, err := topo.Discover(topo.Options{})
	if err != nil {
		n.log.Warn("interfaces cannot be listed; only rails with a configured address are used", "err", err)
		return
	}
	n.hostChanged(h)
}

// watchRails follows links and addresses until ctx ends.
func (n *Node) watchRails(ctx context.Context) {
	for ctx.Err() == nil {
		err := topo.Watch(ctx, topo.Options{}, func(h *topo.Host, events []topo.Event) {
			for _, e := range events {
				n.log.Debug("interface "+e.Change.String(), "interface", e.NIC.Name, "link", e.NIC.Link, "addresses", e.NIC.Addrs)
			}
			n.hostChanged(h)
		})
		if err == nil {
			return
		}
		if n.rails.once("watch: " + err.Error()) {
			n.log.Warn("links are not watched: a link that goes down is detected by its silence", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(watchRetry):
		}
	}
}

// hostChanged adds and removes rails by patterns and interfaces, follows links, and notifies
// executor and peers of changes.
func (n *Node) hostChanged(h *topo.Host) {
	s := &n.rails
	s.apply.Lock()
	defer s.apply.Unlock()
	before := s.of(config.TransTCP)
	now, again := n.follow(h, before)
	s.mu.Lock()
	s.host = h
	s.byB[config.TransTCP] = now
	s.mu.Unlock()
	if again {
		n.lookAgain(h)
	}
	if slices.Equal(before, now) {
		return
	}
	n.railsChanged(before, now)
}

// follow returns the rails of tcp adapted to the host. again: an address could not be bound yet.
func (n *Node) follow(h *topo.Host, before []rail) (now []rail, again bool) {
	b, dynamic := n.tcp()
	auto := 0
	for _, r := range before {
		nic := h.At(addrOf(r.Address))
		switch {
		case !r.auto:
			// an address without an interface, for instance of a proxy, has no link to follow
			if nic != nil || r.nic != "" {
				r.down = nic == nil || !nic.Link
			}
			if nic != nil {
				r.nic = nic.Name
				r.place(nic, addrOf(r.Address))
			}
		case nic == nil || nic.Name != r.nic || !n.wanted(nic):
			if dynamic {
				b.RemoveRail(r.Name)
			}
			n.log.Info("rail gone", "rail", r.Name, "address", r.Address)
			continue
		default:
			r.down = !nic.Link
			r.speed(n, nic)
			r.place(nic, addrOf(r.Address))
			auto++
		}
		now = append(now, r)
	}
	for i := range h.NICs {
		nic := &h.NICs[i]
		if !dynamic || !n.wanted(nic) || slices.ContainsFunc(now, func(r rail) bool { return r.nic == nic.Name }) {
			continue
		}
		p, err := nic.Route()
		if err != nil {
			if n.rails.once(nic.Name + ": " + err.Error()) {
				n.log.Debug("an interface that matches a pattern is not a rail", "interface", nic.Name, "why", err)
			}
			continue
		}
		if auto >= maxAutoRails {
			if n.rails.once("bound") {
				n.log.Warn("too many interfaces match transports.tcp.rails; exclude some", "most", maxAutoRails)
			}
			break
		}
		rc, _ := n.cfg.RailFor(nic.Name)
		opened, err := b.AddRail(n.d.ctx, tcp.Rail{Name: nic.Name, Listen: net.JoinHostPort(p.Addr().String(), "0"), Tier: rc.Tier})
		if err != nil {
			again = true
			if n.rails.once(nic.Name + " at " + p.String()) {
				n.log.Warn("an interface is not a rail yet", "interface", nic.Name, "err", err)
			}
			continue
		}
		auto++
		r := rail{Rail: opened, nic: nic.Name, auto: true, down: !nic.Link}
		r.speed(n, nic)
		r.place(nic, p.Addr())
		now = append(now, r)
		n.log.Info("rail added", "rail", r.Name, "address", r.Address, "gbps", r.Gbps, "mtu", r.MTU, "numa", r.NUMA, "link", nic.Link)
	}
	return now, again
}

// wanted reports whether a pattern makes an interface a rail: it is administratively up, even if
// its link is down.
func (n *Node) wanted(nic *topo.NIC) bool {
	_, ok := n.cfg.RailFor(nic.Name)
	return ok && nic.Admin
}

// speed is the configured speed, else the kernel's.
func (r *rail) speed(n *Node, nic *topo.NIC) {
	rc, _ := n.cfg.RailFor(nic.Name)
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
func (n *Node) tcp() (*tcp.Backend, bool) {
	b, ok := n.backends.Get(config.TransTCP)
	if !ok {
		return nil, false
	}
	t, ok := b.(*tcp.Backend)
	return t, ok
}

// lookAgain retries later after a failed bind.
func (n *Node) lookAgain(h *topo.Host) {
	n.d.wg.Add(1)
	go func() {
		defer n.d.wg.Done()
		select {
		case <-n.d.ctx.Done():
			return
		case <-time.After(railRetry):
		}
		select {
		case <-n.d.ctx.Done(): // it may never start
			return
		case <-n.started:
		}
		n.rails.mu.RLock()
		last := n.rails.host
		n.rails.mu.RUnlock()
		if last == h { // else a newer look has covered it
			n.hostChanged(h)
		}
	}()
}

// railsChanged notifies all parts, the executor first: slices on a dead link move to other rails at
// once.
func (n *Node) railsChanged(before, after []rail) {
	now := n.enter()
	n.d.ex.SetRails(now, states(n.railList()))
	n.leave()
	for _, r := range after {
		was := slices.IndexFunc(before, func(o rail) bool { return o.Name == r.Name })
		if was < 0 || before[was].down == r.down {
			continue
		}
		if r.down {
			n.log.Warn("rail down", "rail", r.Name, "interface", r.nic)
			n.dropLanes(func(l transport.Lane) bool { return l.Backend() == config.TransTCP && l.Local() == r.Name })
			n.peers.LinkDown(addrOf(r.Address).AsSlice())
		} else {
			n.log.Info("rail up", "rail", r.Name, "interface", r.nic)
			n.greet(r)
		}
	}
	if err := n.peers.SetControl(n.d.ctx, n.controlAddresses()); err != nil && !errors.Is(err, net.ErrClosed) {
		n.log.Warn("a rail carries no control lanes yet", "err", err)
	}
	n.tellRails()
	n.dial.reconcileAll()
}

// dropLanes closes lanes. On a link that is down they would only wait for a retransmission long
// after it is up again.
func (n *Node) dropLanes(match func(transport.Lane) bool) {
	n.d.bindMu.RLock()
	defer n.d.bindMu.RUnlock()
	for _, e := range n.d.lanes {
		if match(e.lane) {
			n.closeLane(e)
		}
	}
}

// railList describes the local rails to peers.
func (n *Node) railList() (out []*peerv1.Rail) {
	for _, b := range n.backends {
		for _, r := range n.rails.of(b.Name()) {
			if len(out) < peer.MaxRails {
				out = append(out, &peerv1.Rail{Transport: b.Name(), Name: r.Name, Address: r.Address, Gbps: r.Gbps, Mtu: uint32(max(r.MTU, 0)),
					Numa: int32(r.NUMA), Down: r.down})
			}
		}
	}
	return out
}

func states(rails []*peerv1.Rail) (out []exec.Rail) {
	for _, r := range rails {
		out = append(out, exec.Rail{Transport: r.Transport, Name: r.Name, Down: r.Down})
	}
	return out
}

// tellRails sends the list to every peer, including this node, which is its own peer.
func (n *Node) tellRails() {
	for _, boot := range n.dial.boots() {
		if boot == n.boot {
			n.peerRails(boot, n.railList())
		} else {
			n.sendFrame(boot, n.railsFrame())
		}
	}
}

// railsFrame is the frame with the local rails.
func (n *Node) railsFrame() *peerv1.ControlFrame {
	return &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Rails{Rails: &peerv1.Rails{Rails: n.railList(), ControlAddresses: n.peers.Addresses()}}}
}

// peerRails applies a peer's list of rails.
func (n *Node) peerRails(boot transfer.Boot, said []*peerv1.Rail) {
	good, refused := peer.CheckRails(said)
	d := &n.dial
	d.mu.Lock()
	r := d.peers[boot]
	if r == nil {
		d.mu.Unlock()
		return
	}
	complain := len(refused) > 0 && !r.complained
	r.complained = r.complained || complain
	r.rails = good
	d.mu.Unlock()
	if complain {
		n.log.Warn("a peer announced invalid rails; logged once", "peer", boot.String(), "refused", refused)
	}
	now := n.enter()
	n.d.ex.PeerRails(now, boot, states(good))
	n.leave()
	for _, x := range good {
		if x.Down {
			n.dropLanes(func(l transport.Lane) bool {
				return l.Peer() == boot && l.Backend() == x.Transport && l.Remote() == x.Name
			})
		}
	}
	d.reconcile(boot)
}

// near returns the distance of a rail from a worker's memory, for the executor: 1 to 3; 0 if
// unknown, so that no rail is preferred.
func (n *Node) near(w *connector.Worker, backend, name string) int {
	r, ok := n.rails.find(backend, name)
	if !ok {
		return 0
	}
	if r.Tier != 0 {
		return r.Tier // the configured distance
	}
	n.rails.mu.RLock()
	h := n.rails.host
	n.rails.mu.RUnlock()
	nic := h.NIC(r.nic)
	m, known := memoryOf(w)
	if nic == nil || !known || m.GPU == "" && len(h.Nodes) < 2 {
		return 0
	}
	return h.Tier(nic, m)
}

// placed is a mem.Device with a known PCI address.
type placed interface{ PCI() string }

// memoryOf locates the cache of a worker, by its first region with a known place.
func memoryOf(w *connector.Worker) (topo.Memory, bool) {
	for _, r := range w.Regions {
		if d, ok := r.Device().(placed); ok {
			return topo.Memory{GPU: d.PCI(), Node: topo.Unknown}, true
		}
		if node := r.Node(); node >= 0 {
			return topo.Memory{Node: node}, true
		}
	}
	return topo.Memory{}, false
}

// railView is a local rail in /debug/state.
type railView struct {
	Transport string  `json:"transport"`
	Rail      string  `json:"rail"`
	Address   string  `json:"address"`
	Interface string  `json:"interface,omitempty"`
	Gbps      float64 `json:"gbps,omitempty"`
	MTU       int     `json:"mtu,omitempty"`
	NUMA      int     `json:"numa"`
	Down      bool    `json:"down"`
	Auto      bool    `json:"auto"` // by a pattern
}

func (n *Node) railViews() (out []railView) {
	for _, b := range n.backends {
		for _, r := range n.rails.of(b.Name()) {
			out = append(out, railView{b.Name(), r.Name, r.Address, r.nic, r.Gbps, r.MTU, r.NUMA, r.down, r.auto})
		}
	}
	return out
}

// routes returns the paths to a peer, best first.
func (n *Node) routes(r *remote) []route.Candidate {
	in := route.Input{SameHost: n.host != "" && n.host == r.hostBoot, Device: n.gpus.inUse()}
	for i, b := range n.backends {
		in.Transports = append(in.Transports, route.Transport{Name: b.Name(), Rank: i, SameHost: b.Caps().SameHost, Device: b.Caps().Device})
		for _, x := range n.rails.of(b.Name()) {
			in.Local = append(in.Local, route.Rail{Transport: b.Name(), Name: x.Name, Address: x.Address, Prefix: x.prefix, Gbps: x.Gbps, Down: x.down, Tier: x.Tier})
		}
	}
	for _, x := range r.rails {
		in.Remote = append(in.Remote, route.Rail{Transport: x.Transport, Name: x.Name, Address: x.Address, Gbps: x.Gbps, Down: x.Down})
	}
	return route.Rank(in)
}
