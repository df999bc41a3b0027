package gdr

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/verbs"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

const (
	receives    = maxInFlight + 1 // one verdict for each slice, and one that is always there to be flushed
	receiveMark = 1 << 63         // in the ids of receives
	batchWorks  = 64              // work requests posted by one call
	pollBatch   = 64
	readBuffer  = 64 << 10

	patienceToAsk = 5 // times Config.Silence that a slice may wait for leave to write
)

// lane is one end of a queue pair and of the socket that goes with it.
type lane struct {
	b      *Backend
	rail   *rail
	dev    *openDevice
	c      net.Conn
	q      verbs.QueuePair
	cq     verbs.CompletionQueue
	id     uint64
	peer   transfer.Boot
	remote string
	depth  uint64 // of the send queue, less what verdicts need
	most   uint64 // bytes of one write

	drained  chan struct{} // closed when the queue pair touches no memory any more
	kick     chan struct{} // for the follower: something ended or failed without a completion
	verdicts chan uint32   // from the follower to the lander; has room for every receive
	asks     sync.WaitGroup

	outMu   sync.Mutex // below mu
	outBuf  []byte     // guarded by outMu
	outWake chan struct{}

	mu sync.Mutex
	// guarded by mu
	err       error
	stuck     bool // ended, but never drained
	seq       uint16
	out       [maxInFlight]sending
	in        [maxInFlight]receiving
	going     ring // slices with writes to post
	flying    ring // slices whose writes are all posted
	posted    uint64
	done      uint64 // requests that have ended: all up to this one
	good      uint64 // and have ended well
	recvs     uint64 // receives posted
	recvsDone uint64
	progress  time.Time
	change    chan struct{} // closed when a claim ends; made by who waits
	works     [batchWorks]verbs.Work
	one       [1]verbs.Work
	oneID     [1]uint64
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

// prepare makes a lane that is not connected.
func (b *Backend) prepare(c net.Conn, r *rail, dev *openDevice) (_ *lane, err error) {
	if !dev.enter() {
		return nil, net.ErrClosed
	}
	defer func() {
		if err != nil {
			dev.leave()
		}
	}()
	lim := dev.Limits()
	sends := min(maxSends, lim.MaxWork, lim.MaxCompletions-receives)
	if sends < 2*maxInFlight || lim.MaxWork < receives {
		return nil, fmt.Errorf("gdr: %s allows %d work requests and %d completions: %d and %d are needed at least: %w", dev.Name(), lim.MaxWork,
			lim.MaxCompletions, 2*maxInFlight, 2*maxInFlight+receives, transport.ErrNotSupported)
	}
	cq, err := dev.NewCompletionQueue(sends + receives)
	if err != nil {
		return nil, fmt.Errorf("gdr: new lane: %w", err)
	}
	q, err := dev.NewQueuePair(cq, sends, receives)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("gdr: new lane: %w", err), cq.Close())
	}
	l := &lane{b: b, rail: r, dev: dev, c: c, q: q, cq: cq, id: transport.NextLaneID(), depth: uint64(sends - maxInFlight), most: uint64(max(lim.MaxMessage, 1)),
		drained: make(chan struct{}), kick: make(chan struct{}, 1), verdicts: make(chan uint32, receives), outWake: make(chan struct{}, 1)}
	for i := range l.in {
		l.in[i].l = l
	}
	return l, nil
}

func (l *lane) attach() []byte { return encodeAddress(l.q.Address(), l.rail.cfg.Name) }

// abandon ends a lane that was never up.
func (l *lane) abandon() error {
	_ = l.c.Close()
	defer l.dev.leave()
	return errors.Join(l.q.Close(), l.cq.Close())
}

// connect makes the queue pair ready for the proved peer's.
func (l *lane) connect(o *wire.Opened) error {
	addr, rail, err := decodeAddress(o.Attach)
	if err != nil {
		return err
	}
	l.remote, l.peer = rail, o.Peer
	var ids [receives]uint64
	for i := range ids {
		ids[i] = receiveMark
	}
	l.recvs, l.progress = receives, time.Now()
	return errors.Join(l.q.ToInit(), l.q.ToReadyToReceive(addr), l.q.PostReceive(ids[:]), l.q.ToReadyToSend())
}

// start begins service. Both ends say on the socket that their receives are posted before either sends.
func (l *lane) start(o *wire.Opened) error {
	ready := [1]byte{1}
	if _, err := l.c.Write(ready[:]); err != nil {
		return fmt.Errorf("gdr: ready: %w", err)
	}
	if _, err := io.ReadFull(l.c, ready[:]); err != nil {
		return fmt.Errorf("gdr: the peer's ready: %w", err)
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
	case <-l.dev.gone: // while we were not in the list yet
		l.fail(errors.New("gdr: the device was lost"))
	default:
	}
	go l.run()
	return nil
}

// run owns the lane's goroutines, and ends it when they have ended.
func (l *lane) run() {
	defer l.b.wg.Done()
	var parts sync.WaitGroup
	over := make(chan struct{})
	parts.Go(func() { l.fail(l.read()) })
	parts.Go(func() { l.write(over) })
	parts.Go(l.land)
	l.follow() // until the queue pair is drained, and the lane has failed
	close(l.verdicts)
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

// fail ends the lane: its queue pair goes to the error state, which flushes it, and its socket is closed.
func (l *lane) fail(err error) {
	l.mu.Lock()
	l.failLocked(err)
	l.mu.Unlock()
}

func (l *lane) failLocked(err error) {
	if l.err == nil {
		l.err = err
		if err := l.q.ToError(); err != nil && !errors.Is(err, net.ErrClosed) {
			l.b.cfg.Log.Warn("queue pair does not take the error state", "transport", Name, "lane", l.id, "rail", l.rail.cfg.Name, "err", err)
		}
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
	l.fail(fmt.Errorf("gdr: a later attempt takes over what lane %d had under way: %w", l.id, net.ErrClosed))
	ctx, cancel := context.WithTimeout(context.Background(), 2*drainTimeout)
	defer cancel()
	return l.stopped(ctx)
}

// stopped reports, once the lane was failed, whether its queue pair touches no memory any more.
func (l *lane) stopped(ctx context.Context) bool {
	select {
	case <-l.drained:
		return true
	case <-ctx.Done():
		return false
	}
}

// follow takes completions until the lane has failed and everything that was posted has ended. A device that does not flush
// is made to forget the queue pair; one that does not even do that leaves the lane stuck, with what it holds.
func (l *lane) follow() {
	buf := make([]verbs.Completion, pollBatch)
	var flush <-chan time.Time
	for {
		n, err := l.cq.Poll(buf)
		if err != nil {
			l.fail(fmt.Errorf("gdr: lane %d: %w", l.id, err))
			n = 0
		}
		ended, failed := l.completed(buf[:n])
		if failed && ended {
			break
		}
		if failed && flush == nil {
			flush = time.After(drainTimeout)
		}
		if n > 0 {
			continue
		}
		select {
		case <-l.cq.Ready():
			continue
		case <-l.kick:
			continue
		case <-flush:
		}
		break
	}
	err := l.q.Close()
	if err == nil || l.everythingEnded() {
		close(l.drained)
	} else {
		l.mu.Lock()
		l.stuck = true
		l.mu.Unlock()
	}
	if cerr := l.cq.Close(); err != nil || cerr != nil {
		l.b.cfg.Log.Warn("queue pair not given back", "transport", Name, "lane", l.id, "rail", l.rail.cfg.Name, "err", errors.Join(err, cerr))
	}
}

func (l *lane) everythingEnded() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.done == l.posted && l.recvs == l.recvsDone
}

// completed takes completions and does what they allow. ended: nothing that was posted is still open.
func (l *lane) completed(batch []verbs.Completion) (ended, failed bool) {
	l.mu.Lock()
	for i := range batch {
		c := &batch[i]
		receive := c.ID&receiveMark != 0
		switch {
		case receive:
			l.recvsDone++
			if c.Status != verbs.OK {
				break
			}
			l.verdicts <- c.Imm // has room: the lander posts the next receive
		case c.Status == verbs.OK:
			l.done = max(l.done, c.ID)
			l.good = max(l.good, c.ID)
		default:
			l.done = max(l.done, c.ID)
		}
		if c.Status != verbs.OK && c.Status != verbs.Flushed {
			l.failLocked(fmt.Errorf("gdr: lane %d from rail %s to %s: work request: %s (status %d)", l.id, l.rail.cfg.Name, l.remote, c.Status, c.Code))
		} else if c.Status == verbs.Flushed && l.err == nil {
			l.failLocked(fmt.Errorf("gdr: lane %d from rail %s to %s: the queue pair was flushed", l.id, l.rail.cfg.Name, l.remote))
		}
	}
	if len(batch) > 0 {
		l.progress = time.Now()
	}
	l.pumpLocked()
	l.mu.Unlock()
	l.judge()
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.done == l.posted && l.recvs == l.recvsDone, l.err != nil
}

// checkProgress gives up a lane on which writes are posted and nothing comes. A slice that only waits for a word of the peer
// writes nothing, and may wait there for a registration or for another lane.
func (l *lane) checkProgress(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil || now.Sub(l.progress) < l.b.cfg.Silence {
		return
	}
	for i := range l.out {
		s := &l.out[i]
		limit := l.b.cfg.Silence
		if s.state < flight {
			limit *= patienceToAsk
		}
		if s.state != idle && now.Sub(s.at) > limit {
			l.failLocked(fmt.Errorf("gdr: lane %d from rail %s to %s: no progress for %s", l.id, l.rail.cfg.Name, l.remote, now.Sub(l.progress).Round(time.Millisecond)))
			return
		}
	}
}

// say queues a frame for the socket.
func (l *lane) say(h *head, spans []span) {
	h.spans = uint32(len(spans))
	l.outMu.Lock()
	l.outBuf = appendHead(l.outBuf, h)
	for _, s := range spans {
		l.outBuf = appendSpan(l.outBuf, s)
	}
	l.outMu.Unlock()
	select {
	case l.outWake <- struct{}{}:
	default:
	}
}

// write sends what say has queued. Its bound: the ids that both ends have under way, with their spans.
func (l *lane) write(over <-chan struct{}) {
	var buf []byte
	for {
		l.outMu.Lock()
		buf, l.outBuf = l.outBuf, buf[:0]
		l.outMu.Unlock()
		if len(buf) > 0 {
			if _, err := l.c.Write(buf); err != nil {
				l.fail(fmt.Errorf("gdr: lane %d: %w", l.id, err))
			}
			continue
		}
		select {
		case <-l.outWake:
		case <-over:
			return
		}
	}
}

// end gives everything back and reports. The lane's goroutines have ended.
func (l *lane) end() {
	l.mu.Lock()
	err := l.err
	var res []transport.Result
	for i := range l.out {
		s := &l.out[i]
		if s.state == idle {
			continue
		}
		r := transport.Result{Slice: s.s, Outcome: transfer.NotLanded, Reason: transfer.ReasonLaneLost, Took: time.Since(s.at),
			Err: fmt.Errorf("gdr: lane %d to boot %s: %w", l.id, l.peer, errors.Join(net.ErrClosed, err))}
		if s.state >= flight {
			r.Outcome = transfer.InDoubt // its bytes may be anywhere
		}
		if !l.stuck {
			s.release(l.b)
		}
		s.state = idle
		res = append(res, r)
	}
	stuck := l.stuck
	l.mu.Unlock()
	if !stuck {
		for i := range l.in {
			l.in[i].release()
		}
		l.mu.Lock()
		for i := range l.in {
			l.in[i].state, l.in[i].g = idle, nil
		}
		l.changedLocked()
		l.mu.Unlock()
		l.dev.leave() // a stuck lane keeps its device
	}
	if len(res) > 0 {
		l.b.host.Done(l, res)
	}
	l.b.mu.Lock()
	if !stuck {
		delete(l.b.lanes, l) // a stuck one stays for fences to find
	}
	l.b.mu.Unlock()
	l.b.host.LaneDown(l, err)
}

// again posts a receive in the place of one that was used.
func (l *lane) again() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return
	}
	l.oneID[0] = receiveMark
	if err := l.q.PostReceive(l.oneID[:]); err != nil {
		l.failLocked(fmt.Errorf("gdr: lane %d: %w", l.id, err))
		return
	}
	l.recvs++
}

func (l *lane) changedLocked() {
	if l.change != nil {
		close(l.change)
		l.change = nil
	}
}
