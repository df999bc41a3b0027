package sim

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// engine is one life of an engine: a worker for each of its ranks. What it has open outlives
// sidecars.
type engine struct {
	boots []transfer.Boot // of its workers
	open  map[transfer.LeaseID]*lease
}

// lease is what one rank of an engine has open for a transfer.
type lease struct {
	t        *Transfer
	n        *Node
	e        *engine
	rank     int
	receiver bool
	id       transfer.LeaseID
	wanted   bool // the engine wants it: a sidecar gets the request, and the next one again
	done     *engines.Completion

	content []uint64  // receiver: its blocks
	sinks   []*sink   // receiver: every part that was ever granted
	sources []*source // every origin that was ever bound
}

// Transfer is a prompt on its way, as both engines see it. Each has a lease on every rank.
type Transfer struct {
	ID       uint64
	From, To *Node
	Tokens   uint32
	Prio     engines.Priority
	Deadline time.Duration
	Alone    bool // its prefill never comes
	Began    time.Duration
	// Sent and Received are the first completion of a side's leases that is not good, or the last;
	// nil: not all have ended.
	Sent, Received *engines.Completion
	// OnReceived is called when the receiving engine has its completion.
	OnReceived func()

	key                transfer.Key
	gives, takes       []*lease
	sentAt, receivedAt time.Duration
	epoch              uint32       // of the source's blocks
	ready              [Layers]bool // computed at that epoch
}

// ReceivedAt is when the receiving engine had its completion.
func (t *Transfer) ReceivedAt() time.Duration { return t.receivedAt }

// Took is how long the receiving engine waited.
func (t *Transfer) Took() time.Duration { return t.receivedAt - t.Began }

// Last is when the later of both sides ended, from the beginning.
func (t *Transfer) Last() time.Duration { return max(t.sentAt, t.receivedAt) - t.Began }

// Bytes of the transfer.
func (t *Transfer) Bytes() uint64 { return uint64(t.Tokens) * unitBytes * Layers }

// word is what chunk i of a layer must hold where it was read at an epoch.
func (t *Transfer) word(layer int, i, epoch uint32) uint64 {
	return uint64(epoch&0xff)<<56 | t.ID<<24 | uint64(layer)<<20 | uint64(i) + 1
}

func inOrder(all iter.Seq[*lease]) []*lease {
	return slices.SortedFunc(all, func(a, b *lease) int {
		return cmp.Or(cmp.Compare(a.t.ID, b.t.ID), cmp.Compare(a.id.ID, b.id.ID))
	})
}

// Begin lets `to` expect a prompt of tokens from `from`, which has them computed layer by layer.
// Where an engine is dead no engine wants anything: nil.
func (c *Cluster) Begin(from, to *Node, tokens uint32, deadline time.Duration,
	prefill time.Duration) *Transfer {
	return c.BeginAs(engines.DecodeWaits, from, to, tokens, deadline, prefill)
}

// BeginAs is Begin with a priority.
func (c *Cluster) BeginAs(prio engines.Priority, from, to *Node, tokens uint32,
	deadline time.Duration, prefill time.Duration) *Transfer {
	t := c.transfer(from, to, tokens, deadline)
	if t == nil {
		return nil
	}
	t.Prio = prio
	for r := range from.engine.boots {
		t.gives = append(t.gives, from.open(t, r, false))
	}
	intent := func() {
		c.sendSoon(t.gives)
		t.compute(prefill)
	}
	expect := func() { c.sendSoon(t.takes) }
	if c.F.Rand().IntN(2) == 0 {
		expect()
		c.F.After(c.F.Jitter(time.Millisecond), intent)
	} else {
		intent()
		c.F.After(c.F.Jitter(time.Millisecond), expect)
	}
	return t
}

// BeginAlone lets `to` expect a prompt that `from` never receives.
func (c *Cluster) BeginAlone(from, to *Node, tokens uint32, deadline time.Duration) *Transfer {
	t := c.transfer(from, to, tokens, deadline)
	if t != nil {
		t.Alone = true
		c.sendSoon(t.takes)
	}
	return t
}

func (c *Cluster) transfer(from, to *Node, tokens uint32, deadline time.Duration) *Transfer {
	if from.engine == nil || to.engine == nil {
		return nil
	}
	t := &Transfer{ID: uint64(len(c.transfers) + 1), From: from, To: to, Tokens: tokens,
		Deadline: deadline, Began: c.F.Now()}
	binary.BigEndian.PutUint64(t.key.Xfer[:], t.ID)
	binary.BigEndian.PutUint64(t.key.Hash[:], ^t.ID)
	c.transfers = append(c.transfers, t)
	for r := range to.engine.boots {
		t.takes = append(t.takes, to.open(t, r, true))
	}
	return t
}

// open gives a rank of n's engine a lease.
func (n *Node) open(t *Transfer, rank int, receiver bool) *lease {
	n.nextID++
	n.c.open++
	l := &lease{t: t, n: n, e: n.engine, rank: rank, receiver: receiver,
		id: transfer.LeaseID{Boot: n.engine.boots[rank], ID: n.nextID}}
	n.engine.open[l.id] = l
	return l
}

// sendSoon lets each rank send its request, the first at once.
func (c *Cluster) sendSoon(all []*lease) {
	for i, l := range all {
		if i == 0 {
			l.send()
			continue
		}
		c.F.After(c.F.Jitter(time.Millisecond), l.send)
	}
}

func (l *lease) send() {
	l.wanted = true
	if s := l.n.side; s != nil {
		l.present(s)
	}
}

// alive reports whether the lease is open and its engine there.
func (l *lease) alive() bool { return l.done == nil && l.n.engine == l.e }

// left of the deadline.
func (l *lease) left() time.Duration {
	return max(l.t.Began+l.t.Deadline-l.n.c.F.Now(), time.Millisecond)
}

// present shows a sidecar a lease that its engine wants.
func (l *lease) present(s *sidecar) {
	if !l.wanted || !l.alive() {
		return
	}
	t, w := l.t, s.workers[l.rank]
	s.owners[l.id] = l
	if l.receiver {
		s.run(func() {
			s.drv.Handle([]engines.Event{{Kind: engines.DestOpened, Worker: w, Expect: &engines.Expect{
				Lease: l.id, Key: t.key, Peer: t.From.addr, Req: fmt.Sprint(t.ID), Tokens: t.Tokens,
				Skip: []uint32{0}, Priority: t.Prio, Deadline: l.left(), MatchTimeout: l.left()}}})
		})
		return
	}
	s.run(func() {
		s.drv.Handle([]engines.Event{{Kind: engines.SourceOpened, Worker: w, Intent: &engines.Intent{
			Lease: l.id, Key: t.key, Req: fmt.Sprint(t.ID), Tokens: t.Tokens, Fanout: 1,
			Blocks: [][]uint32{}, Priority: t.Prio, Deadline: l.left()}}})
	})
	l.announce(t.epoch)
	for layer, ok := range t.ready {
		if ok {
			l.progress(layer, t.epoch)
		}
	}
}

// compute fills the layers of the source one by one.
func (t *Transfer) compute(prefill time.Duration) {
	f, v := t.From.c.F, t.epoch
	for _, l := range t.gives {
		l.announce(v)
	}
	for i := range Layers {
		f.After(prefill*time.Duration(i+1)/Layers, func() {
			if t.epoch != v {
				return
			}
			t.ready[i] = true
			for _, l := range t.gives {
				l.progress(i, v)
			}
		})
	}
}

// announce sends that layers follow.
func (l *lease) announce(epoch uint32) {
	s := l.n.side
	if s == nil || !l.wanted || !l.alive() {
		return
	}
	id := l.id
	id.Epoch = epoch
	s.engine(engines.Event{Kind: engines.StepAnnounced, Worker: s.workers[l.rank],
		Leases: []transfer.LeaseID{id}})
}

// progress reports that a layer is complete, if it is of the lease's rank.
func (l *lease) progress(layer int, epoch uint32) {
	s, own := l.n.side, held(l.rank, len(l.e.boots))
	if s == nil || !l.wanted || !l.alive() || layer < own.lo || layer >= own.hi {
		return
	}
	id := l.id
	id.Epoch = epoch
	s.engine(engines.Event{Kind: engines.LayersComplete, Worker: s.workers[l.rank],
		Progress: []engines.Progress{{Lease: id, Layer: layer - own.lo, Tokens: l.t.Tokens,
			Final: true}}})
}

// Preempt takes the source's blocks away on every rank, as an engine does without asking; each
// reports so a little later, and all compute again.
func (t *Transfer) Preempt(prefill time.Duration) {
	if len(t.gives) == 0 || t.Sent != nil || t.From.engine != t.gives[0].e {
		return
	}
	c := t.From.c
	c.stats.Preempted++
	t.epoch++
	t.ready = [Layers]bool{}
	v, last := t.epoch, time.Duration(0)
	for _, l := range t.gives {
		after := c.F.Jitter(c.cfg.Record)
		last = max(last, after)
		c.F.After(after, func() {
			if s := l.n.side; s != nil && t.epoch == v && l.alive() && l.wanted {
				s.engine(engines.Event{Kind: engines.Preempted, Worker: s.workers[l.rank], Lease: l.id.ID})
			}
		})
	}
	c.F.After(last+1, func() {
		if t.epoch == v {
			t.compute(prefill)
		}
	})
}

// Cancel gives the transfer's leases of one side back, those that are still open.
func (t *Transfer) Cancel(receiver bool) {
	all := t.gives
	if receiver {
		all = t.takes
	}
	for _, l := range all {
		if s := l.n.side; s != nil && l.alive() && l.wanted {
			l.n.c.stats.Canceled++
			s.engine(engines.Event{Kind: engines.Canceled, Worker: s.workers[l.rank], Lease: l.id.ID})
		}
	}
}

// orphan ends a lease whose engine is dead, where no sidecar has it.
func (l *lease) orphan() {
	if l.done == nil && l.n.engine != l.e {
		l.ended(engines.Completion{Status: engines.StatusFailed, Reason: "the engine died, and no " +
			"sidecar had the lease"})
	}
}

func (l *lease) ended(x engines.Completion) {
	c, t := l.n.c, l.t
	c.open--
	c.stats.Leases++
	l.done = &x
	delete(l.e.open, l.id)
	all := t.gives
	if l.receiver {
		all = t.takes
	}
	var worst *engines.Completion
	for _, o := range all {
		switch {
		case o.done == nil:
			return
		case worst == nil || worst.Status == engines.StatusOK:
			worst = o.done
		}
	}
	if !l.receiver {
		t.Sent, t.sentAt = worst, c.F.Now()
		return
	}
	t.Received, t.receivedAt = worst, c.F.Now()
	if t.OnReceived != nil {
		c.F.After(0, t.OnReceived)
	}
}

// valid reports whether the blocks of a source lease are still those of the progress that the
// executor has.
func (s *sidecar) valid(id transfer.LeaseID) bool {
	l := s.owner(id)
	return l != nil && l.t.epoch == id.Epoch
}

func (s *sidecar) owner(id transfer.LeaseID) *lease {
	id.Epoch = 0
	return s.owners[id]
}

func (s *sidecar) complete(a *exec.Action) {
	x := a.Completion
	l := s.owner(x.Lease)
	switch {
	case l == nil:
		s.c.violation("%s: lease %v ended and was not open", s.n.addr, x.Lease)
		return
	case l.done != nil:
		s.c.violation("%s: lease %v of transfer %d ended twice", s.n.addr, x.Lease, l.t.ID)
		return
	}
	delete(s.owners, l.id)
	l.released()
	l.ended(x)
	if x.Received && x.Status == engines.StatusOK {
		l.committed()
	}
}

func (s *sidecar) workerFenced(w *engines.Worker) {
	for _, l := range inOrder(maps.Values(s.owners)) {
		if l.id.Boot == w.Boot {
			s.c.violation("%s: its worker is wanted to be fenced, and transfer %d has a lease open",
				s.n.addr, l.t.ID)
		}
	}
}

var (
	errModel = errors.New("sim: memory is modelled")
	errDied  = errors.New("the engine died")
)

// source is what lanes read.
type source struct {
	s      *sidecar
	l      *lease
	plan   *plan
	closed bool
}

func (s *source) Resolve(dst []mem.Block, _ transfer.Range) ([]mem.Block, error) {
	return dst, errModel
}

func (s *source) Bytes(r transfer.Range) (uint64, error) { return s.plan.space.Bytes(r) }

// Device implements transport.Memory.
func (s *source) Device() mem.Device { return nil }

// ReadWord implements simfabric.WordSource.
func (s *source) ReadWord(chunk uint32) uint64 {
	s.read(chunk)
	layer, i := s.plan.place(chunk)
	if t := s.l.t; t.ready[layer] {
		return t.word(layer, i, t.epoch)
	}
	return garbage
}

// sink is one part of a grant of a destination.
type sink struct {
	s      *sidecar
	l      *lease
	land   *exec.ReceivePart
	plan   *plan
	fenced bool
	full   bool
}

func (k *sink) Resolve(dst []mem.Block, _ transfer.Range) ([]mem.Block,
	error) {
	return dst, errModel
}

func (k *sink) Bytes(r transfer.Range) (uint64, error) { return k.plan.space.Bytes(r) }

// Device implements transport.Memory.
func (k *sink) Device() mem.Device { return nil }

// WriteWord implements simfabric.WordMemory.
func (k *sink) WriteWord(chunk uint32, w uint64) {
	k.write(chunk)
	layer, i := k.plan.place(chunk)
	k.l.content[k.l.at(layer, i)] = w
}

// perLayer is how many chunks a layer has.
func (t *Transfer) perLayer() uint32 {
	return (t.Tokens*unitBytes + transfer.ChunkBytes - 1) / transfer.ChunkBytes
}

// at is where a chunk of a layer lies in the blocks of a receiver's rank.
func (l *lease) at(layer int, i uint32) uint32 {
	return uint32(layer-held(l.rank, len(l.e.boots)).lo)*l.t.perLayer() + i
}

// watch counts the chunks that land, and reports now and then twice that all have.
func (k *sink) watch(g *transport.Grant) {
	landed := g.Landed
	g.Landed = func(l transport.Lane, r transfer.Range, fresh uint32) {
		if n, err := k.Bytes(r); err == nil {
			k.s.received[l.Peer()] += n
		}
		k.s.run(func() { landed(l, r, fresh) })
		if g.Receipt.Full() && !k.full {
			k.full = true
			k.s.twice(func() { k.s.event(func(now exec.Instant) { k.s.ex.Full(now, k.land) }) })
		}
	}
}
