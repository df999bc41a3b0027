package gdr

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

const (
	// one verdict per slice, and one that is always left to be flushed.
	receives    = maxInFlight + 1
	receiveMark = 1 << 63 // in the ids of receives
	batchWorks  = 64      // work requests posted by one call
	pollBatch   = 64
	readBuffer  = 64 << 10

	patienceToAsk = 5 // times Config.Silence that a slice may wait for a GO
)

// lane is one end of a queue pair and of the socket that goes with it.
type lane struct {
	b      *Backend
	rail   *rail
	dev    *openDevice
	domain *domain
	c      net.Conn
	q      verbs.QueuePair
	cq     verbs.CompletionQueue
	id     uint64
	peer   transfer.Boot
	remote string

	drained chan struct{} // closed when the queue pair touches no memory any more
	// closed when the follower has done all it can; if the queue pair is not drained by then, it is
	// stuck
	settled chan struct{}
	kick    chan struct{} // wakes the follower: something ended or failed without a completion
	asks    sync.WaitGroup
	frames  frameQueue

	mu sync.Mutex
	// guarded by mu
	err      error
	kept     bool // the device has not released the queue pair
	over     bool // end has returned
	activity activity
	src      source
	dst      destination
	stages   map[stageName]*stage
	// closed when the follower has polled completions again; made by the waiter
	looked chan struct{}

	trimming sync.Mutex // held while slabs are looked through

	// of the first work request that failed before this end stopped the queue pair; OK: none.
	// Written by the follower; end reads it after that.
	cause verbs.Status
}

// ring is a queue of slice ids.
type ring struct {
	ids     [maxInFlight]uint8
	head, n int
}

func (r *ring) push(id uint8) {
	r.ids[(r.head+r.n)%maxInFlight] = id
	r.n++
}
func (r *ring) first() uint8 { return r.ids[r.head] }
func (r *ring) pop() {
	r.head = (r.head + 1) % maxInFlight
	r.n--
}

var _ transport.Lane = (*lane)(nil)

// prepare makes an unconnected lane to a peer.
func (b *Backend) prepare(c net.Conn, r *rail, dev *openDevice, peer transfer.Boot) (_ *lane,
	err error) {
	if !dev.enter() {
		return nil, net.ErrClosed
	}
	var own *domain
	defer func() {
		if err == nil {
			return
		}
		if own != nil {
			dev.domains.leave(own)
		}
		dev.leave()
	}()
	if own, err = dev.domains.enter(peer); err != nil {
		return nil, fmt.Errorf("gdr: new lane: %w", err)
	}
	cq, err := dev.NewCompletionQueue(dev.sends + receives)
	if err != nil {
		return nil, fmt.Errorf("gdr: new lane: %w", err)
	}
	q, err := own.NewQueuePair(cq, dev.sends, receives)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("gdr: new lane: %w", err), cq.Close())
	}
	l := &lane{b: b, rail: r, dev: dev, domain: own, peer: peer, c: c, q: q, cq: cq,
		id:      transport.NextLaneID(),
		drained: make(chan struct{}), settled: make(chan struct{}), kick: make(chan struct{}, 1)}
	l.frames.wake = make(chan struct{}, 1)
	l.src.init(l, dev.sends)
	l.dst.init(l)
	return l, nil
}

func (l *lane) attach() []byte { return encodeAddress(l.q.Address(), l.rail.cfg.Name) }

// abandon ends a lane that did not come up.
func (l *lane) abandon() error {
	_ = l.c.Close()
	defer l.dev.leave()
	defer l.dev.domains.leave(l.domain)
	return errors.Join(l.q.Close(), l.cq.Close())
}

// connect connects the queue pair to the proved peer's.
func (l *lane) connect(o *wire.Opened) error {
	addr, rail, err := decodeAddress(o.Attach)
	if err != nil {
		return err
	}
	l.remote = rail
	if o.Peer != l.peer {
		return fmt.Errorf("gdr: the other end is boot %s, not boot %s", o.Peer, l.peer)
	}
	var ids [receives]uint64
	for i := range ids {
		ids[i] = receiveMark
	}
	l.dst.recvs, l.activity.progress = receives, time.Now()
	return errors.Join(l.q.ToInit(), l.q.ToReadyToReceive(addr), l.q.PostReceive(ids[:]),
		l.q.ToReadyToSend())
}

// start begins service. Both ends report on the socket that their receives are posted before either
// sends.
func (l *lane) start() error {
	ready := [1]byte{1}
	if _, err := l.c.Write(ready[:]); err != nil {
		return fmt.Errorf("gdr: ready: %w", err)
	}
	if _, err := io.ReadFull(l.c, ready[:]); err != nil {
		return fmt.Errorf("gdr: the peer's ready: %w", err)
	}
	if err := l.prove(); err != nil {
		return err
	}
	_ = l.c.SetDeadline(time.Time{})
	l.b.mu.Lock()
	if l.b.closed {
		l.b.mu.Unlock()
		return net.ErrClosed
	}
	l.b.lanes[l] = struct{}{}
	l.b.wg.Add(1)
	l.b.mu.Unlock()
	l.b.host.LaneUp(l)
	select {
	case <-l.dev.gone: // before the lane was in the list
		l.fail(errors.New("gdr: the device was lost"))
	default:
	}
	go l.run()
	return nil
}

// proof is the immediate of the first write in each direction. It is no verdict: its slice id does
// not exist.
const proof = 0xffffffff

// prove sends an empty write in each direction. A lane comes up only if the packets of both NICs
// arrive. Otherwise, on a path that is dead only for the NICs, the socket would bring up one lane
// after another, each ended by the NIC's timers with slices on it.
func (l *lane) prove() error {
	n, err := l.q.PostSend([]verbs.Work{{ID: 1, Op: verbs.WriteImm, Imm: proof, Signaled: true}})
	l.src.posted += uint64(n)
	if err != nil {
		return fmt.Errorf("gdr: proof of the path: %w", err)
	}
	late := time.NewTimer(l.b.cfg.Opening)
	defer late.Stop()
	var done [2]verbs.Completion
	for {
		n, err := l.cq.Poll(done[:])
		for _, c := range done[:n] {
			switch {
			case c.Status != verbs.OK:
				return fmt.Errorf("gdr: no path from rail %s to %s: %s (status %d)", l.rail.cfg.Name, l.remote,
					c.Status, c.Code)
			case c.ID&receiveMark == 0:
				l.src.done, l.src.good = c.ID, c.ID
			case c.Imm != proof:
				return fmt.Errorf("%w: %#x before the proof of the path", errFrame, c.Imm)
			default:
				l.dst.recvsDone++
			}
		}
		if err != nil {
			return fmt.Errorf("gdr: proof of the path: %w", err)
		}
		if l.src.done == 1 && l.dst.recvsDone == 1 {
			l.dst.oneID[0] = receiveMark
			l.dst.recvs++
			l.activity.progress = time.Now()
			return l.q.PostReceive(l.dst.oneID[:])
		}
		if n > 0 {
			continue
		}
		select {
		case <-l.cq.Ready():
		case <-l.dev.gone:
			return errors.New("gdr: the device was lost")
		case <-l.b.life.Done():
			return net.ErrClosed
		case <-late.C:
			return fmt.Errorf("gdr: no path from rail %s to %s: no answer within %s", l.rail.cfg.Name,
				l.remote, l.b.cfg.Opening)
		}
	}
}

// run owns the lane's goroutines, and ends it when they have ended.
func (l *lane) run() {
	defer l.b.wg.Done()
	var parts sync.WaitGroup
	over := make(chan struct{})
	parts.Go(func() { l.fail(l.read()) })
	parts.Go(func() { l.write(over) })
	parts.Go(l.dst.land)
	l.follow() // until the queue pair is drained, and the lane has failed
	close(l.dst.verdicts)
	close(over)
	parts.Wait()
	l.asks.Wait()
	l.end()
}

func (l *lane) ID() uint64          { return l.id }
func (l *lane) Peer() transfer.Boot { return l.peer }
func (l *lane) Backend() string     { return Name }
func (l *lane) Local() string       { return l.rail.cfg.Name }
func (l *lane) Remote() string      { return l.remote }
func (l *lane) MaxInFlight() int    { return maxInFlight }

// Close implements transport.Lane.
func (l *lane) Close() error {
	l.fail(net.ErrClosed)
	return nil
}

// fail ends the lane: it closes the socket, and the follower moves the queue pair to the error
// state.
func (l *lane) fail(err error) {
	l.mu.Lock()
	l.failLocked(err)
	l.mu.Unlock()
}

func (l *lane) failLocked(err error) {
	if l.err == nil {
		l.err = err
	}
	_ = l.c.Close()
	l.wake()
}

func (l *lane) wake() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

func (l *lane) failure() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// halt stops the lane for a later attempt.
func (l *lane) halt() bool {
	l.fail(fmt.Errorf("gdr: a later attempt takes over the slices of lane %d: %w", l.id,
		net.ErrClosed))
	ctx, cancel := context.WithTimeout(context.Background(), 2*l.b.cfg.Drain)
	defer cancel()
	if l.stopped(ctx) {
		return true
	}
	if err := l.dst.invalidate(nil); err != nil {
		l.b.cfg.Log.Warn("queue pair not drained, nor its keys invalidated", "transport", Name, "lane",
			l.id, "rail", l.rail.cfg.Name, "err", err)
		return false
	}
	return true
}

// stopped reports, after the lane has failed, whether its queue pair touches no memory any more.
func (l *lane) stopped(ctx context.Context) bool {
	select {
	case <-l.settled:
	case <-ctx.Done():
	}
	return l.isDrained()
}

// end releases everything and reports. The lane's goroutines have ended.
func (l *lane) end() {
	l.mu.Lock()
	err := l.err
	l.blameLocked(err)
	var res []transport.Result
	for i := range l.src.out {
		s := &l.src.out[i]
		if s.state == idle {
			continue
		}
		r := transport.Result{Slice: s.s, Outcome: transfer.NotLanded, Reason: transfer.ReasonLaneLost,
			Took: time.Since(s.at),
			Err:  fmt.Errorf("gdr: lane %d to boot %s: %w", l.id, l.peer, errors.Join(net.ErrClosed, err))}
		if s.state >= flight {
			r.Outcome = transfer.InDoubt // its bytes may have been written
		}
		s.state = idle
		res = append(res, r)
	}
	kept := l.kept
	l.mu.Unlock()
	if l.isDrained() {
		l.releaseSlices()
	}
	if len(res) > 0 {
		l.b.host.Done(l, res)
	}
	if kept {
		l.dev.keep(1) // the lane stays in the list for fences
	} else {
		l.b.mu.Lock()
		delete(l.b.lanes, l)
		l.b.mu.Unlock()
	}
	l.b.host.LaneDown(l, err)
	l.trimStages(time.Time{}, true) // after the reports: the device may block
	l.dev.leave()
	l.mu.Lock()
	l.over = true
	l.mu.Unlock()
}

// blameLocked leaves the direct way of the slices with which the lane died, if this end's NIC may
// have failed to read or write their memory. If it did not, a trial shows that soon. Nothing is
// blamed for a lane that a peer's fence, restart or lost path has ended.
func (l *lane) blameLocked(err error) {
	if errors.Is(err, net.ErrClosed) {
		return // this end stopped it
	}
	// Broken may be a failed read, too. Remote access concerns the peer's memory.
	read := l.cause == verbs.LocalAccess || l.cause == verbs.Broken
	// Without a failed request of its own, a NIC flushes a queue pair when it refuses a write. If the
	// socket ends before that is seen, the next lane shows it.
	written := l.cause == verbs.Flushed
	for i := range maxInFlight {
		if s := &l.src.out[i]; read && s.state == flight && s.trip.way == direct {
			s.trip.fault(err)
		}
		if r := &l.dst.in[i]; written && r.state == armed && r.trip.way == direct {
			r.trip.fault(err)
		}
	}
}

// again posts a receive in place of a used one.
func (dst *destination) again() {
	dst.l.mu.Lock()
	defer dst.l.mu.Unlock()
	if dst.l.err != nil {
		return
	}
	dst.oneID[0] = receiveMark
	if err := dst.l.q.PostReceive(dst.oneID[:]); err != nil {
		dst.l.failLocked(fmt.Errorf("gdr: lane %d: %w", dst.l.id, err))
		return
	}
	dst.recvs++
}

func (dst *destination) changedLocked() {
	if dst.change != nil {
		close(dst.change)
		dst.change = nil
	}
}
