// Package sim runs whole clusters in virtual time: the production executor of every node, unmodified, over simfabric, between
// engines that are played. It is the driver that the sidecar is on real machines, with the same order of things, and it watches
// over what engines are promised:
//
//   - a committed destination holds every chunk of its own source, as that was while its lease held;
//   - nothing is written to a destination that is fenced or back with its engine, nothing read from a source that is;
//   - each lease ends exactly once, and no later than its deadline and what fences may take.
//
// A word stands for a chunk's bytes: it names the transfer and the chunk, so whatever is in the wrong place shows. A Cluster and
// all below it belong to one goroutine; same Config, same calls, same Trace.
package sim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/mem"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/simfabric"
)

// What the played engines are like.
const (
	Layers        = 4
	unitBytes     = 4096 // of a token in a layer
	blockTokens   = 16
	garbage       = 0xbad
	maxViolations = 20
)

// Config of a cluster.
type Config struct {
	Fabric simfabric.Config
	Exec   exec.Config // Boot, Endpoint and Planner are the cluster's
	// RepeatResults is the share of results that a backend tells twice.
	RepeatResults float64
	// Fence is how long fences take at most, Handshake what a lane's opening takes beside the way.
	Fence     time.Duration
	Handshake time.Duration
	// Record is the most that lies between an engine's taking blocks back and its word of it.
	Record time.Duration
}

// How the driver goes on where something fails.
const (
	redialFirst  = 20 * time.Millisecond
	redialMost   = time.Second
	controlRetry = 5 * time.Millisecond
)

// Cluster is nodes on one fabric.
type Cluster struct {
	F     *simfabric.Fabric
	Nodes []*Node

	cfg        Config
	byBoot     map[transfer.Boot]*Node
	byAddr     map[string]*Node
	transfers  []*Transfer
	violations []string
	repeated   int
	open       int // leases that have not ended
	sabotage   sabotage
}

// sabotage takes a line out of the driver or of what it implements, so that tests can show that the watching is awake.
type sabotage uint8

const (
	honest       sabotage = iota
	fenceNothing          // a fence neither revokes the grant nor waits
	commitEarly           // one chunk counts as all
	alwaysValid           // a source swears to what was preempted
	closeNothing          // an origin is closed without revoking it
	neverTick             // no deadline ever comes
)

// New returns a cluster without nodes.
func New(cfg Config) *Cluster {
	if cfg.Fence <= 0 {
		cfg.Fence = 200 * time.Microsecond
	}
	if cfg.Handshake <= 0 {
		cfg.Handshake = time.Millisecond
	}
	if cfg.Record <= 0 {
		cfg.Record = 200 * time.Microsecond
	}
	return &Cluster{F: simfabric.New(cfg.Fabric), cfg: cfg, byBoot: map[transfer.Boot]*Node{}, byAddr: map[string]*Node{}}
}

// Violations of what engines are promised; the first few.
func (c *Cluster) Violations() []string { return c.violations }

// Transfers that were begun.
func (c *Cluster) Transfers() []*Transfer { return c.transfers }

// Open counts leases that have not ended.
func (c *Cluster) Open() int { return c.open }

// Repeated counts results that were told twice.
func (c *Cluster) Repeated() int { return c.repeated }

func (c *Cluster) violation(format string, args ...any) {
	if len(c.violations) < maxViolations {
		c.violations = append(c.violations, fmt.Sprintf("%v: ", c.F.Now())+fmt.Sprintf(format, args...))
	}
}

// Node is one sidecar with one engine worker.
type Node struct {
	c       *Cluster
	Host    *simfabric.Host
	addr    string
	boot    transfer.Boot
	ex      *exec.Exec
	worker  *connector.Worker
	backend *simfabric.Backend
	rails   []transport.Rail
	gbps    map[string]float64 // by rail
	batch   exec.Batch
	busy    bool
	tickAt  exec.Instant

	lanes   map[uint64]transport.Lane
	dials   map[uint64]*dial // by lane, of those that this node opened
	grants  map[bindName]*sink
	origins map[bindName]*exec.Sending
	control map[transfer.Boot]*pipe
	leases  map[uint64]*Transfer
	nextID  uint64
}

type bindName struct {
	peer transfer.Boot
	slot transfer.Slot
}

// AddNode adds a node to the cluster on a host with these rails.
func (c *Cluster) AddNode(rails ...simfabric.RailSpec) *Node {
	i := len(c.Nodes)
	n := &Node{c: c, addr: fmt.Sprintf("n%d", i), lanes: map[uint64]transport.Lane{}, dials: map[uint64]*dial{}, grants: map[bindName]*sink{},
		origins: map[bindName]*exec.Sending{}, control: map[transfer.Boot]*pipe{}, leases: map[uint64]*Transfer{}, tickAt: -1}
	binary.BigEndian.PutUint64(n.boot[:], uint64(i+1))
	n.Host = c.F.NewHost(n.addr, rails...)
	n.backend = n.Host.Backend()
	n.rails, _ = n.backend.Open(context.Background(), host{n})
	n.gbps = map[string]float64{}
	for _, r := range n.rails {
		n.gbps[r.Name] = r.Gbps
	}
	cfg := c.cfg.Exec
	cfg.Boot, cfg.Endpoint, cfg.Planner, cfg.Transports = n.boot, n.addr, planner{}, []string{simfabric.Name}
	n.ex = exec.New(cfg)
	n.worker = &connector.Worker{Name: n.addr, Boot: n.boot, Layout: &layout.Layout{Groups: []layout.Group{{TokensPerBlock: blockTokens,
		Layers: make([]layout.Layer, Layers)}}}}
	c.Nodes = append(c.Nodes, n)
	c.byBoot[n.boot], c.byAddr[n.addr] = n, n
	n.event(func(exec.Instant) { n.ex.WorkerUp(n.worker) })
	return n
}

// event tells the executor something and does what follows.
func (n *Node) event(fn func(now exec.Instant)) {
	fn(n.c.F.Now())
	if n.busy {
		return // the loop below is further up
	}
	n.busy = true
	for n.ex.Drain(&n.batch) {
		for i := range n.batch.Actions {
			n.perform(&n.batch.Actions[i])
		}
	}
	n.busy = false
	n.arm()
}

// arm sees to it that Tick comes when the executor wants it.
func (n *Node) arm() {
	at := n.ex.Next()
	if n.c.sabotage == neverTick || at >= 1<<62 || n.tickAt >= 0 && n.tickAt <= at {
		return
	}
	n.tickAt = at
	n.c.F.After(at-n.c.F.Now(), func() {
		if n.tickAt != at {
			return // an earlier one was armed since
		}
		n.tickAt = -1
		n.event(n.ex.Tick)
	})
}

func (n *Node) perform(a *exec.Action) {
	c := n.c
	switch a.Kind {
	case exec.Connect:
		n.connect(a.Endpoint)
	case exec.Send:
		n.send(a.Peer, a.Frame)
	case exec.Offer:
		n.offer(a)
	case exec.Fence:
		l := a.Landing
		if c.sabotage != fenceNothing {
			l.Grant.Revoke()
		}
		c.F.After(c.F.Jitter(c.cfg.Fence), func() {
			var err error
			if c.sabotage != fenceNothing {
				err = n.backend.Fence(context.Background(), &l.Grant)
			}
			if err == nil {
				l.Sink.(*sink).fenced = true
			}
			n.event(func(now exec.Instant) { n.ex.FenceDone(now, l, err) })
		})
	case exec.Forget:
		delete(n.grants, bindName{a.Landing.Grant.Peer, a.Landing.Grant.Slot})
	case exec.Bind:
		s := a.Sending
		t := n.leases[s.Lease.ID]
		s.Origin.Source = &source{c: c, t: t, plan: s.Plan.(*plan), epoch: s.Lease.Epoch}
		n.origins[bindName{s.Origin.Peer, s.Origin.Slot}] = s
	case exec.CloseOrigin:
		s := a.Sending
		if c.sabotage != closeNothing {
			s.Origin.Revoke()
		}
		c.F.After(c.F.Jitter(c.cfg.Fence), func() {
			var err error
			if c.sabotage != closeNothing {
				err = n.backend.CloseOrigin(context.Background(), &s.Origin)
			}
			if name := (bindName{s.Origin.Peer, s.Origin.Slot}); n.origins[name] == s {
				delete(n.origins, name)
			}
			n.event(func(now exec.Instant) { n.ex.OriginClosed(now, s, err) })
		})
	case exec.Move:
		n.move(a.Lane, a.Slices)
	case exec.Complete:
		n.complete(a)
	}
}

func (n *Node) offer(a *exec.Action) {
	for _, l := range a.Landings {
		name := bindName{l.Grant.Peer, l.Grant.Slot}
		if n.grants[name] != nil {
			n.c.violation("%s: slot %d was given out again before its fence", n.addr, l.Grant.Slot)
		}
		t := n.leases[l.Lease().ID]
		chunks := l.Plan.Space().NumChunks()
		if t.content == nil {
			t.content = make([]uint64, chunks)
		}
		s := &sink{n: n, t: t, l: l, bitmap: transfer.NewBitmap(chunks)}
		l.Sink, l.Grant.Sink = s, s
		n.grants[name] = s
		if _, err := n.backend.Grant(&l.Grant); err != nil {
			n.c.violation("%s: grant: %v", n.addr, err)
		}
	}
	n.send(a.Peer, a.Frame)
}

func (n *Node) move(id uint64, batch []transport.Slice) {
	err := give(n.lanes[id], batch)
	if err == nil {
		return
	}
	res := make([]transport.Result, 0, len(batch))
	for _, s := range batch {
		res = append(res, transport.Result{Slice: s, Outcome: transfer.NotLanded, Reason: transfer.ReasonLaneLost, Err: err, Took: 1})
	}
	n.c.F.After(0, func() { n.event(func(now exec.Instant) { n.ex.Results(now, res) }) })
}

var errNoLane = errors.New("sim: no such lane")

func give(l transport.Lane, batch []transport.Slice) error {
	if l == nil {
		return errNoLane
	}
	return l.Move(batch)
}

func (n *Node) complete(a *exec.Action) {
	x := a.Completion
	t := n.leases[x.Lease.ID]
	if t == nil {
		n.c.violation("%s: lease %v ended and was not open", n.addr, x.Lease)
		return
	}
	delete(n.leases, x.Lease.ID)
	n.c.open--
	now := n.c.F.Now()
	if !x.Received {
		t.Sent = &x
		t.sentAt = now
		return
	}
	t.Received = &x
	t.receivedAt = now
	if x.Status != exec.StatusOK {
		return
	}
	for i, w := range t.content {
		if w != t.word(uint32(i)) {
			n.c.violation("transfer %d committed, and chunk %d of %d holds %x: want %x", t.ID, i, len(t.content), w, t.word(uint32(i)))
			return
		}
	}
}

// pipe carries control frames to one peer, in order, as long as any rail gets through.
type pipe struct {
	waiting []*peerv1.ControlFrame
	last    exec.Instant
	retry   bool
}

func (n *Node) send(to transfer.Boot, f *peerv1.ControlFrame) {
	p := n.control[to]
	if p == nil {
		p = &pipe{}
		n.control[to] = p
	}
	p.waiting = append(p.waiting, proto.Clone(f).(*peerv1.ControlFrame))
	n.pump(to, p)
}

func (n *Node) pump(to transfer.Boot, p *pipe) {
	f, peer := n.c.F, n.c.byBoot[to]
	for len(p.waiting) > 0 && !p.retry {
		d, ok := n.Host.Latency(peer.Host)
		if !ok {
			p.retry = true
			f.After(controlRetry, func() {
				p.retry = false
				n.pump(to, p)
			})
			return
		}
		frame := p.waiting[0]
		p.waiting = p.waiting[1:]
		p.last = max(f.Now()+d, p.last+1)
		f.After(p.last-f.Now(), func() {
			peer.event(func(now exec.Instant) {
				if err := peer.ex.Message(now, n.boot, frame); err != nil {
					n.c.violation("%s refused a message of %s: %v", peer.addr, n.addr, err)
				}
			})
		})
	}
}

func (n *Node) connect(addr string) {
	n.c.F.After(n.c.F.Jitter(n.c.cfg.Handshake), func() {
		p := n.c.byAddr[addr]
		if p == nil {
			n.event(func(now exec.Instant) { n.ex.ConnectFailed(now, addr, errNoLane) })
			return
		}
		n.c.Join(n, p)
	})
}

// Join makes two nodes peers and opens lanes between them, one for each rail of the first.
func (c *Cluster) Join(a, b *Node) {
	for _, x := range [][2]*Node{{a, b}, {b, a}} {
		x[0].event(func(now exec.Instant) { x[0].ex.PeerUp(now, x[1].addr, x[1].boot) })
	}
	if a == b {
		return
	}
	for i, r := range a.rails {
		d := &dial{n: a, to: b, local: r, remote: b.rails[i%len(b.rails)]}
		d.again()
	}
}

// dial keeps one lane open.
type dial struct {
	n, to         *Node
	local, remote transport.Rail
	wait          time.Duration
}

func (d *dial) again() {
	f := d.n.c.F
	f.After(d.n.c.cfg.Handshake+f.Jitter(d.n.c.cfg.Handshake)+d.wait, func() {
		l, err := d.n.backend.Dial(context.Background(), transport.Peer{Boot: d.to.boot, Self: d.n.boot}, d.local, d.remote)
		if err != nil {
			d.wait = min(max(2*d.wait, redialFirst), redialMost)
			d.again()
			return
		}
		d.wait = 0
		d.n.dials[l.ID()] = d
	})
}

// host is the transport.Host of a node.
type host struct{ n *Node }

func (h host) PeerKey(boot transfer.Boot) (transport.Peer, bool) {
	_, ok := h.n.c.byBoot[boot]
	return transport.Peer{Boot: boot, Self: h.n.boot}, ok
}

func (h host) Grant(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*transport.Grant, transfer.Reason) {
	s := h.n.grants[bindName{peer, slot}]
	switch {
	case s == nil:
		return nil, transfer.ReasonUnknownSlot
	case s.l.Grant.Gen != gen:
		return nil, transfer.ReasonStaleGen
	}
	return &s.l.Grant, transfer.ReasonNone
}

func (h host) Origin(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*transport.Origin, transfer.Reason) {
	s := h.n.origins[bindName{peer, slot}]
	switch {
	case s == nil:
		return nil, transfer.ReasonUnknownSlot
	case s.Origin.Gen != gen:
		return nil, transfer.ReasonStaleGen
	}
	return &s.Origin, transfer.ReasonNone
}

func (h host) LaneUp(l transport.Lane) {
	n := h.n
	n.lanes[l.ID()] = l
	n.event(func(now exec.Instant) {
		err := n.ex.LaneUp(now, exec.LaneInfo{ID: l.ID(), Peer: l.Peer(), Backend: l.Backend(), Local: l.Local(), Remote: l.Remote(),
			Gbps: n.gbps[l.Local()], SliceBytes: n.backend.Caps().SliceBytes, MaxInFlight: l.MaxInFlight()})
		if err != nil {
			n.c.violation("%s: lane %d is refused: %v", n.addr, l.ID(), err)
		}
	})
}

func (h host) LaneDown(l transport.Lane, _ error) {
	n := h.n
	delete(n.lanes, l.ID())
	n.event(func(now exec.Instant) { n.ex.LaneDown(now, l.ID()) })
	if d := n.dials[l.ID()]; d != nil {
		delete(n.dials, l.ID())
		d.again()
	}
}

func (h host) Done(_ transport.Lane, res []transport.Result) {
	n := h.n
	n.event(func(now exec.Instant) { n.ex.Results(now, res) })
	if p := n.c.cfg.RepeatResults; p > 0 && n.c.F.Rand().Float64() < p {
		n.c.repeated++
		twice := append([]transport.Result(nil), res...)
		n.c.F.After(n.c.F.Jitter(10*time.Millisecond), func() { n.event(func(now exec.Instant) { n.ex.Results(now, twice) }) })
	}
}

func (h host) Refused(transport.Lane, transfer.Reason) {}

// plan is a transfer space of Layers equal segments.
type plan struct {
	space  *transfer.Space
	tokens uint32
}

func newPlan(tokens uint32) (*plan, error) {
	bytes := make([]uint64, Layers)
	for i := range bytes {
		bytes[i] = uint64(tokens) * unitBytes
	}
	sp, err := transfer.NewSpace(bytes)
	return &plan{sp, tokens}, err
}

func (p *plan) Space() *transfer.Space { return p.space }

func (p *plan) Ready(layer int, tokens uint32, final bool) transfer.Range {
	r, _ := p.space.Segment(layer)
	if final && tokens >= p.tokens {
		return r
	}
	full := min(tokens, p.tokens) / blockTokens * blockTokens
	return transfer.Range{First: r.First, Count: full * unitBytes / transfer.ChunkBytes}
}

func (p *plan) Feeds(layer int) []int { return self[layer : layer+1] }

func (p *plan) From(segment int) []int { return self[segment : segment+1] }

var self = [Layers]int{0, 1, 2, 3}

type planner struct{}

func (planner) Receive(_ *connector.Worker, x *connector.Expect) (exec.Plan, error) {
	return newPlan(x.Tokens)
}

func (planner) Divide(*connector.Worker, *connector.Expect, []exec.Rank, func(string) uint64) ([]exec.Part, error) {
	return nil, errors.New("sim: all engines are alike")
}

func (planner) Send(_ *connector.Worker, g *peerv1.Grant, _ *peerv1.Part) (exec.Plan, error) {
	return newPlan(g.Tokens)
}

// Transfer is a prompt on its way, as both engines see it.
type Transfer struct {
	ID       uint64
	From, To *Node
	Tokens   uint32
	Deadline time.Duration
	Alone    bool // its prefill never comes
	Began    time.Duration
	Sent     *connector.Completion // nil: not ended
	Received *connector.Completion

	key                transfer.Key
	src, dst           transfer.LeaseID
	sentAt, receivedAt exec.Instant
	content            []uint64 // the destination's
	epoch              uint32   // of the source's blocks
	layers             [Layers]uint32
}

// Took is how long the receiving engine waited.
func (t *Transfer) Took() time.Duration { return t.receivedAt - t.Began }

// Last is when the later of both leases ended, from the beginning.
func (t *Transfer) Last() time.Duration { return max(t.sentAt, t.receivedAt) - t.Began }

// word is what chunk i must hold.
func (t *Transfer) word(i uint32) uint64 { return t.ID<<20 | uint64(i) + 1 }

// Bytes of the transfer.
func (t *Transfer) Bytes() uint64 { return uint64(t.Tokens) * unitBytes * Layers }

// Begin lets `to` expect a prompt of tokens from `from`, which has them computed layer by layer.
func (c *Cluster) Begin(from, to *Node, tokens uint32, deadline time.Duration, prefill time.Duration) *Transfer {
	t, expect := c.transfer(from, to, tokens, deadline)
	t.src = from.lease(t)
	c.open++
	intent := func() {
		from.event(func(now exec.Instant) {
			from.ex.Intent(now, from.worker, connector.Intent{Lease: t.src, Key: t.key, Tokens: tokens, Fanout: 1, Deadline: deadline})
		})
		t.compute(prefill)
	}
	if c.F.Rand().IntN(2) == 0 {
		expect()
		c.F.After(c.F.Jitter(time.Millisecond), intent)
	} else {
		intent()
		c.F.After(c.F.Jitter(time.Millisecond), expect)
	}
	return t
}

// BeginAlone lets `to` expect a prompt that `from` never hears of.
func (c *Cluster) BeginAlone(from, to *Node, tokens uint32, deadline time.Duration) *Transfer {
	t, expect := c.transfer(from, to, tokens, deadline)
	t.Alone = true
	expect()
	return t
}

func (c *Cluster) transfer(from, to *Node, tokens uint32, deadline time.Duration) (*Transfer, func()) {
	t := &Transfer{ID: uint64(len(c.transfers) + 1), From: from, To: to, Tokens: tokens, Deadline: deadline, Began: c.F.Now()}
	binary.BigEndian.PutUint64(t.key.Xfer[:], t.ID)
	binary.BigEndian.PutUint64(t.key.Hash[:], ^t.ID)
	c.transfers = append(c.transfers, t)
	c.open++
	t.dst = to.lease(t)
	return t, func() {
		to.event(func(now exec.Instant) {
			to.ex.Expect(now, to.worker, connector.Expect{Lease: t.dst, Key: t.key, Peer: from.addr, Tokens: tokens, Skip: []uint32{0},
				Deadline: deadline, Partner: deadline})
		})
	}
}

func (n *Node) lease(t *Transfer) transfer.LeaseID {
	n.nextID++
	n.leases[n.nextID] = t
	return transfer.LeaseID{Boot: n.boot, ID: n.nextID}
}

// compute fills the layers of the source one by one.
func (t *Transfer) compute(prefill time.Duration) {
	f, v := t.From.c.F, t.epoch
	for i := range Layers {
		f.After(prefill*time.Duration(i+1)/Layers, func() {
			if t.epoch != v || t.Sent != nil {
				return
			}
			t.layers[i] = t.Tokens
			t.From.event(func(now exec.Instant) {
				lease := t.src
				lease.Epoch = v
				t.From.ex.Progress(now, t.From.worker, []connector.Progress{{Lease: lease, Layer: i, Tokens: t.Tokens, Final: true}})
			})
		})
	}
}

// Preempt takes the source's blocks away, as an engine does without asking; it says so a little later, and computes again.
func (t *Transfer) Preempt(prefill time.Duration) {
	if t.Sent != nil {
		return
	}
	t.epoch++
	t.layers = [Layers]uint32{}
	v, f := t.epoch, t.From.c.F
	f.After(f.Jitter(t.From.c.cfg.Record), func() {
		if t.epoch != v || t.Sent != nil {
			return
		}
		t.From.event(func(now exec.Instant) { t.From.ex.Preempt(now, t.From.worker, t.src.ID) })
		t.compute(prefill)
	})
}

var errModel = errors.New("sim: memory is modelled")

// source is what lanes read.
type source struct {
	c     *Cluster
	t     *Transfer
	plan  *plan
	epoch uint32 // of the progress that the executor knows of, which the blocks may have left behind already
}

func (s *source) Resolve(dst []mem.Block, _ transfer.Range) ([]mem.Block, error) {
	return dst, errModel
}

func (s *source) Bytes(r transfer.Range) (uint64, error) { return s.plan.space.Bytes(r) }

func (s *source) Valid(transfer.Range) bool {
	return s.t.epoch == s.epoch || s.c.sabotage == alwaysValid
}

// ReadWord implements simfabric.WordSource.
func (s *source) ReadWord(chunk uint32) uint64 {
	if s.t.Sent != nil {
		s.c.violation("transfer %d: chunk %d is read after its engine had the blocks back", s.t.ID, chunk)
	}
	seg := s.plan.space.SegmentOf(chunk)
	r := s.plan.Ready(seg, s.t.layers[seg], s.t.layers[seg] == s.t.Tokens)
	if chunk < r.First || chunk >= r.End() {
		return garbage
	}
	return s.t.word(chunk)
}

// sink is one grant's view of a destination.
type sink struct {
	n      *Node
	t      *Transfer
	l      *exec.Landing
	bitmap *transfer.Bitmap
	fenced bool
	full   bool
}

func (s *sink) Resolve(dst []mem.Block, _ transfer.Range) ([]mem.Block, error) { return dst, errModel }

func (s *sink) Bytes(r transfer.Range) (uint64, error) { return s.l.Plan.Space().Bytes(r) }

// WriteWord implements simfabric.WordSink.
func (s *sink) WriteWord(chunk uint32, w uint64) {
	switch {
	case s.fenced:
		s.n.c.violation("transfer %d: chunk %d is written after the fence", s.t.ID, chunk)
	case s.t.Received != nil:
		s.n.c.violation("transfer %d: chunk %d is written after its engine had the blocks back", s.t.ID, chunk)
	}
	s.t.content[chunk] = w
}

func (s *sink) Landed(_ transport.Lane, r transfer.Range) {
	s.bitmap.Set(r)
	if (s.bitmap.Full() || s.n.c.sabotage == commitEarly) && !s.full {
		s.full = true
		s.n.event(func(now exec.Instant) { s.n.ex.Full(now, s.l) })
	}
}
