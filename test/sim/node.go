package sim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
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
	held     *Held // nil: nobody measures
}

// sidecar is one life of a sidecar process: the driver of an executor.
type sidecar struct {
	c       *Cluster
	n       *Node
	boot    transfer.Boot
	dead    bool
	ex      *exec.Exec
	workers []*connector.Worker // of the engine's present life
	planner planner
	backend *simfabric.Backend
	rails   []transport.Rail
	batch   exec.Batch
	busy    bool
	tickAt  exec.Instant // -1: none is armed

	lanes   map[uint64]transport.Lane
	asked   map[uint64]uint64 // bytes received, by lane, when that was asked last
	dials   map[uint64]*dial  // by lane, of those that this process opened
	dialled []*dial           // all of them
	grants  map[bindName]*sink
	origins map[bindName]*exec.SendPart
	pipes   map[transfer.Boot]*pipe
	over    map[transfer.Boot]bool // boots of peers that were superseded
	moving  map[uint64]bool        // slices that were given to lanes and have not ended, by cookie
	owners  map[transfer.LeaseID]*lease
	inflows map[inflow]uint64 // bytes
	grew    map[inflow]uint64 // since they were measured last
	toldOf  bool              // the executor has been told that something comes
	turns   map[transfer.Boot]*turns
	served  []transfer.Boot // peers to which this event gave slices
}

type bindName struct {
	peer transfer.Boot
	slot transfer.Slot
}

// AddNode adds a node to the cluster on a host with these rails, and an engine of one rank.
func (c *Cluster) AddNode(rails ...simfabric.RailSpec) *Node { return c.AddRanks(1, rails...) }

// AddRanks adds one whose engine has so many ranks: 1, 2 or 4, each with its part of the layers.
func (c *Cluster) AddRanks(ranks int, rails ...simfabric.RailSpec) *Node {
	n := &Node{c: c, addr: fmt.Sprintf("n%d", len(c.Nodes)), ranks: ranks}
	n.Host = c.F.NewHost(n.addr, rails...)
	// No two clocks agree: whatever compares instants of two hosts goes wrong at once.
	n.leap = time.Duration(len(c.Nodes)) * c.cfg.Skew
	n.Host.Watch(func(*simfabric.Rail) {
		if n.side != nil {
			n.side.tellRails()
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
	s := &sidecar{c: c, n: n, boot: c.boot(), tickAt: -1, lanes: map[uint64]transport.Lane{}, asked: map[uint64]uint64{},
		dials: map[uint64]*dial{}, grants: map[bindName]*sink{},
		origins: map[bindName]*exec.SendPart{}, pipes: map[transfer.Boot]*pipe{}, over: map[transfer.Boot]bool{}, moving: map[uint64]bool{},
		owners: map[transfer.LeaseID]*lease{}, turns: map[transfer.Boot]*turns{}, planner: planner{map[[32]byte]bool{}}}
	n.side = s
	s.backend = n.Host.Backend()
	s.rails, _ = s.backend.Open(context.Background(), host{s}) // fails only once it is closed
	cfg := c.cfg.Exec
	cfg.Boot, cfg.Endpoint, cfg.Planner, cfg.Transports = s.boot, n.addr, s.planner, []string{simfabric.Name}
	s.ex = exec.New(cfg)
	s.tellRails()
	if n.engine != nil {
		s.register(n.engine)
	}
}

// register is an engine's hello: each rank names its layout, and presents what it has open.
func (s *sidecar) register(e *engine) {
	s.workers = nil
	for r, boot := range e.boots {
		own := held(r, len(e.boots))
		w := &connector.Worker{Name: s.n.addr, Boot: boot, Place: connector.Place{Engine: s.n.addr, PP: r, PPSize: len(e.boots)},
			Geometry: geometry(r, len(e.boots)),
			Layout:   &layout.Layout{Groups: []layout.Group{{TokensPerBlock: blockTokens, Layers: make([]layout.Layer, own.hi-own.lo)}}}}
		s.workers = append(s.workers, w)
		s.event(func(exec.Instant) { s.ex.WorkerUp(w) })
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

// Restart brings the sidecar back as another boot; who knew it reaches it again.
func (n *Node) Restart() {
	if n.side != nil {
		return
	}
	c := n.c
	// Its clock begins again: it counts from its start, as every sidecar does. Only so can a clock go back, for within a life it is monotonic.
	n.leap = -c.F.Now()
	n.start()
	again := func(a, b *Node) {
		c.F.After(c.cfg.Handshake+c.F.Jitter(redialMost/4), func() {
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

// KillEngine ends the engine; its sidecar, if it lives, is told by the kernel. StartEngine begins another life.
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
			s.event(func(now exec.Instant) { s.ex.WorkerGone(now, w, true, "the engine died") })
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

// Leap moves the node's clock, forward: the machine slept. An executor's clock is monotonic (see lease.Instant), so that nothing moves it back but
// Restart; what is done to the wall clock does not reach it.
func (n *Node) Leap(d time.Duration) {
	n.leap += d
	if s := n.side; s != nil {
		s.tickAt = -1
		s.arm()
	}
}

// later runs fn in the sidecar's process, if it still lives then.
func (s *sidecar) later(d time.Duration, fn func()) {
	s.n.Host.After(d, func() {
		if !s.dead {
			fn()
		}
	})
}

// event tells the executor something and does what follows.
func (s *sidecar) event(fn func(now exec.Instant)) {
	if s.dead {
		return
	}
	if s.n.Host.Frozen() {
		s.later(0, func() { s.event(fn) })
		return
	}
	now := s.n.now()
	s.n.held.run(func() { fn(now) })
	if s.busy {
		return // the loop below is further up
	}
	s.busy = true
	for s.drain() {
		for i := range s.batch.Actions {
			s.perform(&s.batch.Actions[i])
		}
	}
	s.busy = false
	s.arm()
	s.check()
}

func (s *sidecar) drain() (more bool) {
	s.n.held.run(func() { more = s.ex.Drain(&s.batch) })
	return more
}

// Held is for how long a sidecar's driver holds the lock of its executor: for each event, and to
// take the actions that follow from it.
type Held struct {
	Clock     func() time.Duration
	Sum, Most time.Duration
	Times     int
}

func (h *Held) run(f func()) {
	if h == nil {
		f()
		return
	}
	from := h.Clock()
	f()
	d := h.Clock() - from
	h.Sum, h.Most, h.Times = h.Sum+d, max(h.Most, d), h.Times+1
}

// Measure has the node's driver count in h from now on.
func (n *Node) Measure(h *Held) { n.held = h }

// twice does something again a little later, now and then.
func (s *sidecar) twice(fn func()) {
	if s.c.chance(s.c.cfg.Twice) {
		s.c.stats.Twice++
		s.later(s.c.F.Jitter(10*time.Millisecond), fn)
	}
}

var errFence = errors.New("sim: a backend could not")

// fails makes a fence or a close fail, now and then.
func (s *sidecar) fails() error {
	if !s.c.chance(s.c.cfg.FenceFails) {
		return nil
	}
	s.c.stats.FencesFailed++
	return errFence
}

// arm sees to it that Tick comes when the executor wants it.
func (s *sidecar) arm() {
	at := s.ex.Next()
	if at >= 1<<62 || s.tickAt >= 0 && s.tickAt <= at {
		return
	}
	s.tickAt = at
	s.later(max(at-s.n.now(), 0), func() {
		if s.tickAt != at {
			return // an earlier one was armed since
		}
		s.tickAt = -1
		s.event(s.ex.Tick)
	})
}

func (s *sidecar) perform(a *exec.Action) {
	c := s.c
	switch a.Kind {
	case exec.Connect:
		s.connect(a.Endpoint)
	case exec.Send:
		s.send(a.Peer, a.Frame)
	case exec.Offer:
		s.offer(a)
	case exec.Fence:
		l := a.ReceivePart
		l.Grant.Revoke()
		s.later(c.F.Jitter(c.cfg.Fence), func() {
			err := s.fails()
			if err == nil {
				err = s.backend.Fence(context.Background(), &l.Grant)
			}
			if err == nil {
				l.Sink.(*sink).fenced = true
			}
			done := func() { s.event(func(now exec.Instant) { s.ex.FenceDone(now, l, err) }) }
			done()
			s.twice(done)
		})
	case exec.Forget:
		delete(s.grants, bindName{a.ReceivePart.Grant.Peer, a.ReceivePart.Grant.Slot})
	case exec.Bind:
		x := a.SendPart
		l := s.owner(x.Lease)
		src := &source{s: s, l: l, plan: x.Plan.(*plan), epoch: x.Lease.Epoch}
		l.sources = append(l.sources, src)
		x.Origin.Source, x.Source = src, src
		s.origins[bindName{x.Origin.Peer, x.Origin.Slot}] = x
	case exec.CloseOrigin:
		x := a.SendPart
		x.Origin.Revoke()
		s.later(c.F.Jitter(c.cfg.Fence), func() {
			err := s.fails()
			if err == nil {
				err = s.backend.CloseOrigin(context.Background(), &x.Origin)
			}
			if err == nil {
				x.Source.(*source).closed = true
				if name := (bindName{x.Origin.Peer, x.Origin.Slot}); s.origins[name] == x {
					delete(s.origins, name)
				}
			}
			done := func() { s.event(func(now exec.Instant) { s.ex.OriginClosed(now, x, err) }) }
			done()
			s.twice(done)
		})
	case exec.Move:
		s.move(a.Lane, a.Slices)
	case exec.Measure:
		s.measure()
	case exec.Complete:
		s.complete(a)
	case exec.Describe:
		s.describe(a.Peer, a.Geometry)
	case exec.Ask:
		s.ask(a.Lane)
	case exec.WorkerFenced:
		s.workerFenced(a.Worker)
	}
}

func (s *sidecar) offer(a *exec.Action) {
	for i, land := range a.ReceiveParts {
		name := bindName{land.Grant.Peer, land.Grant.Slot}
		if s.grants[name] != nil {
			s.c.violation("%s: slot %d %s", s.n.addr, land.Grant.Slot, brokeSlot)
		}
		l := s.owner(land.Lease())
		if i == 0 {
			// What an earlier grant brought does not count: the new one has empty bitmaps.
			own := held(l.rank, len(l.e.boots))
			l.content = make([]uint64, uint32(own.hi-own.lo)*l.t.perLayer())
		}
		k := &sink{s: s, l: l, land: land, plan: land.Plan.(*plan), bitmap: transfer.NewBitmap(land.Plan.Space().NumChunks())}
		l.sinks = append(l.sinks, k)
		land.Sink, land.Grant.Sink = k, k
		s.grants[name] = k
		if _, err := s.backend.Grant(&land.Grant); err != nil {
			s.c.violation("%s: grant: %v", s.n.addr, err)
		}
	}
	s.send(a.Peer, a.Frame)
}

// ask says whether bytes of a quiet lane have moved.
func (s *sidecar) ask(lane uint64) {
	m, ok := s.lanes[lane].(transport.Meter)
	if !ok {
		return
	}
	if got := m.Received(); got > s.asked[lane] {
		s.asked[lane] = got
		s.event(func(now exec.Instant) { s.ex.Moved(now, lane) })
	}
}

// rails as they are now.
func (n *Node) rails() (out []exec.Rail) {
	for _, r := range n.Host.Rails() {
		out = append(out, exec.Rail{Transport: simfabric.Name, Name: r.Name, Down: !r.HasCarrier()})
	}
	return out
}

// tellRails says what the rails are, to the executor and to every peer.
func (s *sidecar) tellRails() {
	rails := s.n.rails()
	s.event(func(now exec.Instant) { s.ex.SetRails(now, rails) })
	s.redial()
	f := &peerv1.Rails{}
	for _, r := range rails {
		f.Rails = append(f.Rails, &peerv1.Rail{Transport: r.Transport, Name: r.Name, Down: r.Down})
	}
	for _, boot := range bootsInOrder(s.pipes) {
		s.send(boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Rails{Rails: f}})
	}
}

// describe fetches a layout from a peer, which may be gone.
func (s *sidecar) describe(peer transfer.Boot, geometry [32]byte) {
	s.later(s.c.cfg.Handshake+s.c.F.Jitter(s.c.cfg.Handshake), func() {
		var err error
		if p := s.pipes[peer]; p == nil || p.to == nil || p.to.dead {
			err = fmt.Errorf("sim: describe: %w", exec.ErrNoAnswer)
		} else {
			s.planner.known[geometry] = true
		}
		s.event(func(now exec.Instant) { s.ex.Described(now, peer, geometry, err) })
	})
}

func (s *sidecar) move(id uint64, batch []transport.Slice) {
	for _, x := range batch {
		if s.moving[x.Cookie] {
			s.c.violation("%s: slice %x was given out twice", s.n.addr, x.Cookie)
		}
		s.moving[x.Cookie] = true
	}
	s.gave(batch)
	batch = s.lie(id, batch)
	err := give(s.lanes[id], batch)
	switch {
	case err == nil:
		return
	case !errors.Is(err, errNoLane) && !errors.Is(err, net.ErrClosed) && s.c.cfg.Lies == 0: // what lies send counts, and nobody knows of it
		s.c.violation("%s: lane %d %s: %v", s.n.addr, id, brokeBound, err)
	}
	res := make([]transport.Result, 0, len(batch))
	for _, x := range batch {
		res = append(res, transport.Result{Slice: x, Outcome: transfer.NotLanded, Reason: transfer.ReasonLaneLost, Err: err, Took: 1})
	}
	s.later(0, func() { s.results(res) })
}

var errBackend = errors.New("sim: a backend gave a slice back")

// ghost marks slices that the executor believes to be over.
const ghost = 1 << 63

// lie takes slices out of a batch of which the backend will not tell the truth, or that it gives back.
func (s *sidecar) lie(lane uint64, batch []transport.Slice) []transport.Slice {
	if s.c.cfg.Lies+s.c.cfg.Errors == 0 {
		return batch
	}
	var honest []transport.Slice
	for _, x := range batch {
		switch {
		case s.c.chance(s.c.cfg.Errors):
			res := transport.Result{Slice: x, Outcome: transfer.NotLanded, Err: errBackend, Took: 1}
			s.later(0, func() { s.results([]transport.Result{res}) })
			continue
		case !s.c.chance(s.c.cfg.Lies):
			honest = append(honest, x)
			continue
		}
		s.c.stats.Lies++
		res := transport.Result{Slice: x, Outcome: transfer.Landed, Took: 1}
		if s.c.chance(0.7) {
			res.Outcome = transfer.NotLanded
			s.later(s.c.F.Jitter(300*time.Millisecond), func() {
				x.Cookie |= ghost
				_ = give(s.lanes[lane], []transport.Slice{x}) // what does not leave does no harm
			})
		}
		s.later(0, func() { s.results([]transport.Result{res}) })
	}
	return honest
}

func (s *sidecar) results(res []transport.Result) {
	s.event(func(now exec.Instant) {
		for i := range res {
			delete(s.moving, res[i].Cookie)
		}
		s.ex.Results(now, res)
	})
}

var errNoLane = errors.New("sim: no such lane")

func give(l transport.Lane, batch []transport.Slice) error {
	if l == nil {
		return errNoLane
	}
	return l.Move(batch)
}

// dial keeps one lane open between two processes, as long as both live.
type dial struct {
	s, to         *sidecar
	local, remote transport.Rail
	wait          time.Duration
	tries         int
	waiting       bool
}

func (d *dial) again() {
	f := d.s.c.F
	d.tries++
	try := d.tries
	d.waiting = true
	d.s.later(d.s.c.cfg.Handshake+f.Jitter(d.s.c.cfg.Handshake)+d.wait, func() {
		if d.tries != try || d.s.over[d.to.boot] {
			return
		}
		d.waiting = false
		l, err := d.s.backend.Dial(context.Background(), transport.Peer{Boot: d.to.boot, Self: d.s.boot}, d.local, d.remote)
		if err != nil {
			d.wait = min(max(2*d.wait, redialFirst), redialMost)
			d.again()
			return
		}
		d.wait = 0
		d.s.dials[l.ID()] = d
	})
}

// redial tries at once what waits to be tried again: a rail, here or there, has come back.
func (s *sidecar) redial() {
	for _, d := range s.dialled {
		if d.waiting && d.wait > 0 {
			d.wait = 0
			d.again()
		}
	}
}

// host is the transport.Host of a sidecar.
type host struct{ s *sidecar }

// PeerKey knows the boots that a handshake named, and this one by all of its names but one: whoever dials names the boot that he
// means, and is refused by another life at the same address.
func (h host) PeerKey(boot transfer.Boot) (transport.Peer, bool) {
	p := h.s.pipes[boot]
	return transport.Peer{Boot: boot, Self: h.s.boot}, p != nil && !h.s.over[boot]
}

func (h host) Grant(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*transport.Grant, transfer.Reason) {
	k := h.s.grants[bindName{peer, slot}]
	switch {
	case k == nil:
		return nil, transfer.ReasonUnknownSlot
	case k.land.Grant.Gen != gen:
		return nil, transfer.ReasonStaleGen
	}
	return &k.land.Grant, transfer.ReasonNone
}

func (h host) Origin(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*transport.Origin, transfer.Reason) {
	x := h.s.origins[bindName{peer, slot}]
	switch {
	case x == nil:
		return nil, transfer.ReasonUnknownSlot
	case x.Origin.Gen != gen:
		return nil, transfer.ReasonStaleGen
	}
	return &x.Origin, transfer.ReasonNone
}

func (h host) LaneUp(l transport.Lane) {
	s := h.s
	if s.dead || s.over[l.Peer()] {
		_ = l.Close()
		return
	}
	s.lanes[l.ID()] = l
	s.event(func(now exec.Instant) {
		err := s.ex.LaneUp(now, exec.LaneInfo{ID: l.ID(), Peer: l.Peer(), Backend: l.Backend(), Local: l.Local(), Remote: l.Remote(),
			Gbps: s.gbps(l.Local()), SliceBytes: s.backend.Caps().SliceBytes, MaxInFlight: l.MaxInFlight(),
			ReportsAcked: s.backend.Caps().Tells, RTT: way(l)})
		if err != nil {
			s.c.violation("%s: lane %d is refused: %v", s.n.addr, l.ID(), err)
		}
	})
}

func (s *sidecar) gbps(rail string) float64 {
	for _, r := range s.rails {
		if r.Name == rail {
			return r.Gbps
		}
	}
	return 0
}

func (h host) LaneDown(l transport.Lane, _ error) {
	s := h.s
	if s.dead {
		return
	}
	delete(s.lanes, l.ID())
	delete(s.asked, l.ID())
	s.event(func(now exec.Instant) { s.ex.LaneDown(now, l.ID()) })
	if d := s.dials[l.ID()]; d != nil {
		delete(s.dials, l.ID())
		d.again()
	}
}

func (h host) Done(_ transport.Lane, res []transport.Result) {
	s := h.s
	if s.dead {
		return
	}
	if s.c.cfg.Lies > 0 {
		res = slices.DeleteFunc(slices.Clone(res), func(r transport.Result) bool { return r.Cookie&ghost != 0 })
	} else if s.n.Host.Frozen() {
		res = slices.Clone(res)
	}
	s.results(res)
	if s.c.chance(s.c.cfg.Twice) {
		s.c.stats.Twice++
		again := append([]transport.Result(nil), res...)
		s.later(s.c.F.Jitter(10*time.Millisecond), func() { s.event(func(now exec.Instant) { s.ex.Results(now, again) }) })
	}
}

func (h host) Refused(_ transport.Lane, why transfer.Reason) {
	switch why {
	case transfer.ReasonUnknownSlot, transfer.ReasonStaleGen, transfer.ReasonRevoked:
		h.s.c.stats.Late++
	}
}
