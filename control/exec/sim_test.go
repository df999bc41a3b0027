package exec

import (
	"container/heap"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"google.golang.org/protobuf/proto"
)

// The simulation connects executors by a fabric in virtual time. It models what the executor must
// survive: delayed control messages, slices with every outcome, lanes that die or hang, late bytes,
// slow or failing fences, engines that preempt, cancel and die, sidecars that die. It checks the
// promises to engines.

const (
	simUnit   = 1024 // bytes of a token in one layer
	simBlock  = 16   // tokens
	simLayers = 4
)

type simEvent struct {
	at  Instant
	seq int
	fn  func()
}

type simQueue []simEvent

func (q simQueue) Len() int { return len(q) }
func (q simQueue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].seq < q[j].seq
}
func (q simQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *simQueue) Push(x any)   { *q = append(*q, x.(simEvent)) }
func (q *simQueue) Pop() any {
	old := *q
	x := old[len(old)-1]
	*q = old[:len(old)-1]
	return x
}

type sim struct {
	t        testing.TB
	rng      *rand.Rand
	now      Instant
	seq      int
	queue    simQueue
	nodes    map[transfer.Boot]*simNode
	byAddr   map[string]*simNode
	never    string // an address that no executor may dial
	lanes    uint64
	faults   float64 // probability of anything bad
	trace    []string
	compared int
	later    bool // frames are of a later release
}

func newSim(t testing.TB, seed uint64, faults float64) *sim {
	return &sim{t: t, rng: rand.New(rand.NewPCG(seed, 7)), nodes: map[transfer.Boot]*simNode{},
		byAddr: map[string]*simNode{},
		faults: faults, now: time.Millisecond}
}

// counted: transports and rails moved all bytes of a source lease; retransmissions count twice.
func (s *sim) counted(t *Trace, bytes uint64) {
	var moved, railed, sent uint64
	for _, n := range t.Moved {
		moved += n
	}
	for i := range t.Sends {
		sent += t.Sends[i].Bytes
		for _, r := range t.Sends[i].Rails {
			railed += r.Bytes
		}
	}
	if moved < bytes || railed < sent {
		s.fatalf("transports moved %d bytes of %d, rails %d of %d", moved, bytes, railed, sent)
	}
}

func (s *sim) logf(format string, args ...any) {
	s.trace = append(s.trace, fmt.Sprintf("%v ", s.now)+fmt.Sprintf(format, args...))
}

func (s *sim) fatalf(format string, args ...any) {
	s.t.Helper()
	for _, l := range s.trace[max(0, len(s.trace)-200):] {
		s.t.Log(l)
	}
	s.t.Fatalf(format, args...)
}

func (s *sim) after(d time.Duration, fn func()) {
	s.seq++
	heap.Push(&s.queue, simEvent{s.now + max(d, 0), s.seq, fn})
}

func (s *sim) chance(p float64) bool { return s.rng.Float64() < p }

func (s *sim) delay(max time.Duration) time.Duration {
	return time.Duration(s.rng.Int64N(int64(max)) + 1)
}

// run advances virtual time until stop returns true or no event is left.
func (s *sim) run(until Instant, stop func() bool) {
	for !stop() {
		next := Instant(-1)
		if len(s.queue) > 0 {
			next = s.queue[0].at
		}
		var due *simNode
		for _, n := range s.nodes {
			if n.dead || n.stopped {
				continue
			}
			if at := n.ex.Next(); at < 1<<62 && (next < 0 || at < next) {
				next, due = max(at, s.now), n
			}
		}
		if next < 0 || next > until {
			s.now = until
			return
		}
		s.now = next
		if due != nil {
			due.event(func() { due.ex.Tick(s.now) })
			continue
		}
		heap.Pop(&s.queue).(simEvent).fn()
	}
}

// simPlan is a plan of simLayers equal segments.
type simPlan struct {
	space  *transfer.Space
	tokens uint32
	skip   uint32
}

func newSimPlan(tokens uint32, skip []uint32) (*simPlan, error) {
	if len(skip) != 1 {
		return nil, fmt.Errorf("skip: %d groups, the layout has 1", len(skip))
	}
	var bytes []uint64
	n := uint64(tokens-min(tokens, skip[0])) * simUnit
	for range simLayers {
		bytes = append(bytes, n)
	}
	sp, err := transfer.NewSpace(bytes)
	if err != nil {
		return nil, err
	}
	return &simPlan{sp, tokens, skip[0]}, nil
}

func (p *simPlan) Space() *transfer.Space { return p.space }

func (p *simPlan) Ready(l int, tokens uint32, final bool) transfer.Range {
	r, bytes := p.space.Segment(l)
	if final && tokens >= p.tokens {
		return r
	}
	full := min(tokens, p.tokens) / simBlock * simBlock
	if full <= p.skip || bytes == 0 {
		return transfer.Range{First: r.First}
	}
	return transfer.Range{First: r.First, Count: (full - p.skip) * simUnit / transfer.ChunkBytes}
}

func (p *simPlan) Feeds(l int) []int { return simSelf[l : l+1] }

func (p *simPlan) Digest() (d [32]byte) {
	binary.LittleEndian.PutUint32(d[:], p.tokens)
	binary.LittleEndian.PutUint32(d[4:], p.skip)
	return d
}

func (p *simPlan) From(seg int) []int { return simSelf[seg : seg+1] }

var simSelf = [simLayers]int{0, 1, 2, 3}

type simPlanner struct{}

func (simPlanner) Version() uint32 { return 1 }

func (simPlanner) Receive(_ *engines.Worker, x *engines.Expect) (Plan, error) {
	return newSimPlan(x.Tokens, x.Skip)
}

func (simPlanner) Divide(*engines.Worker, *engines.Expect, []Rank, func(string) uint64) ([]Part,
	error) {
	return nil, errors.New("engines of this simulation are all alike")
}

func (simPlanner) Send(_ *engines.Worker, g *peerv1.Grant, _ *peerv1.Part) (Plan, error) {
	return newSimPlan(g.Tokens, g.Skip)
}

type simNode struct {
	s       *sim
	addr    string
	boot    transfer.Boot
	ex      *Exec
	dead    bool
	over    map[transfer.Boot]bool // peers whose process is over
	stopped bool                   // by SIGSTOP
	later   []func()               // events while it is stopped
	batch   Batch
	busy    bool
	lanes   map[uint64]*simLane
	grants  map[[2]any]*simLanding // by peer and slot
	links   map[transfer.Boot]Instant
	leases  map[transfer.LeaseID]*simLease
	fenced  map[*engines.Worker]bool
	follow  map[*engines.Worker]bool // the last Follow
	answer  map[uint64]engines.Admission
	hangs   map[string]bool                  // addresses that do not answer a connect
	unsent  func(*peerv1.ControlFrame) error // nil, or nil from it: the frame goes out
	hinted  int                              // lanes
	bound   int                              // origins
	heldOn  []Instant
	updated int // tables
}

// simLanding is the receiver's memory behind one grant.
type simLanding struct {
	l        *ReceivePart
	lease    *simLease
	bitmap   *transfer.Bitmap
	claim    map[uint32]uint32 // chunk -> the latest attempt that came
	reported bool
}

// simLease is the view that an engine has of a lease.
type simLease struct {
	id       transfer.LeaseID
	w        *engines.Worker
	receive  bool
	done     *engines.Completion
	opened   Instant
	deadline time.Duration
	content  []string // per chunk, written by lanes: "key" or garbage
	key      string
	// source
	version int
	table   [][]uint32         // as reported last
	tables  map[int][][]uint32 // of each version's steps
	layers  [simLayers]uint32  // tokens that are really there
	final   [simLayers]bool
	tokens  uint32
}

func (s *sim) node(addr string, cfg Config) *simNode {
	n := &simNode{s: s, addr: addr, lanes: map[uint64]*simLane{}, grants: map[[2]any]*simLanding{},
		links: map[transfer.Boot]Instant{}, over: map[transfer.Boot]bool{},
		leases: map[transfer.LeaseID]*simLease{}, fenced: map[*engines.Worker]bool{},
		follow: map[*engines.Worker]bool{}, answer: map[uint64]engines.Admission{}}
	for i := range n.boot {
		n.boot[i] = byte(s.rng.Uint32())
	}
	cfg.Boot, cfg.Endpoint, cfg.Planner = n.boot, addr, simPlanner{}
	n.ex = New(cfg)
	s.nodes[n.boot] = n
	s.byAddr[addr] = n
	return n
}

func (n *simNode) worker() *engines.Worker {
	w := &engines.Worker{Name: n.addr,
		Layout: &layout.Layout{Groups: []layout.Group{{TokensPerBlock: simBlock,
			Layers: make([]layout.Layer, simLayers)}}}}
	for i := range w.Boot {
		w.Boot[i] = byte(n.s.rng.Uint32())
	}
	n.event(func() { n.ex.WorkerUp(w) })
	return w
}

// event runs fn and performs the actions, as the driver does.
func (n *simNode) event(fn func()) {
	if n.dead {
		return
	}
	if n.stopped {
		n.later = append(n.later, fn)
		return
	}
	fn()
	if n.busy {
		return
	}
	n.busy = true
	for n.ex.Drain(&n.batch) {
		for i := range n.batch.Actions {
			n.perform(&n.batch.Actions[i])
		}
	}
	n.busy = false
}

// send is a control lane that may be full.
func (n *simNode) send(to transfer.Boot, f *peerv1.ControlFrame) {
	if n.unsent != nil {
		if err := n.unsent(f); err != nil {
			n.s.after(0, func() { n.event(func() { n.ex.Unsent(n.s.now, to, f, err) }) })
			return
		}
	}
	n.sendTo(to, f)
}

func (n *simNode) perform(a *Action) {
	s := n.s
	switch a.Kind {
	case Connect:
		addr := a.Endpoint
		if n.hangs[addr] {
			return
		}
		s.after(s.delay(5*time.Millisecond), func() {
			n.event(func() {
				p := s.byAddr[addr]
				if addr == s.never {
					n.ex.ConnectFailed(s.now, addr, fmt.Errorf("connect: %w", ErrNotPossible))
					return
				}
				if p == nil || p.dead {
					n.ex.ConnectFailed(s.now, addr, fmt.Errorf("connect: %w", ErrNotListening))
					return
				}
				if s.chance(s.faults) {
					n.ex.ConnectFailed(s.now, addr, errors.New("handshake failed"))
					return
				}
				n.ex.PeerUp(s.now, addr, p.boot)
				s.join(n, p)
			})
		})
	case Send:
		n.send(a.Peer, a.Frame)
	case Offer:
		for _, l := range a.ReceiveParts {
			sl := &simLanding{l: l, lease: n.leases[l.Lease()],
				bitmap: transfer.NewBitmap(l.Plan.Space().NumChunks()),
				claim:  map[uint32]uint32{}}
			sl.lease.content = make([]string, l.Plan.Space().NumChunks())
			l.Grant.Receipt.Reset(l.Plan.Space().NumChunks())
			name := [2]any{l.Grant.Peer, l.Grant.Slot}
			if old := n.grants[name]; old != nil {
				s.fatalf("slot %d was given out again before its fence", l.Grant.Slot)
			}
			n.grants[name] = sl
		}
		n.send(a.Peer, a.Frame)
	case Fence:
		l := a.ReceivePart
		l.Grant.Revoke()
		fail := s.chance(s.faults / 2)
		s.after(s.delay(2*time.Millisecond), func() {
			n.event(func() {
				if fail {
					n.ex.FenceDone(s.now, l, errors.New("fence failed"))
				} else {
					n.ex.FenceDone(s.now, l, nil)
				}
			})
		})
	case Forget:
		delete(n.grants, [2]any{a.ReceivePart.Grant.Peer, a.ReceivePart.Grant.Slot})
	case Bind:
		n.bound++
		if l := n.leases[a.SendPart.Lease]; l != nil && l.done != nil {
			s.fatalf("an origin is bound to a lease that is complete")
		}
		if !n.follow[a.SendPart.Worker] {
			s.fatalf("%s: an origin is bound, and its layers are not followed", n.addr)
		}
		l := n.leases[a.SendPart.Lease]
		a.SendPart.Origin.Memory = &simSource{snd: a.SendPart, lease: l, version: l.version,
			table: a.SendPart.Blocks}
	case Update:
		n.updated++
		a.SendPart.Origin.Memory.(*simSource).table = a.Blocks
	case CloseOrigin:
		snd := a.SendPart
		snd.Origin.Revoke()
		fail := s.chance(s.faults / 2)
		s.after(s.delay(2*time.Millisecond), func() {
			n.event(func() {
				if fail {
					n.ex.OriginClosed(s.now, snd, errors.New("close failed"))
				} else {
					n.ex.OriginClosed(s.now, snd, nil)
				}
			})
		})
	case WakeHint:
		n.hinted++
	case Move:
		n.move(a.Lane, append([]transport.Slice(nil), a.Slices...))
	case Complete:
		c := a.Completion
		l := n.leases[c.Lease]
		s.logf("%s complete %v received=%v status=%d %s", n.addr, c.Lease, c.Received, c.Status, c.Reason)
		if l == nil || l.done != nil {
			s.fatalf("lease %v completed twice, or unknown", c.Lease)
		}
		l.done = &c
		if !c.Received && c.Status == engines.StatusOK {
			s.counted(a.Trace, c.Bytes)
		}
		if c.Received && c.Status == engines.StatusOK {
			for i, v := range l.content {
				if v != l.key {
					s.fatalf("lease %v committed, but chunk %d holds %q: want %q", c.Lease, i, v, l.key)
				}
			}
		}
	case Compare:
		s.compared++
		s.after(s.delay(time.Millisecond), func() {
			n.event(func() {
				n.ex.Compared(s.now, a.Comparison, "dtype: a at prefill, b at decode")
			})
		})
	case HeldOn:
		n.heldOn = append(n.heldOn, s.now)
	case Answer:
		n.answer[a.Await.Token] = a.Admission
	case Follow:
		if n.follow[a.Worker] == a.On {
			s.fatalf("%s: Follow says %v twice", n.addr, a.On)
		}
		n.follow[a.Worker] = a.On
	case WorkerFenced:
		n.fenced[a.Worker] = true
		if n.follow[a.Worker] {
			s.fatalf("%s: a worker is fenced whose layers are awaited", n.addr)
		}
		for _, l := range n.leases {
			if l.w == a.Worker && l.done == nil {
				s.fatalf("worker reported fenced with lease %v open", l.id)
			}
		}
	}
}

// sendTo delivers in order per pair, after a delay, while both are alive.
func (n *simNode) sendTo(to transfer.Boot, f *peerv1.ControlFrame) {
	s := n.s
	p := s.nodes[to]
	if p == nil {
		return
	}
	f = proto.Clone(f).(*peerv1.ControlFrame)
	if s.later {
		addFields(f.ProtoReflect())
	}
	d := s.delay(time.Millisecond)
	if s.chance(s.faults / 4) {
		d = s.delay(2 * time.Second) // the control lane is cut for a while
	}
	at := max(s.now+d, n.links[to]+1)
	n.links[to] = at
	s.after(at-s.now, func() {
		if n.dead && !s.chance(0.5) {
			return
		}
		p.event(func() {
			if p.over[n.boot] {
				return
			}
			s.logf("%s -> %s %.60T", n.addr, p.addr, f.Body)
			if err := p.ex.Message(s.now, n.boot, f); err != nil {
				s.fatalf("message refused: %v", err)
			}
		})
	})
}

// peerDown is the loss of a peer. As package peer promises (TestNothingAfterDown there), no frame
// of the boot follows if its process is over: the grant of a dead sidecar cannot come late.
func (n *simNode) peerDown(boot transfer.Boot, over bool) {
	n.event(func() {
		n.over[boot] = n.over[boot] || over
		n.ex.PeerDown(n.s.now, boot, over)
	})
}

// resume continues a stopped sidecar: its timers are late, and messages wait for it.
func (n *simNode) resume() {
	n.stopped = false
	n.event(func() { n.ex.Tick(n.s.now) })
	later := n.later
	n.later = nil
	for _, fn := range later {
		n.event(fn)
	}
}

// kill ends a sidecar; the others receive the proof later.
func (n *simNode) kill() {
	s := n.s
	n.dead = true
	delete(s.byAddr, n.addr)
	for _, p := range s.nodes {
		if p != n {
			s.after(s.delay(time.Second), func() {
				p.peerDown(n.boot, true)
				for _, l := range p.lanes {
					if l.to == n {
						l.die()
					}
				}
			})
		}
	}
}

func testKey(x, h byte) (k transfer.Key) {
	k.Xfer[0], k.Hash[0] = x, h
	return k
}

func (n *simNode) expect(w *engines.Worker, id uint64, k transfer.Key, peer string, tokens,
	skip uint32, deadline time.Duration) *simLease {
	return n.expectFor(w, id, k, peer, tokens, skip, deadline, 0)
}

// expectFor is expect of an engine that waits so long for a byte; 0: until the deadline.
func (n *simNode) expectFor(w *engines.Worker, id uint64, k transfer.Key, peer string, tokens,
	skip uint32, deadline, stall time.Duration) *simLease {
	lid := transfer.LeaseID{Boot: w.Boot, ID: id}
	l := &simLease{id: lid, w: w, receive: true, opened: n.s.now, deadline: deadline, key: k.String(),
		tokens: tokens}
	n.leases[lid] = l
	n.event(func() {
		n.ex.Expect(n.s.now, w, engines.Expect{Lease: lid, Key: k, Peer: peer, Tokens: tokens,
			Skip: []uint32{skip}, Deadline: deadline,
			MatchTimeout: deadline / 2, Stall: stall})
	})
	return l
}

func (n *simNode) intent(w *engines.Worker, id uint64, k transfer.Key, tokens uint32, fanout int,
	deadline time.Duration) *simLease {
	lid := transfer.LeaseID{Boot: w.Boot, ID: id}
	l := &simLease{id: lid, w: w, opened: n.s.now, deadline: deadline, key: k.String(), tokens: tokens,
		table: [][]uint32{{0}}, tables: map[int][][]uint32{}}
	n.leases[lid] = l
	n.event(func() {
		n.ex.Intent(n.s.now, w, engines.Intent{Lease: lid, Key: k, Tokens: tokens, Fanout: fanout,
			Deadline: deadline, Blocks: l.table})
	})
	return l
}

// announce announces a step of l.
func (n *simNode) announce(l *simLease) {
	v := l.version
	n.event(func() {
		if l.version == v && l.done == nil {
			n.ex.Announced(n.s.now, l.w, []transfer.LeaseID{l.id})
		}
	})
}

// step makes layer l hold tokens.
func (n *simNode) step(l *simLease, layer int, tokens uint32) {
	final := tokens >= l.tokens
	l.layers[layer], l.final[layer] = min(tokens, l.tokens), final
	v := l.version
	n.event(func() {
		if l.version == v {
			if l.tables[v] == nil {
				l.tables[v] = [][]uint32{{uint32(v) + 1}}
			}
			l.table = l.tables[v]
			n.ex.Progress(n.s.now, l.w, []engines.Progress{{Lease: l.id, Layer: layer, Tokens: min(tokens,
				l.tokens), Final: final, Blocks: l.table}})
		}
	})
}

func (n *simNode) steps(l *simLease) {
	for i := range simLayers {
		n.step(l, i, l.tokens)
	}
}

// preempt takes the blocks: the memory changes at once, and the record follows later.
func (n *simNode) preempt(l *simLease) {
	l.version++
	l.layers, l.final = [simLayers]uint32{}, [simLayers]bool{}
	v := l.version
	n.s.after(n.s.delay(200*time.Microsecond), func() {
		if l.version == v {
			n.event(func() { n.ex.Preempt(n.s.now, l.w, l.id.ID) })
		}
	})
}
