package sim

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"time"

	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/simfabric"
)

// Node is a machine: its rails, one engine, and the sidecar that lives there now.
type Node struct {
	c        *Cluster
	Host     *simfabric.Host
	addr     string
	side     *sidecar // nil: it is dead
	engine   *engine  // nil: it is dead
	joined   []*Node  // whom it opens lanes to
	joinedBy []*Node
	leap     time.Duration // its clock is so far from the fabric's
	freezes  int
	ranks    int // of its engine
	nextID   uint64
	held     *Held // nil: not measured
}

// sidecar is one life of a sidecar process: the production driver and executor, and what surrounds
// them.
type sidecar struct {
	c       *Cluster
	n       *Node
	boot    transfer.Boot
	dead    bool
	ex      *exec.Exec
	workers []*engines.Worker // of the engine's present life
	planner planner
	drv     *driver.Driver
	lock    *lock
	backend *simfabric.Backend
	rails   []transport.Rail
	tickAt  exec.Instant // -1: none is armed

	lanes    map[uint64]transport.Lane
	dials    map[uint64]*dial // by lane, of those that this process opened
	dialed   []*dial          // all of them
	sinks    map[*transport.Grant]*sink
	sources  map[*transport.Origin]*source // of open origins
	pipes    map[transfer.Boot]*pipe
	over     map[transfer.Boot]bool // boots of peers that were superseded
	moving   map[uint64]bool        // slices that were given to lanes and have not ended, by cookie
	owners   map[transfer.LeaseID]*lease
	received map[transfer.Boot]uint64 // bytes, by sender
	turns    map[transfer.Boot]*turns
	served   []transfer.Boot // peers to which this event gave slices
}

// AddNode adds a node to the cluster on a host with these rails, and an engine of one rank.
func (c *Cluster) AddNode(rails ...simfabric.RailSpec) *Node { return c.AddRanks(1, rails...) }

// AddRanks adds one whose engine has ranks: 1, 2 or 4, each with its part of the layers.
func (c *Cluster) AddRanks(ranks int, rails ...simfabric.RailSpec) *Node {
	n := &Node{c: c, addr: fmt.Sprintf("n%d", len(c.Nodes)), ranks: ranks}
	n.Host = c.F.NewHost(n.addr, rails...)
	// No two clocks agree: whatever compares instants of two hosts goes wrong at once.
	n.leap = time.Duration(len(c.Nodes)) * c.cfg.Skew
	n.Host.Watch(func(*simfabric.Rail) {
		if n.side != nil {
			n.side.sendRails()
		}
	})
	n.newEngine()
	c.Nodes = append(c.Nodes, n)
	c.byAddr[n.addr] = n
	n.start()
	return n
}

func (n *Node) newEngine() {
	n.engine = &engine{open: map[transfer.LeaseID]*lease{}}
	for range n.ranks {
		n.engine.boots = append(n.engine.boots, n.c.boot())
	}
}

func (n *Node) now() exec.Instant { return n.c.F.Now() + n.leap }

// start begins a sidecar's life.
func (n *Node) start() {
	c := n.c
	s := &sidecar{c: c, n: n, boot: c.boot(), tickAt: -1, lanes: map[uint64]transport.Lane{},
		dials: map[uint64]*dial{},
		sinks: map[*transport.Grant]*sink{}, sources: map[*transport.Origin]*source{},
		pipes: map[transfer.Boot]*pipe{},
		over:  map[transfer.Boot]bool{}, moving: map[uint64]bool{}, owners: map[transfer.LeaseID]*lease{},
		received: map[transfer.Boot]uint64{}, turns: map[transfer.Boot]*turns{},
		planner: planner{map[[32]byte]bool{}}}
	n.side, s.lock = s, &lock{n: n}
	s.backend = n.Host.Backend()
	s.rails, _ = s.backend.Open(context.Background(), host{s}) // fails only once it is closed
	cfg := c.cfg.Exec
	cfg.Boot, cfg.Endpoint, cfg.Planner, cfg.Transports = s.boot, n.addr, s.planner,
		[]string{simfabric.Name}
	s.ex = exec.New(cfg)
	s.drv = driver.New(driver.Config{Exec: s.ex, Process: process{s}, Lock: s.lock, Peers: peers{s},
		Engines: simEngines{s},
		Memory:  memory{s}, Rails: local{s}, Observer: observer{s}, Log: slog.New(slog.DiscardHandler),
		Grace: time.Hour})
	s.drv.Use(transport.Registry{backend{s.backend, s}})
	s.sendRails()
	if n.engine != nil {
		s.register(n.engine)
	}
}

// register is an engine's hello: each rank names its layout, and presents what it has open.
func (s *sidecar) register(e *engine) {
	s.workers = nil
	for r, boot := range e.boots {
		own := held(r, len(e.boots))
		w := &engines.Worker{Name: s.n.addr, Boot: boot, Place: engines.Place{Engine: s.n.addr, PP: r,
			PPSize: len(e.boots)},
			Geometry:    geometry(r, len(e.boots)),
			SourceValid: s.valid,
			Layout: &layout.Layout{Groups: []layout.Group{{TokensPerBlock: blockTokens,
				Layers: make([]layout.Layer, own.hi-own.lo)}}}}
		w.Session = session{}
		s.workers = append(s.workers, w)
		s.engine(engines.Event{Kind: engines.WorkerUp, Worker: w})
	}
	for _, l := range inOrder(maps.Values(e.open)) {
		l.present(s)
	}
}

// Kill ends the sidecar's process; Restart begins another life.
func (n *Node) Kill() {
	s := n.side
	if s == nil {
		return
	}
	n.c.stats.Restarts++
	n.side, s.dead = nil, true
	for _, l := range inOrder(maps.Values(s.owners)) {
		l.orphan()
	}
	// The kernel closes its sockets. Nothing that it held can be touched by it again.
	_ = s.backend.Close()
	for _, p := range append(append([]*Node(nil), n.joined...), n.joinedBy...) {
		if p.side != nil {
			p.side.pipe(s.boot).cut()
		}
	}
}

// Restart brings the sidecar back as another boot; its peers reach it again.
func (n *Node) Restart() {
	if n.side != nil {
		return
	}
	c := n.c
	// Its clock begins again: it counts from its start, as every sidecar does. Only so can a clock go
	// back, for within a life it is monotonic.
	n.leap = -c.F.Now()
	n.start()
	again := func(a, b *Node) {
		c.F.After(c.cfg.Handshake+c.F.Jitter(redialMax/4), func() {
			if n.side != nil {
				c.meet(a, b)
			}
		})
	}
	for _, p := range n.joined {
		again(n, p)
	}
	for _, p := range n.joinedBy {
		again(p, n)
	}
}

// KillEngine ends the engine; its sidecar, if it lives, learns it from the kernel. StartEngine
// begins another life.
func (n *Node) KillEngine() {
	e := n.engine
	if e == nil {
		return
	}
	n.c.stats.EngineDeaths++
	n.engine = nil
	for _, l := range inOrder(maps.Values(e.open)) {
		if n.side == nil || n.side.owners[l.id] != l {
			l.orphan()
		}
	}
	s := n.side
	if s == nil {
		return
	}
	for _, w := range s.workers {
		s.later(n.c.F.Jitter(time.Millisecond), func() {
			s.engine(engines.Event{Kind: engines.WorkerGone, Worker: w, Exited: true, Err: errDied,
				Fenced: func() { s.workerFenced(w) }})
		})
	}
}

// StartEngine begins another life of the engine, with nothing open.
func (n *Node) StartEngine() {
	if n.engine != nil {
		return
	}
	n.newEngine()
	if n.side != nil {
		n.side.register(n.engine)
	}
}

// Freeze stops the sidecar for a while, as SIGSTOP does.
func (n *Node) Freeze(d time.Duration) {
	n.freezes++
	n.Host.Freeze()
	n.c.F.After(d, func() {
		if n.freezes--; n.freezes == 0 {
			n.Host.Thaw()
		}
	})
}

// Leap moves the node's clock, forward: the machine slept. An executor's clock is monotonic (see
// lease.Instant), so that nothing moves it back but Restart; what is done to the wall clock does
// not reach it.
func (n *Node) Leap(d time.Duration) {
	n.leap += d
	if s := n.side; s != nil {
		s.tickAt = -1
		s.arm(s.ex.Next())
	}
}
