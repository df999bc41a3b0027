// Package sidecar composes one node from its parts: the connector towards engines, the control
// layer towards peers, the transports, and the executor between them. Tests start many nodes in one
// process; nothing here is global.
//
// Invariants: one goroutine at a time enters the executor, and its actions are performed in its
// order (driver). Every backend has a grant before its peer receives it. Only the executor decides
// that a lease is complete. An engine's memory is touched only between its WorkerUp and the end of
// its last lease.
//
// Goroutines: one per open lane, per fence that has to wait, per origin close and per copy, the
// HTTP server, and those of the parts. Run joins them all.
package sidecar

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/control/peer"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/gpu"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/sys/topo"
	"github.com/kvspray/kvspray/parseblock"
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
	cfg     *config.Config
	log     *slog.Logger
	boot    transfer.Boot
	host    string // kernel boot id
	version string
	grace   time.Duration

	reg      *parseblock.Registry
	plans    *planner
	metrics  *metrics.Set
	gather   prometheus.Gatherer
	backends transport.Registry
	guarded  bool  // Caps.Guarded of all backends
	gpus     *gpus // nil: switched off
	copies   *copies
	rails    railSet // local rails
	engine   *connector.Server
	peers    *peer.Mesh
	creds    *keys.Credentials // nil: none
	d        driver
	dial     dialer
	troubles troubles
	gdrNews  chan struct{} // gdr's rails have changed
	hashes   *hashes
	records  *records
	totals   totals
	self     transport.Peer

	ready    atomic.Bool
	draining atomic.Bool
	drain    chan struct{} // closed by the first Drain
	once     sync.Once
	started  chan struct{} // closed once every address is known, or Run has failed

	addrMu   sync.Mutex // protects the addresses below, which are known once Run has started
	endpoint string
	http     string
}

// New checks the options and makes a node. It touches neither disk nor network before Run.
func New(opt Options) (*Node, error) {
	if opt.Config == nil {
		return nil, errors.New("sidecar: no configuration: pass config.Default() or the result of config.Load")
	}
	if opt.Log == nil {
		opt.Log = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	if opt.Registry == nil {
		opt.Registry = prometheus.NewRegistry()
	}
	n := &Node{cfg: opt.Config, version: opt.Version, reg: parseblock.Default(), metrics: metrics.New(opt.Registry), gather: opt.Registry,
		drain: make(chan struct{}), started: make(chan struct{}), gdrNews: make(chan struct{}, 1),
		grace: time.Duration(opt.Config.Transfer.Grace)}
	if _, err := rand.Read(n.boot[:]); err != nil {
		return nil, fmt.Errorf("sidecar: boot id: %w", err)
	}
	n.plans = newPlanner(n.reg)
	n.log = opt.Log.With("node", opt.Config.Node, "boot", fmt.Sprintf("%x", n.boot[:4]))
	n.self = transport.Peer{Boot: n.boot, Self: n.boot}
	if _, err := rand.Read(n.self.Key[:]); err != nil {
		return nil, fmt.Errorf("sidecar: key: %w", err)
	}
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		n.log.Warn("kernel boot id unknown; no peer counts as being on this host", "err", err)
	}
	n.host = strings.TrimSpace(string(b))
	if n.gpus, err = newGPUs(n.cfg, n.log); err != nil {
		return nil, err
	}
	if n.backends, err = newBackends(n.cfg, n.gpus, n.gdrChanged, n.log); err != nil {
		return nil, err
	}
	if err := n.metrics.Links(opt.Registry, gpu.LinkStates, n.linkSamples); err != nil {
		return nil, fmt.Errorf("sidecar: metrics: %w", err)
	}
	if err := n.metrics.Memory(opt.Registry, n.memorySamples); err != nil {
		return nil, err
	}
	if err := n.metrics.Rails(opt.Registry, n.railSamples); err != nil {
		return nil, fmt.Errorf("sidecar: metrics: %w", err)
	}
	if err := errors.Join(n.metrics.Nonsense(opt.Registry, n.nonsense),
		n.metrics.Refusals(opt.Registry, n.refusals)); err != nil {
		return nil, fmt.Errorf("sidecar: metrics: %w", err)
	}
	n.copies = newCopies(n)
	n.dial.node = n
	n.rails.byB, n.rails.told, n.rails.host = map[string][]rail{}, map[string]bool{}, &topo.Host{}
	n.d.armed = lease.Never
	n.d.awaits = map[uint64]func(connector.Admission){}
	n.d.fenced = map[*connector.Worker]func(){}
	n.d.grants = map[bindName]*exec.ReceivePart{}
	n.d.origins = map[bindName]*exec.SendPart{}
	n.d.lanes = map[uint64]*laneEntry{}
	n.d.inflows.all = map[inflowName]*inflow{}
	n.dial.peers, n.dial.unreached, n.dial.named = map[transfer.Boot]*remote{}, map[string]struct{}{}, map[string]struct{}{}
	return n, nil
}

// Boot is the boot id of this node.
func (n *Node) Boot() transfer.Boot { return n.boot }

// Started is closed once the addresses are known, or Run has failed.
func (n *Node) Started() <-chan struct{} { return n.started }

// Endpoint is the address that peers dial; known once started.
func (n *Node) Endpoint() string {
	n.addrMu.Lock()
	defer n.addrMu.Unlock()
	return n.endpoint
}

// HTTPAddr is the address of health and metrics; empty without one.
func (n *Node) HTTPAddr() string {
	n.addrMu.Lock()
	defer n.addrMu.Unlock()
	return n.http
}

// Ready reports whether the node serves engines and peers, and is not draining.
func (n *Node) Ready() bool { return n.ready.Load() && !n.draining.Load() }

// Drain starts the orderly stop: no new leases, open leases continue, and Run returns when they
// have ended or the time is over.
func (n *Node) Drain() { n.once.Do(func() { close(n.drain) }) }

// Run serves until ctx ends, which drains, or until a fatal failure. It joins every goroutine.
func (n *Node) Run(ctx context.Context) (err error) {
	announce := sync.OnceFunc(func() { close(n.started) })
	defer announce()
	n.d.start = time.Now()
	// Fences and lanes outlive ctx: draining needs them.
	n.d.ctx, n.d.stop = context.WithCancel(context.Background())
	var closers []func() error
	defer func() {
		n.ready.Store(false)
		n.d.stop()
		for i := len(closers) - 1; i >= 0; i-- {
			if cerr := closers[i](); cerr != nil && !errors.Is(cerr, net.ErrClosed) {
				n.log.Warn("stop", "err", cerr)
			}
		}
		n.d.mu.Lock()
		if n.d.timer != nil {
			n.d.timer.Stop()
		}
		n.d.mu.Unlock()
		n.d.wg.Wait()
	}()

	n.log.Info("routines chosen to copy memory", "by_size", strings.Join(mem.CopyChoices(), "; "))
	if n.hashes, err = newHashes(n.cfg.Trace.BlockHashes, n.log); err != nil {
		return err
	}
	closers = append(closers, n.hashes.Close)
	if n.records, err = newRecords(n.cfg.Trace.Transfers, n.log); err != nil {
		return err
	}
	closers = append(closers, n.records.Close)

	// The executor exists before anything can call it; peerUp passes its own endpoint to it.
	policy, ok := spray.ParsePolicy(n.cfg.Transfer.Policy)
	if !ok {
		return fmt.Errorf("sidecar: transfer.policy: %q is unknown: use spray, round-robin or weighted", n.cfg.Transfer.Policy)
	}
	n.d.mu.Lock() // metrics may be read already
	n.d.ex = exec.New(exec.Config{Boot: n.boot, Planner: n.plans, Transports: n.cfg.Transports.Order,
		Deadline: time.Duration(n.cfg.Transfer.Deadline), MatchTimeout: time.Duration(n.cfg.Transfer.Partner), Grace: n.grace,
		MaxAttempts: n.cfg.Transfer.MaxAttempts, MaxSlices: n.cfg.Transfer.MaxSlices,
		Policy: policy, Distance: n.near})
	n.d.mu.Unlock()

	if n.peers, err = newPeers(n); err != nil { // the first lane may ask for a key
		return err
	}
	if n.gpus != nil {
		closers = append(closers, n.gpus.Close) // the first here is closed last
	}
	closers = append(closers, func() error { n.copies.wg.Wait(); return nil }) // d.ctx has ended them
	if n.gpus != nil {
		if err = n.gpus.start(n.cfg.Transports.GPU.Open); err != nil {
			return err
		}
	}
	live := n.backends[:0:0]
	for _, b := range n.backends {
		rails, oerr := b.Open(n.d.ctx, host{n})
		if errors.Is(oerr, transport.ErrNotSupported) {
			n.log.Warn("transport not available", "transport", b.Name(), "err", oerr)
			continue
		}
		if oerr != nil {
			return fmt.Errorf("sidecar: open transport %s: %w", b.Name(), n.withFolder(b, oerr))
		}
		closers = append(closers, b.Close)
		live = append(live, b)
		n.rails.put(b.Name(), rails)
	}
	if n.backends = live; len(live) == 0 {
		return fmt.Errorf("sidecar: none of the transports %v works here: see 'kvspray doctor'", n.cfg.Transports.Order)
	}

	n.guarded = !slices.ContainsFunc(live, func(b transport.Backend) bool { return !b.Caps().Guarded })

	n.look()
	// Every address is bound before a peer learns of this node: a second sidecar, whose socket or
	// port is in use, ends here without notice to peers.
	if err = n.peers.SetControl(ctx, n.controlAddresses()); err == nil {
		err = n.peers.Listen(ctx)
	}
	if err != nil {
		return fmt.Errorf("sidecar: %w", err)
	}
	closers = append(closers, n.peers.Close)

	var devices connector.Devices
	var engines connector.Engines
	if n.gpus != nil {
		devices = n.gpus
		if n.gpus.asksEngines() {
			engines = n.gpus
		}
	}
	n.engine, err = connector.New(connector.Options{
		Devices: devices, Engines: engines,
		Socket: n.cfg.Engine.Socket, Boot: n.boot, Node: n.cfg.Node, HostBoot: n.host, Endpoint: n.Endpoint, Events: n, Log: n.log,
		Limits: connector.Limits{Sessions: n.cfg.Engine.MaxSessions, Leases: n.cfg.Engine.MaxLeases, Regions: n.cfg.Engine.MaxRegions},
		Hooks:  n.hooks(), AllowUIDs: uids(n.cfg.Engine.AllowedUIDs), SocketMode: socketMode(n.cfg.Engine.AllowedUIDs),
		Deadline: time.Duration(n.cfg.Transfer.Deadline), Partner: time.Duration(n.cfg.Transfer.Partner), Grace: n.grace,
	})
	if err != nil {
		return err
	}
	if err := n.engine.Listen(); err != nil {
		return err
	}
	closers = append(closers, n.engine.Close)
	web, err := n.listenHTTP(ctx)
	if err != nil {
		return err
	}
	if web != nil {
		closers = append(closers, web.Close)
	}
	if err := n.peers.Start(ctx); err != nil {
		return fmt.Errorf("sidecar: %w", err)
	}
	n.addrMu.Lock()
	n.endpoint = n.peers.Endpoint()
	n.addrMu.Unlock()
	n.selfUp()
	failed := make(chan error, 2)
	engineCtx, engineStop := context.WithCancel(context.Background())
	n.d.wg.Add(1)
	go func() {
		defer n.d.wg.Done()
		if serr := n.engine.Serve(engineCtx); serr != nil && engineCtx.Err() == nil {
			failed <- fmt.Errorf("sidecar: engine socket: %w", serr)
		}
	}()
	closers = append(closers, func() error { engineStop(); return nil })

	if web != nil {
		srv := &http.Server{Handler: n.handler(), ReadHeaderTimeout: headerTimeout, ReadTimeout: requestTimeout,
			WriteTimeout: replyTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes}
		n.d.wg.Add(1)
		go func() {
			defer n.d.wg.Done()
			if herr := srv.Serve(web); !errors.Is(herr, http.ErrServerClosed) {
				failed <- fmt.Errorf("sidecar: http: %w", herr)
			}
		}()
		closers = append(closers, srv.Close)
	}
	n.d.wg.Add(1)
	go func() { defer n.d.wg.Done(); n.publish(n.d.ctx) }()
	n.d.wg.Add(1)
	go func() { defer n.d.wg.Done(); n.watchRails(n.d.ctx) }()
	n.d.wg.Add(1)
	go func() { defer n.d.wg.Done(); n.watchGDR(n.d.ctx) }()
	n.d.wg.Add(1)
	go func() { defer n.d.wg.Done(); n.watchIdle(n.d.ctx) }()
	n.d.wg.Add(1)
	go func() { defer n.d.wg.Done(); n.watchCertificates(n.d.ctx, certLooks) }()

	n.ready.Store(true)
	announce()
	n.log.Info("sidecar ready", "endpoint", n.Endpoint(), "socket", n.cfg.Engine.Socket, "http", n.HTTPAddr(), "transports", n.names(),
		"version", n.version)
	select {
	case <-ctx.Done():
	case <-n.drain:
	case err = <-failed:
		return err
	}
	n.shut()
	return nil
}

// withFolder adds the setting of the directory that shm could not use.
func (n *Node) withFolder(b transport.Backend, err error) error {
	if b.Name() != config.TransSHM {
		return err
	}
	key, value := "transports.shm.dir", n.cfg.Transports.SHM.Dir
	if value == "" {
		key, value = "--socket (engine.socket)", n.cfg.Engine.Socket
	}
	return fmt.Errorf("%w: it is the directory of %s %s: name a directory that this user may write to", err, key, value)
}

// listenHTTP binds the address of health and metrics; nil: switched off.
func (n *Node) listenHTTP(ctx context.Context) (net.Listener, error) {
	addr := n.cfg.HTTP.Listen
	if addr == config.Off || addr == "" {
		return nil, nil //nolint:nilnil // it is switched off
	}
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("sidecar: http.listen %s: %w: is another sidecar running? Choose another port with --http, 127.0.0.1:0 for any, or off", addr, err)
	case err != nil:
		return nil, fmt.Errorf("sidecar: http.listen %s: %w: name host:port of this host with --http, 127.0.0.1:0 for any port, or off", addr, err)
	}
	n.addrMu.Lock()
	n.http = ln.Addr().String()
	n.addrMu.Unlock()
	return ln, nil
}

// shut lets running leases end within the configured time, and fences the rest.
func (n *Node) shut() {
	n.draining.Store(true)
	n.metrics.Draining(true)
	n.log.Info("draining", "timeout", time.Duration(n.cfg.Drain.Timeout))
	n.enter()
	n.d.ex.DrainLeases()
	n.leave()
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(n.cfg.Drain.Timeout))
	defer cancel()
	defer n.lastWords()
	if err := n.engine.Drain(ctx); err == nil {
		n.log.Info("drained")
		return
	}
	now := n.enter()
	dests, sources := n.d.ex.Open()
	n.d.ex.Abort(now, "the sidecar is stopping")
	n.leave()
	n.copies.stop(nil, errCopyStops)
	n.log.Warn("drain timed out; open leases are fenced", "receiving", dests, "sending", sources)
	last, cancel2 := context.WithTimeout(context.Background(), n.grace)
	defer cancel2()
	if err := n.engine.Drain(last); err != nil {
		n.log.Warn("open leases remain: the shims end them with the proved exit of this process", "err", err)
	}
}

// Times for peers to acknowledge the last messages.
const (
	lastWordsTime = 500 * time.Millisecond
	lastWordsTick = time.Millisecond
)

// lastWords waits until the executor's decisions are done and peers have acknowledged them: for its
// engine the last lease ends a moment before the other side receives that (shutdown flush).
func (n *Node) lastWords() {
	ctx, cancel := context.WithTimeout(context.Background(), lastWordsTime)
	defer cancel()
	tick := time.NewTicker(lastWordsTick)
	defer tick.Stop()
	for n.performing() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
	if err := n.peers.Flush(ctx); err != nil {
		n.log.Debug("a peer has not acknowledged everything; its leases end by their deadlines", "err", err)
	}
}

func (n *Node) performing() bool {
	n.d.mu.Lock()
	defer n.d.mu.Unlock()
	return n.d.performing
}

func (n *Node) names() []string {
	var s []string
	for _, b := range n.backends {
		s = append(s, b.Name())
	}
	return s
}

func (n *Node) backendOf(name string) (int, transport.Caps) {
	for i, b := range n.backends {
		if b.Name() == name {
			return min(i, maxBackends-1), b.Caps()
		}
	}
	return maxBackends - 1, transport.Caps{}
}

func uids(in []int) (out []uint32) {
	for _, u := range in {
		out = append(out, uint32(u))
	}
	return out
}

// socketMode lets other users reach the socket if some are allowed; credentials are checked in any
// case.
func socketMode(allowed []int) uint32 {
	if len(allowed) > 0 {
		return 0o666
	}
	return 0o600
}

// workerDead distinguishes an exit from a takeover by a new session of the same engine, which
// presents its leases again.
func workerDead(why error) bool { return !errors.Is(why, connector.ErrSuperseded) }
