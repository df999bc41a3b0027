package sim

import (
	"cmp"
	"encoding/binary"
	"errors"
	"iter"
	"maps"
	"slices"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

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

// self has every layer at its own index.
var self = func() (all [Layers]int) {
	for i := range all {
		all[i] = i
	}
	return all
}()

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
	// OnReceived is called when the receiving engine hears how it ended.
	OnReceived func()

	key                transfer.Key
	src, dst           transfer.LeaseID
	giver, taker       *engine // whose leases these are
	sentAt, receivedAt time.Duration
	intended           bool     // the prefill has admitted it
	expected           bool     // the decode has blocks for it
	content            []uint64 // the destination's
	epoch              uint32   // of the source's blocks
	layers             [Layers]uint32
	sinks              []*sink // every grant that was ever made
	sources            []*source
}

// ReceivedAt is when the receiving engine heard how it ended.
func (t *Transfer) ReceivedAt() time.Duration { return t.receivedAt }

// Took is how long the receiving engine waited.
func (t *Transfer) Took() time.Duration { return t.receivedAt - t.Began }

// Last is when the later of both leases ended, from the beginning.
func (t *Transfer) Last() time.Duration { return max(t.sentAt, t.receivedAt) - t.Began }

// Bytes of the transfer.
func (t *Transfer) Bytes() uint64 { return uint64(t.Tokens) * unitBytes * Layers }

// word is what chunk i must hold where it was read at an epoch.
func (t *Transfer) word(i uint32, epoch uint32) uint64 {
	return uint64(epoch&0xff)<<56 | t.ID<<20 | uint64(i) + 1
}

func inOrder(m map[uint64]*Transfer) []*Transfer { return byID(maps.Values(m)) }

func transfersInOrder(m map[transfer.LeaseID]*Transfer) []*Transfer { return byID(maps.Values(m)) }

func byID(all iter.Seq[*Transfer]) []*Transfer {
	return slices.Compact(slices.SortedFunc(all, func(a, b *Transfer) int { return cmp.Compare(a.ID, b.ID) }))
}

// Begin lets `to` expect a prompt of tokens from `from`, which has them computed layer by layer. Where an engine is dead there is
// nobody to want anything: nil.
func (c *Cluster) Begin(from, to *Node, tokens uint32, deadline time.Duration, prefill time.Duration) *Transfer {
	t := c.transfer(from, to, tokens, deadline)
	if t == nil {
		return nil
	}
	t.giver = from.engine
	t.src = from.lease(t)
	c.open++
	intent := func() {
		t.intended = true
		if s := from.side; s != nil {
			t.intend(s)
		}
		t.compute(prefill)
	}
	if c.F.Rand().IntN(2) == 0 {
		t.expect()
		c.F.After(c.F.Jitter(time.Millisecond), intent)
	} else {
		intent()
		c.F.After(c.F.Jitter(time.Millisecond), t.expect)
	}
	return t
}

// BeginAlone lets `to` expect a prompt that `from` never hears of.
func (c *Cluster) BeginAlone(from, to *Node, tokens uint32, deadline time.Duration) *Transfer {
	t := c.transfer(from, to, tokens, deadline)
	if t != nil {
		t.Alone = true
		t.expect()
	}
	return t
}

func (c *Cluster) transfer(from, to *Node, tokens uint32, deadline time.Duration) *Transfer {
	if from.engine == nil || to.engine == nil {
		return nil
	}
	t := &Transfer{ID: uint64(len(c.transfers) + 1), From: from, To: to, Tokens: tokens, Deadline: deadline, Began: c.F.Now(), taker: to.engine}
	binary.BigEndian.PutUint64(t.key.Xfer[:], t.ID)
	binary.BigEndian.PutUint64(t.key.Hash[:], ^t.ID)
	c.transfers = append(c.transfers, t)
	c.open++
	t.dst = to.lease(t)
	return t
}

func (n *Node) lease(t *Transfer) transfer.LeaseID {
	n.nextID++
	n.engine.leases[n.nextID] = t
	return transfer.LeaseID{Boot: n.engine.boot, ID: n.nextID}
}

// left of the deadline.
func (t *Transfer) left() time.Duration {
	return max(t.Began+t.Deadline-t.From.c.F.Now(), time.Millisecond)
}

func (t *Transfer) expect() {
	t.expected = true
	if s := t.To.side; s != nil {
		t.want(s)
	}
}

func (t *Transfer) want(s *sidecar) {
	if t.Received != nil || t.To.engine != t.taker {
		return
	}
	s.owners[t.dst] = t
	w := s.worker
	s.event(func(now exec.Instant) {
		s.ex.Expect(now, w, connector.Expect{Lease: t.dst, Key: t.key, Peer: t.From.addr, Tokens: t.Tokens, Skip: []uint32{0},
			Deadline: t.left(), Partner: t.left()})
	})
}

func (t *Transfer) intend(s *sidecar) {
	if t.Sent != nil || t.From.engine != t.giver {
		return
	}
	s.owners[t.src] = t
	w := s.worker
	s.event(func(now exec.Instant) {
		s.ex.Intent(now, w, connector.Intent{Lease: t.src, Key: t.key, Tokens: t.Tokens, Fanout: 1, Deadline: t.left()})
	})
}

// present shows a new sidecar what is open of a transfer at its node.
func (t *Transfer) present(s *sidecar) {
	if s.n == t.To && t.expected {
		t.want(s)
	}
	if s.n == t.From && t.intended {
		t.intend(s)
		for i := range Layers {
			if t.layers[i] > 0 {
				t.progress(i, t.epoch)
			}
		}
	}
}

// compute fills the layers of the source one by one.
func (t *Transfer) compute(prefill time.Duration) {
	f, v := t.From.c.F, t.epoch
	for i := range Layers {
		f.After(prefill*time.Duration(i+1)/Layers, func() {
			if t.epoch == v && t.Sent == nil && t.From.engine == t.giver {
				t.layers[i] = t.Tokens
				t.progress(i, v)
			}
		})
	}
}

func (t *Transfer) progress(layer int, epoch uint32) {
	s := t.From.side
	if s == nil {
		return
	}
	w := s.worker
	s.event(func(now exec.Instant) {
		lease := t.src
		lease.Epoch = epoch
		s.ex.Progress(now, w, []connector.Progress{{Lease: lease, Layer: layer, Tokens: t.Tokens, Final: true}})
	})
}

// Preempt takes the source's blocks away, as an engine does without asking; it says so a little later, and computes again.
func (t *Transfer) Preempt(prefill time.Duration) {
	if t.Sent != nil || t.From.engine != t.giver {
		return
	}
	c := t.From.c
	c.stats.Preempted++
	t.epoch++
	t.layers = [Layers]uint32{}
	v := t.epoch
	c.F.After(c.F.Jitter(c.cfg.Record), func() {
		if t.epoch != v || t.Sent != nil || t.From.engine != t.giver {
			return
		}
		if s := t.From.side; s != nil {
			w := s.worker
			s.event(func(now exec.Instant) { s.ex.Preempt(now, w, t.src.ID) })
		}
		t.compute(prefill)
	})
}

// Cancel gives one of the transfer's leases back, if it is still open.
func (t *Transfer) Cancel(receiver bool) {
	n, e, id, ended := t.From, t.giver, t.src.ID, t.Sent
	if receiver {
		n, e, id, ended = t.To, t.taker, t.dst.ID, t.Received
	}
	if s := n.side; s != nil && e != nil && n.engine == e && ended == nil {
		n.c.stats.Cancelled++
		w := s.worker
		s.event(func(now exec.Instant) { s.ex.Cancel(now, w, id, "") })
	}
}

// known reports whether the sidecar at n was told of the transfer's lease there.
func (t *Transfer) known(n *Node) bool {
	return n == t.To && n.side.owners[t.dst] == t || n == t.From && t.giver != nil && n.side.owners[t.src] == t
}

// orphan ends the leases at n of an engine that is dead, where no sidecar is left to say so.
func (t *Transfer) orphan(n *Node) {
	dead := connector.Completion{Status: exec.StatusFailed, Reason: "the engine died, and nobody else knew"}
	if n == t.To && n.engine != t.taker && t.Received == nil {
		t.ended(true, dead)
	}
	if n == t.From && t.giver != nil && n.engine != t.giver && t.Sent == nil {
		t.ended(false, dead)
	}
}

func (t *Transfer) ended(receiver bool, x connector.Completion) {
	c := t.From.c
	c.open--
	c.stats.Leases++
	if receiver {
		t.Received, t.receivedAt = &x, c.F.Now()
		delete(t.taker.leases, t.dst.ID)
		if t.OnReceived != nil {
			c.F.After(0, t.OnReceived)
		}
	} else {
		t.Sent, t.sentAt = &x, c.F.Now()
		delete(t.giver.leases, t.src.ID)
	}
}

func (s *sidecar) owner(l transfer.LeaseID) *Transfer {
	l.Epoch = 0
	return s.owners[l]
}

func (s *sidecar) complete(a *exec.Action) {
	x := a.Completion
	t := s.owner(x.Lease)
	switch {
	case t == nil:
		s.c.violation("%s: lease %v ended and was not open", s.n.addr, x.Lease)
		return
	case x.Received && t.Received != nil, !x.Received && t.Sent != nil:
		s.c.violation("%s: lease %v of transfer %d ended twice", s.n.addr, x.Lease, t.ID)
		return
	}
	x.Lease.Epoch = 0
	delete(s.owners, x.Lease)
	t.released(x.Received)
	t.ended(x.Received, x)
	if x.Received && x.Status == exec.StatusOK {
		t.committed()
	}
}

func (s *sidecar) workerFenced(w *connector.Worker) {
	for _, t := range transfersInOrder(s.owners) {
		if t.taker != nil && t.taker.boot == w.Boot && t.To == s.n && t.Received == nil && t.expected ||
			t.giver != nil && t.giver.boot == w.Boot && t.From == s.n && t.Sent == nil && t.intended {
			s.c.violation("%s: its worker is said to be fenced, and transfer %d has a lease open", s.n.addr, t.ID)
		}
	}
}

var errModel = errors.New("sim: memory is modelled")

// source is what lanes read.
type source struct {
	s      *sidecar
	t      *Transfer
	plan   *plan
	epoch  uint32 // of the progress that the executor knows of, which the blocks may have left behind already
	closed bool
}

func (s *source) Resolve(dst []mem.Block, _ transfer.Range) ([]mem.Block, error) {
	return dst, errModel
}

func (s *source) Bytes(r transfer.Range) (uint64, error) { return s.plan.space.Bytes(r) }

func (s *source) Valid(transfer.Range) bool { return s.t.epoch == s.epoch }

// ReadWord implements simfabric.WordSource.
func (s *source) ReadWord(chunk uint32) uint64 {
	s.t.read(s, chunk)
	seg := s.plan.space.SegmentOf(chunk)
	r := s.plan.Ready(seg, s.t.layers[seg], s.t.layers[seg] == s.t.Tokens)
	if chunk < r.First || chunk >= r.End() {
		return garbage
	}
	return s.t.word(chunk, s.t.epoch)
}

// sink is one grant's view of a destination.
type sink struct {
	s      *sidecar
	t      *Transfer
	l      *exec.Landing
	bitmap *transfer.Bitmap
	fenced bool
	full   bool
}

func (k *sink) Resolve(dst []mem.Block, _ transfer.Range) ([]mem.Block, error) { return dst, errModel }

func (k *sink) Bytes(r transfer.Range) (uint64, error) { return k.l.Plan.Space().Bytes(r) }

// WriteWord implements simfabric.WordSink.
func (k *sink) WriteWord(chunk uint32, w uint64) {
	k.t.write(k, chunk)
	k.t.content[chunk] = w
}

func (k *sink) Landed(_ transport.Lane, r transfer.Range) {
	k.bitmap.Set(r)
	if k.bitmap.Full() && !k.full {
		k.full = true
		full := func() { k.s.event(func(now exec.Instant) { k.s.ex.Full(now, k.l) }) }
		full()
		k.s.twice(full)
	}
}
