package fake

import (
	"fmt"
	"net"
	"slices"
	"syscall"

	"github.com/kvspray/kvspray/internal/sys/verbs"
)

type completionQueue struct {
	f     *Fabric
	depth int
	q     []verbs.Completion
	ready chan struct{}
}

func (d *device) NewCompletionQueue(depth int) (verbs.CompletionQueue, error) {
	if m := d.Limits().MaxCompletions; depth < 1 || depth > m {
		return nil, fmt.Errorf("fake: completion queue of depth %d: 1 to %d", depth, m)
	}
	return &completionQueue{f: d.f, depth: depth, ready: make(chan struct{}, 1)}, nil
}

func (c *completionQueue) Ready() <-chan struct{} { return c.ready }

func (c *completionQueue) Close() error { return nil }

func (c *completionQueue) Poll(dst []verbs.Completion) (int, error) {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	n := copy(dst, c.q)
	c.q = append(c.q[:0], c.q[n:]...)
	if len(c.q) > c.depth {
		return n, fmt.Errorf("fake: completion queue overran its depth of %d: %w", c.depth, verbs.ErrFull)
	}
	return n, nil
}

func (c *completionQueue) addLocked(v verbs.Completion) {
	c.q = append(c.q, v)
	select {
	case c.ready <- struct{}{}:
	default:
	}
}

// message is a write on the wire: the sender's memory was read already.
type message struct {
	w    verbs.Work
	data []byte
	life uint32 // of the sender's connection
	to   uint32
	// life of the receiver's connection: in another one its sequence numbers are others
	expected uint32
}

// request is what a sender waits for.
type request struct {
	w      verbs.Work
	acked  bool
	status verbs.Status // where it is acked
}

// arrival is what a queue pair has taken in and its host does not see yet: bytes, or a completion.
type arrival struct {
	from       uint32
	at         uint64 // number of its message; 0: of none
	key        uint32
	addr       uint64
	to         []byte // what lies there; nil: this is a completion
	data       []byte
	lags       bool // its bytes come when something forces them
	completion verbs.Completion
}

func (a *arrival) overlaps(b *arrival) bool {
	return a.addr < b.addr+uint64(len(b.to)) && b.addr < a.addr+uint64(len(a.to))
}

type queuePair struct {
	f        *Fabric
	d        *device
	p        *domain
	cq       *completionQueue
	num      uint32
	life     uint32 // counts its connections
	dead     bool   // with its device
	refused  bool   // a request of its was: those behind it are not read, nor taken in
	state    verbs.State
	remote   uint32
	maxSend  int
	maxRecv  int
	sends    []verbs.Work       // posted, not read yet
	wire     []message          // read, not taken in yet; survives an error of its sender
	unacked  []request          // read, and the sender does not have its end
	answers  []verbs.Completion // of sends, that its host does not see yet
	inbound  []arrival          // in the order of arrival
	receives []uint64
}

// forgetLocked drops what is posted, and completions that the host has not polled.
func (q *queuePair) forgetLocked() {
	q.sends, q.unacked, q.answers, q.inbound, q.receives = nil, nil, nil, nil, nil
}

// showAllLocked puts the bytes of arrivals into memory at once.
func (q *queuePair) showAllLocked(which func(*arrival) bool) {
	q.inbound = slices.DeleteFunc(q.inbound, func(a arrival) bool {
		if a.to == nil || !which(&a) {
			return false
		}
		copy(a.to, a.data)
		return true
	})
}

func everything(*arrival) bool { return true }

func (p *domain) NewQueuePair(cq verbs.CompletionQueue, sends, receives int) (verbs.QueuePair,
	error) {
	d := p.d
	c, ok := cq.(*completionQueue)
	if !ok || c.f != d.f {
		return nil, fmt.Errorf("fake: queue pair: the completion queue is of another fabric")
	}
	f := d.f
	f.mu.Lock()
	defer f.mu.Unlock()
	own := 0
	for _, q := range f.qps {
		if q.d.name == d.name {
			own++
		}
	}
	if own >= f.limits.MaxQueuePairs {
		return nil, verbs.RefuseQueuePair(fmt.Errorf("fake: create a queue pair with %s: %w", d.name,
			syscall.ENOMEM), d.name, own, f.limits)
	}
	if m := f.limits.MaxWork; sends < 0 || sends > m || receives < 0 || receives > m {
		return nil, fmt.Errorf("fake: queue pair of %d sends and %d receives with %s: %w", sends,
			receives, d.name, verbs.ErrFull)
	}
	if d.dead {
		return nil, errRemoved
	}
	if p.closed {
		return nil, net.ErrClosed
	}
	f.next++
	q := &queuePair{f: f, d: d, p: p, cq: c, num: f.next, maxSend: sends, maxRecv: receives}
	f.qps[q.num] = q
	f.order = append(f.order, q)
	return q, nil
}

func (q *queuePair) Num() uint32 { return q.num }

func (q *queuePair) MaxInline() int {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	return q.f.inline
}

func (q *queuePair) Address() verbs.Address {
	return verbs.Address{GID: q.d.gid.Raw, QP: q.num, MTU: verbs.MTU4096, Type: q.d.gid.Type}
}

func (q *queuePair) State() verbs.State {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	return q.state
}

func (q *queuePair) move(to verbs.State, from ...verbs.State) error {
	for _, s := range from {
		if q.state == s {
			q.state = to
			return nil
		}
	}
	return fmt.Errorf("fake: queue pair %d: %s cannot follow %s: %w", q.num, to, q.state,
		verbs.ErrState)
}

func (q *queuePair) ToInit() error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	return q.move(verbs.Init, verbs.Reset)
}

func (q *queuePair) ToReadyToReceive(remote verbs.Address) error {
	if err := verbs.CheckPeer(q.Address(), remote); err != nil {
		return err
	}
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	if err := q.move(verbs.ReadyToReceive, verbs.Init); err != nil {
		return err
	}
	q.remote = remote.QP
	return nil
}

func (q *queuePair) ToReadyToSend() error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	return q.move(verbs.ReadyToSend, verbs.ReadyToReceive)
}

func (q *queuePair) ToError() error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	if q.dead {
		return errRemoved
	}
	if q.state == verbs.Reset {
		return fmt.Errorf("fake: queue pair %d: ERR cannot follow RESET: %w", q.num, verbs.ErrState)
	}
	q.failLocked()
	return nil
}

// failLocked flushes. Messages on the wire stay there: the network does not see the sender's
// state. A flush does not report whether messages without a completion have arrived.
func (q *queuePair) failLocked() {
	q.state = verbs.Error
	for i := range q.unacked {
		q.flushSendLocked(q.unacked[i].w.ID)
	}
	for i := range q.sends {
		q.flushSendLocked(q.sends[i].ID)
	}
	for _, id := range q.receives {
		q.flushReceiveLocked(id)
	}
	q.unacked, q.sends, q.receives = nil, nil, nil
	q.f.wakeLocked()
}

func (q *queuePair) flushSendLocked(id uint64) {
	q.answers = append(q.answers, verbs.Completion{ID: id, QP: q.num, Status: verbs.Flushed})
}

// flushReceiveLocked puts the flush behind the bytes of what was taken in.
func (q *queuePair) flushReceiveLocked(id uint64) {
	q.inbound = append(q.inbound, arrival{completion: verbs.Completion{ID: id, QP: q.num,
		Status: verbs.Flushed}})
}

func (q *queuePair) ToReset() error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	q.state, q.remote, q.refused = verbs.Reset, 0, false
	q.life++
	q.showAllLocked(everything)
	q.forgetLocked()
	return nil
}

func (q *queuePair) Close() error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	q.state = verbs.Reset
	q.showAllLocked(everything)
	q.forgetLocked()
	delete(q.f.qps, q.num)
	return nil
}

func (q *queuePair) PostSend(batch []verbs.Work) (taken int, err error) {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	switch {
	case q.dead:
		return 0, errRemoved
	case q.state == verbs.Error: // as hardware does: taken, and flushed at once
		for i := range batch {
			q.flushSendLocked(batch[i].ID)
		}
		q.f.wakeLocked()
		return len(batch), nil
	case q.state != verbs.ReadyToSend:
		return 0, fmt.Errorf("fake: queue pair %d: post send in %s: %w", q.num, q.state, verbs.ErrState)
	}
	for i := range batch {
		if w := &batch[i]; w.Len > q.f.limits.MaxMessage || w.Inline && int(w.Len) > q.f.inline {
			return 0, fmt.Errorf("fake: queue pair %d: a message of %d bytes (inline: %v): at most %d, "+
				"inline %d: %w", q.num, w.Len, w.Inline, q.f.limits.MaxMessage, q.f.inline, syscall.EINVAL)
		}
	}
	room := q.maxSend - len(q.sends) - len(q.unacked)
	if taken = min(len(batch), room); taken < len(batch) {
		err = fmt.Errorf("fake: queue pair %d: %d of %d sends taken: %w", q.num, taken, len(batch),
			verbs.ErrFull)
	}
	q.sends = append(q.sends, batch[:taken]...)
	q.f.wakeLocked()
	return taken, err
}

func (q *queuePair) PostReceive(ids []uint64) error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	switch {
	case q.dead:
		return errRemoved
	case q.state == verbs.Reset:
		return fmt.Errorf("fake: queue pair %d: post receive in %s: %w", q.num, q.state, verbs.ErrState)
	case q.state == verbs.Error:
		for _, id := range ids {
			q.flushReceiveLocked(id)
		}
		q.f.wakeLocked()
		return nil
	case len(q.receives)+len(ids) > q.maxRecv:
		return fmt.Errorf("fake: queue pair %d: %d receives of %d: %w", q.num, len(q.receives)+len(ids),
			q.maxRecv, verbs.ErrFull)
	}
	q.receives = append(q.receives, ids...)
	return nil
}
