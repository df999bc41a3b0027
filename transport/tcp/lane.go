package tcp

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// lane is one connection.
//
// The goroutine that sets `writing` owns the write side (tx) until it clears it or passes it on to
// the writer through wake: Move, the stager and the reader use it for what fits in the socket at
// once, the writer for everything that has to wait.
type lane struct {
	b             *Backend
	id            uint64
	peer          transfer.Boot
	local, remote string
	crc           bool // payloads carry checksums, and need them
	conn          *net.TCPConn
	raw           syscall.RawConn

	wake   chan struct{} // passes the write side to the writer; capacity 1
	dead   chan struct{} // closed by fail
	rdDone chan struct{} // closed when the reader is gone

	tx sender   // owned through writing
	rx receiver // the reader's

	stage stager // slices of device memory, on their way to the queue
	land  lander // frames of device memory, on their way into place

	mu       sync.Mutex // protects all below
	writing  bool
	err      error // why the lane ended; nil while it lives
	queue    ring  // accepted, not begun
	flight   ring  // begun, not confirmed; in the order of their frames
	taken    int   // accepted and not ended: in queue, in flight, or on the way to Done
	confirms []wire.Entry
	acked    uint64 // bytes; the last result of Acked
}

var (
	_ transport.Meter = (*lane)(nil)
	_ transport.Timed = (*lane)(nil)
)

// entry is one slice on its way.
type entry struct {
	transport.Slice
	began time.Time
	seq   uint32
	sent  bool // all of it is written, or about to be: it may be confirmed
	// Why this end gave it up: before its frame began, or in mid frame, which then still goes out,
	// invalidated.
	why transfer.Reason
	err error

	// Of device memory: the payload, gathered before its frame begins. nil: none was to be lent, or
	// the memory is the host's.
	buf []byte
	dev mem.Device
	sum uint32
}

// ring is a bounded queue of entries.
type ring struct {
	slot []entry
	head int
	n    int
}

func (r *ring) push(e entry) {
	r.slot[(r.head+r.n)%len(r.slot)] = e
	r.n++
}

func (r *ring) first() *entry { return &r.slot[r.head] }

func (r *ring) last() *entry { return &r.slot[(r.head+r.n-1)%len(r.slot)] }

// drop takes the last entry back.
func (r *ring) drop() {
	*r.last() = entry{}
	r.n--
}

func (r *ring) pop() entry {
	e := r.slot[r.head]
	r.slot[r.head] = entry{}
	r.head = (r.head + 1) % len(r.slot)
	r.n--
	return e
}

func newLane(b *Backend, c *net.TCPConn, peer transfer.Boot, local, remote string,
	a agreed) (*lane, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("tcp: lane: %w", err)
	}
	if err := tune(c, raw, &b.cfg); err != nil {
		return nil, fmt.Errorf("tcp: lane: socket options: %w", err)
	}
	n := b.cfg.MaxInFlight
	l := &lane{b: b, id: transport.NextLaneID(), peer: peer, local: local, remote: remote, crc: a.crc,
		conn: c, raw: raw,
		wake: make(chan struct{}, 1), dead: make(chan struct{}), rdDone: make(chan struct{}),
		queue: ring{slot: make([]entry, n)}, flight: ring{slot: make([]entry, n)},
		confirms: make([]wire.Entry, 0, wire.MaxConfirms)}
	l.tx.init(l)
	l.rx.init(l)
	l.stage.init(l)
	l.land.init(l)
	if a.aead {
		if err := l.sealWith(&a); err != nil {
			return nil, fmt.Errorf("tcp: lane: %w", err)
		}
	}
	return l, nil
}

func (l *lane) ID() uint64          { return l.id }
func (l *lane) Peer() transfer.Boot { return l.peer }
func (l *lane) Backend() string     { return Name }
func (l *lane) Local() string       { return l.local }
func (l *lane) Remote() string      { return l.remote }

// RTT is the shortest round-trip time that the kernel has measured. For a new lane it is that of
// the handshake.
func (l *lane) RTT() (d time.Duration) {
	_ = l.raw.Control(func(fd uintptr) { // a lane that is closed has none
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			d = time.Duration(info.Min_rtt) * time.Microsecond
		}
	})
	return d
}

// Acked returns the bytes that the other end's kernel has acknowledged. If the process there is
// frozen, its kernel still fills the receive buffer, and then acknowledges nothing more.
func (l *lane) Acked() uint64 {
	var n uint64
	err := l.raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			n = info.Bytes_acked
		}
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil {
		l.acked = max(l.acked, n)
	}
	return l.acked
}

func (l *lane) MaxInFlight() int { return l.b.cfg.MaxInFlight }

// inlineBytes bounds what Move, the stager and the reader write themselves: below it a system call
// is cheaper than waking the writer.
const inlineBytes = transfer.ChunkBytes

// Move hands over slices.
func (l *lane) Move(batch []transport.Slice) error {
	if len(batch) == 0 {
		return nil
	}
	for i := range batch {
		s := &batch[i]
		if s.Origin == nil || s.Range.Count == 0 || s.Range.Count > transfer.MaxSlotChunks ||
			s.Range.First > transfer.MaxSlotChunks-s.Range.Count {
			return fmt.Errorf("tcp: move: slice %d: chunks %d+%d of no origin or outside a slot", i,
				s.Range.First, s.Range.Count)
		}
	}
	now := time.Now()
	l.mu.Lock()
	switch {
	case l.err != nil:
		err := l.err
		l.mu.Unlock()
		return fmt.Errorf("tcp: move: lane %d is down: %w", l.id, closedErr(err))
	case l.taken+len(batch) > len(l.queue.slot):
		n := l.taken
		l.mu.Unlock()
		return fmt.Errorf("tcp: move: %d slices to lane %d, which has %d of %d", len(batch), l.id, n,
			l.b.cfg.MaxInFlight)
	}
	ready := 0
	for _, s := range batch {
		if dev := s.Origin.Memory.Device(); dev != nil {
			l.stage.putLocked(entry{Slice: s, began: now, dev: dev})
			continue
		}
		l.queue.push(entry{Slice: s, began: now})
		ready++
	}
	l.taken += len(batch)
	mine := ready > 0 && !l.writing
	l.writing = l.writing || mine
	l.mu.Unlock()
	switch {
	case !mine: // the goroutine that writes takes them too, or the stager hands them on
	case len(batch) == 1 && batch[0].Range.Count == 1:
		l.pump(true)
	default:
		l.wake <- struct{}{}
	}
	return nil
}

// Close ends the lane.
func (l *lane) Close() error {
	l.fail(net.ErrClosed)
	return nil
}

// fail ends the lane for a reason, once. It takes no lock but the lane's own and does not wait.
func (l *lane) fail(err error) {
	l.mu.Lock()
	first := l.err == nil
	if first {
		l.err = err
	}
	l.mu.Unlock()
	if first {
		close(l.dead)
		_ = l.conn.Close()
	}
}

func (l *lane) failed() bool {
	select {
	case <-l.dead:
		return true
	default:
		return false
	}
}

// closedErr makes errors.Is(err, net.ErrClosed) true for everything that a dead lane returns.
func closedErr(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return err
	}
	return fmt.Errorf("%w: %w", net.ErrClosed, err)
}

// writeLoop is the writer: it waits until the write side is passed to it, and it ends the lane.
func (l *lane) writeLoop() {
	defer l.b.wg.Done()
	own := false
	for !l.failed() {
		select {
		case <-l.wake:
			own = !l.pump(false)
		case <-l.dead:
		}
	}
	// Another goroutine that writes now passes the write side on when it is done, because the lane has
	// failed.
	l.mu.Lock()
	held := l.writing && !own
	l.writing = true
	l.mu.Unlock()
	if held {
		<-l.wake
	}
	<-l.rdDone
	l.stage.wait()
	l.finish()
}

// finish ends every slice that is left. Runs once, alone: the reader is gone and the write side is
// ours for good.
func (l *lane) finish() {
	res := l.tx.results
	l.mu.Lock()
	err := closedErr(l.err)
	end := func(r *ring, outcome transfer.Outcome) {
		for r.n > 0 {
			e := r.pop()
			l.stage.releaseBuffer(&e)
			res = append(res, transport.Result{Slice: e.Slice, Outcome: outcome,
				Reason: transfer.ReasonLaneLost,
				Err:    fmt.Errorf("tcp: lane %d to %s: %w", l.id, l.peer, err), Took: time.Since(e.began)})
		}
	}
	// Begun: bytes of it may be in a socket, or landed without our knowing. Not begun: nothing of it
	// left.
	end(&l.flight, transfer.InDoubt)
	end(&l.queue, transfer.NotLanded)
	l.taken = 0
	cause := l.err
	l.mu.Unlock()
	l.tx.release()
	if len(res) > 0 {
		l.b.host.Done(l, res)
	}
	l.b.drop(l)
	l.b.host.LaneDown(l, cause)
}
