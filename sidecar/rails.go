package sidecar

import (
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/peer"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/sys/topo"
	"github.com/kvspray/kvspray/transport"
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
	noLink bool         // no carrier
	fault  string       // why health keeps it out of use; empty: it does not
	auto   bool         // made by a pattern; it goes with its interface
}

// down reports whether the rail is out of use, here and at peers.
func (r *rail) down() bool { return r.noLink || r.fault != "" }

// outOfUse is why a rail with a link is down; empty: its link is down, or it is in use.
func (r *rail) outOfUse() string {
	if r.noLink {
		return ""
	}
	return r.fault
}

// railSet holds the local rails, by backend, and follows the host, which changes them while the
// node runs.
type railSet struct {
	cfg     *config.Config
	log     *slog.Logger
	proc    *driver.Goroutines
	started <-chan struct{}                              // closed once every address is known
	changed func(transport string, before, after []rail) // after a change, with apply held

	gdrNews chan struct{} // gdr's rails have changed
	links   *linkHealth
	live    *openBackends

	apply sync.Mutex // held while the set is adapted to the host; above mu

	mu     sync.RWMutex // protects all below
	byB    map[string][]rail
	host   *topo.Host      // from the last look at the host; never nil
	logged map[string]bool // texts, for once
}

func newRailSet(cfg *config.Config, proc *driver.Goroutines, live *openBackends,
	started <-chan struct{}, log *slog.Logger) *railSet {
	return &railSet{cfg: cfg, log: log, proc: proc, live: live, started: started,
		gdrNews: make(chan struct{}, 1), links: newLinkHealth(cfg.Health.Rails),
		byB: map[string][]rail{}, logged: map[string]bool{}, host: &topo.Host{}}
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
	const maxLogged = 256 // texts
	if s.logged[what] || len(s.logged) >= maxLogged {
		return false
	}
	s.logged[what] = true
	return true
}

// railList describes the local rails to peers.
func (s *railSet) list() (out []*peerv1.Rail) {
	for _, b := range s.live.Registry {
		for _, r := range s.of(b.Name()) {
			if len(out) < peer.MaxRails {
				out = append(out, &peerv1.Rail{Transport: b.Name(), Name: r.Name, Address: r.Address,
					Gbps: r.Gbps, Down: r.down()})
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

// near returns the distance of a rail from a worker's memory, for the executor: 1 to 3; 0 if
// unknown, so that no rail is preferred.
func (s *railSet) near(w *engines.Worker, backend, name string) int {
	r, ok := s.find(backend, name)
	if !ok {
		return 0
	}
	if r.Tier != 0 {
		return r.Tier // the configured distance
	}
	s.mu.RLock()
	h := s.host
	s.mu.RUnlock()
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
func memoryOf(w *engines.Worker) (topo.Memory, bool) {
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

func (s *railSet) views() (out []nodeapi.Rail) {
	for _, b := range s.live.Registry {
		for _, r := range s.of(b.Name()) {
			out = append(out, nodeapi.Rail{Transport: b.Name(), Rail: r.Name, Address: r.Address,
				Interface: r.nic, Gbps: r.Gbps, MTU: r.MTU,
				Down: r.down(), Fault: r.fault, Auto: r.auto})
		}
	}
	return out
}

// Rail implements driver.Rails.
func (s *railSet) Rail(backend, name string) (transport.Rail, bool) {
	r, ok := s.find(backend, name)
	return r.Rail, ok
}

// up is 1, or 0 if the link of a rail is known to be down, or the rail is gone.
func (s *railSet) up(backend, name string) float64 {
	if r, ok := s.find(backend, name); !ok || r.noLink {
		return 0
	}
	return 1
}
