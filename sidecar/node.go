// Package sidecar composes one node from its parts: the connector towards engines, the control
// layer towards peers, the transports, and the executor between them. Tests start many nodes in one
// process; nothing here is global.
//
// Node wires the parts and is then out of the way: engines call engineEvents, backends call the
// driver (control/driver), peers call the conversation. Each part owns its state:
//
//	engineEvents, completions  from and to engines; copies within an engine
//	conversation               frames of peers; dialer keeps the lanes, railSet follows the rails
//	planner                    plans, and the memory of their parts
//	observer                   metrics, log lines, trace files (internal/trace)
//	internal/exchange          pages of the store, to and from other sidecars
//	internal/segments          batches between segments of engines
//	internal/web               HTTP: health, metrics, state
//
// Invariants: only the executor decides that a lease is complete. An engine's memory is touched
// only between its WorkerUp and the end of its last lease.
//
// Goroutines: one per open lane, per fence that has to wait, per origin close and per copy, the
// HTTP server, and those of the parts. Run joins them all.
package sidecar

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/sidecar/internal/local"
	"github.com/kvspray/kvspray/sidecar/internal/plans"
	"github.com/kvspray/kvspray/sidecar/internal/segments"
	"github.com/kvspray/kvspray/sidecar/internal/trace"
	"github.com/kvspray/kvspray/sidecar/internal/web"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Options are the inputs of New.
type Options struct {
	Config   *config.Config
	Log      *slog.Logger
	Registry *prometheus.Registry // nil: a new one
	Version  string
}

// Node is one sidecar.
type Node struct {
	*life
	cfg      *config.Config
	log      *slog.Logger
	boot     transfer.Boot
	host     string // kernel boot id
	version  string
	grace    time.Duration
	metrics  *metrics.Set
	registry *prometheus.Registry

	proc     *driver.Goroutines
	driver   *driver.Driver
	backends transport.Registry // as configured
	live     *openBackends
	gpus     *gpus             // nil: switched off
	engine   *connector.Server // Run makes it before the first engine comes

	plans    *plans.Planner
	rails    *railSet
	devices  *gpuHealth
	dial     *dialer
	conv     *conversation
	local    *local.Leases
	copies   *copies
	pages    *pageStore
	segments *segments.Segments
	observer *observer
	results  *completions
	events   *engineEvents
	web      *web.Server
	served   *served
}

// New checks the options and makes a node. It touches neither disk nor network before Run.
func New(opt Options) (*Node, error) {
	if opt.Config == nil {
		return nil, errors.New("sidecar: no configuration: pass config.Default() or the result of " +
			"config.Load")
	}
	if opt.Log == nil {
		opt.Log = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	if opt.Registry == nil {
		opt.Registry = prometheus.NewRegistry()
	}
	n := &Node{life: newLife(), cfg: opt.Config, version: opt.Version,
		metrics: metrics.New(opt.Registry), registry: opt.Registry, proc: driver.NewGoroutines(),
		live:  &openBackends{},
		grace: time.Duration(opt.Config.Transfer.Grace)}
	if _, err := rand.Read(n.boot[:]); err != nil {
		return nil, fmt.Errorf("sidecar: boot id: %w", err)
	}
	self := transport.Peer{Boot: n.boot, Self: n.boot}
	if _, err := rand.Read(self.Key[:]); err != nil {
		return nil, fmt.Errorf("sidecar: key: %w", err)
	}
	n.log = opt.Log.With("node", opt.Config.Node, "boot", fmt.Sprintf("%x", n.boot[:4]))
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		n.log.Warn("kernel boot id unknown; no peer counts as being on this host", "err", err)
	}
	n.host = strings.TrimSpace(string(b))
	if n.gpus, err = newGPUs(n.cfg, n.log); err != nil {
		return nil, err
	}
	n.rails = newRailSet(n.cfg, n.proc, n.live, n.started, n.log)
	if n.backends, err = newBackends(n.cfg, n.gpus, n.rails.gdrChanged, n.log); err != nil {
		return nil, err
	}
	n.join(self)
	n.served = &served{cfg: &n.cfg.Engine, health: n.devices.view,
		leaving: func() bool { return n.Leaving() > 0 }, own: ownAddress(n.cfg), started: time.Now(),
		roles: map[string]string{}}
	n.web = web.New(web.Options{Node: n.cfg.Node, Version: n.version, Boot: n.boot, Gather: n.registry,
		Hosts: hosts(n.cfg), AdminUIDs: uids(n.cfg.Engine.AdminUIDs), Log: n.log,
		Driver: n.driver, Life: n.life,
		Peers: peerViews{n.conv}, Rails: n.rails.views, Totals: n.observer.counts,
		Links:     n.gpus.linkStates,
		Executors: n.gpus.executorStates, Workers: n.workers,
		Transports: func() []string { return namesOf(n.live.Registry) }, Store: n.pages.state,
		Problems:   n.problems,
		Health:     n.health,
		SetRole:    n.setRole,
		StoreCalls: n.pages.calls,
		Recent:     n.observer.transfers.Recent, Find: n.observer.transfers.Find,
		Order: n.cfg.Transports.Order})
	s := &samples{driver: n.driver, rails: n.rails, gpus: n.gpus, devices: n.devices}
	if err := s.register(n.metrics, opt.Registry); err != nil {
		return nil, err
	}
	return n, nil
}

// join makes the parts around the driver, and connects them.
func (n *Node) join(self transport.Peer) {
	n.plans = plans.New(parseblock.Default())
	n.observer = &observer{metrics: n.metrics, log: n.log, order: n.cfg.Transports.Order,
		live: n.live, transfers: &trace.Lines{}, hashes: trace.Hashes{Lines: &trace.Lines{}},
		tracing: newTracing(n.cfg.Trace.OTLP, n.proc)}
	n.results = &completions{observer: n.observer, plans: n.plans, log: n.log, complete: n.complete}
	n.dial = &dialer{boot: n.boot, host: n.host, cfg: n.cfg, log: n.log, proc: n.proc, rails: n.rails,
		gpus: n.gpus, live: n.live, peers: map[transfer.Boot]*remote{},
		unreached: map[string]struct{}{}, named: map[string]struct{}{}}
	n.conv = &conversation{cfg: n.cfg, log: n.log, refused: admit.Log{Logger: n.log},
		unsent: admit.Log{Logger: n.log}, unlearned: admit.Log{Logger: n.log}, boot: n.boot,
		host: n.host, version: n.version, self: self, proc: n.proc,
		metrics: n.metrics, plans: n.plans, descriptions: newDescriptions(n.plans), dial: n.dial,
		rails: n.rails, workers: n.workers}
	n.driver = driver.New(driver.Config{
		Exec: exec.New(exec.Config{Boot: n.boot, Planner: n.plans, Transports: n.cfg.Transports.Order,
			Deadline:     time.Duration(n.cfg.Transfer.Deadline),
			MatchTimeout: time.Duration(n.cfg.Transfer.MatchTimeout),
			HoldTimeout:  time.Duration(n.cfg.Transfer.Hold), Grace: n.grace,
			MaxAttempts: n.cfg.Transfer.MaxAttempts, MaxSlices: n.cfg.Transfer.MaxSlices,
			Distance: n.rails.near}),
		Process: n.proc, Peers: n.conv, Engines: n.results, Memory: n.plans,
		Rails:    localRails{n.rails, n.gpus},
		Observer: n.observer, Log: n.log, Grace: n.grace})
	n.dial.lanes, n.conv.driver, n.rails.changed = n.driver, n.driver, n.conv.railsChanged
	n.local = local.New(n.proc.Context())
	n.devices = newGPUHealth(n.cfg, n.workers, n.failWorker, n.log)
	n.copies = &copies{leases: n.local, gpus: n.gpus, metrics: n.metrics, log: n.log,
		transfers: n.observer.transfers, complete: n.complete,
		loaded: func(w *engines.Worker, id transfer.LeaseID, parts int) { n.engine.Loaded(w, id, parts) },
		slots:  make(chan struct{}, maxCopiesRunning), turns: turns{of: map[*engines.Worker]*turn{}}}
	n.pages = &pageStore{cfg: &n.cfg.Store, gossip: n.cfg.GossipOn(), boot: n.boot,
		grace:  n.grace,
		leases: n.local, registry: n.registry, log: n.log, conv: n.conv, driver: n.driver, gpus: n.gpus,
		transfers: n.observer.transfers, complete: n.complete}
	n.conv.pages, n.results.pages = n.pages, n.pages
	n.segments = n.newSegments()
	n.plans.Lists, n.conv.segments, n.results.segments = n.segments, n.segments, n.segments
	n.events = &engineEvents{driver: n.driver, proc: n.proc, local: n.local, pages: n.pages,
		segments: n.segments,
		life:     n.life, devices: n.devices, tracing: n.observer.tracing}
}

// openBackends are the backends that are open. Run sets them before the first peer.
type openBackends struct{ transport.Registry }

// Boot is the boot id of this node.
func (n *Node) Boot() transfer.Boot { return n.boot }

// complete returns the result of a lease to its engine.
func (n *Node) complete(w *engines.Worker, c engines.Completion) error {
	return n.engine.Complete(w, c)
}

// workers are the registered engine workers.
func (n *Node) workers() []*engines.Worker { return n.engine.Workers() }

// localRails describes the rails to the driver.
type localRails struct {
	*railSet
	gpus *gpus
}

// DeviceSlices implements driver.Rails.
func (l localRails) DeviceSlices() bool { return l.gpus.inUse() }

func namesOf(backends transport.Registry) []string {
	var s []string
	for _, b := range backends {
		s = append(s, b.Name())
	}
	return s
}
