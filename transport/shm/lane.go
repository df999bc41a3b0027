package shm

import (
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// lane is one end of a connection. It is the source of the slices of its own Move, and the
// destination of arriving pulls.
type lane struct {
	b      *Backend
	c      *net.UnixConn
	out    *outbox
	id     uint64
	peer   transfer.Boot
	remote string

	done chan struct{} // closed first at the end; the writer leaves

	src   source
	dst   destination
	hints hints
}

var _ transport.WakeHinter = (*lane)(nil)

func (b *Backend) newLane(c *net.UnixConn, o *wire.Opened, peer transfer.Boot,
	remote string) (*lane, error) {
	_ = c.SetDeadline(time.Time{})
	out, err := newOutbox(c)
	if err != nil {
		return nil, fmt.Errorf("shm: new lane: %w", err)
	}
	l := &lane{b: b, c: c, out: out, id: transport.NextLaneID(), peer: peer, remote: remote,
		done: make(chan struct{})}
	l.src.init(l)
	l.dst.init(l)
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return nil, net.ErrClosed
	}
	b.lanes[l] = struct{}{}
	b.wg.Add(2)
	b.mu.Unlock()
	l.src.start(b.cfg.askers())
	b.host.LaneUp(l)
	writerGone := make(chan struct{})
	go func() {
		defer b.wg.Done()
		defer close(writerGone)
		l.write()
	}()
	go func() {
		defer b.wg.Done()
		err := l.read()
		l.end(err, writerGone)
	}()
	return l, nil
}

func (l *lane) ID() uint64          { return l.id }
func (l *lane) Peer() transfer.Boot { return l.peer }
func (l *lane) Backend() string     { return Name }
func (l *lane) Local() string       { return Name }
func (l *lane) Remote() string      { return l.remote }
func (l *lane) MaxInFlight() int    { return maxInFlight }

func (l *lane) Close() error {
	l.close(net.ErrClosed)
	return nil
}

// close starts the end; the reader finishes it.
func (l *lane) close(err error) {
	l.src.fail(err)
	l.out.fail(err)
	// Shut down first: the connection's own Close would wait for a send in progress.
	if rc := l.out.rc; rc != nil {
		_ = rc.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	}
}

// Move implements transport.Lane.
func (l *lane) Move(batch []transport.Slice) error { return l.src.move(batch) }

// WakeHint implements transport.WakeHinter.
func (l *lane) WakeHint() {
	// a peer with packets to read is awake, and the hint would be late
	if l.out.waits() {
		return
	}
	var buf [frameHeader]byte
	l.out.put(appendHint(buf[:0]), -1)
	l.out.kick()
}

// write is the writer: it continues after a full socket or a lack of pulls.
func (l *lane) write() {
	var results []transport.Result
	a := asker{resumes: true}
	for {
		select {
		case <-l.done:
			return
		case <-l.out.wake:
		}
		l.out.resume()
		l.src.unstall(&a)
		if results = l.src.takeLate(results); len(results) > 0 {
			l.b.host.Done(l, results)
			clear(results)
		}
	}
}

// read is the reader: it handles packets until the lane ends.
func (l *lane) read() error {
	in := newInbox(l.out.rc, &l.b.polling, l.b.cfg.pollers)
	for {
		packet, oob, flags, err := in.next()
		if err != nil {
			return fmt.Errorf("shm: lane %d: receive: %w", l.id, err)
		}
		if len(oob) > 0 {
			if l.dst.fds, err = rights(oob); err != nil {
				return fmt.Errorf("shm: lane %d: descriptors: %w", l.id, err)
			}
		}
		if len(packet) == 0 {
			return fmt.Errorf("shm: lane %d: %w", l.id, io.EOF)
		}
		if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
			err = fmt.Errorf("%w: a packet was cut", errFrame)
		} else {
			err = parse(packet, l)
		}
		l.dst.closeFDs()
		l.out.kick()
		l.src.report()
		if err != nil {
			return fmt.Errorf("shm: lane %d: %w", l.id, err)
		}
		if l.hints.asked || l.hints.hinted {
			l.stayAwake(in, time.Now())
		}
		l.hints.hinted, l.hints.asked, l.hints.handed = false, false, false
	}
}

func rights(oob []byte) ([]int, error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var fds []int
	for i := range msgs {
		if got, err := unix.ParseUnixRights(&msgs[i]); err == nil {
			fds = append(fds, got...)
		}
	}
	return fds, nil
}

// end finishes the lane on the reader's goroutine: everything that it held ends, then Host.LaneDown
// is called.
func (l *lane) end(err error, writerGone <-chan struct{}) {
	err = l.src.stop(err)
	l.out.fail(err)
	_ = l.c.Close()
	close(l.done)
	<-writerGone
	l.dst.end()
	lost := fmt.Errorf("shm: lane %d to boot %s: %w", l.id, l.peer, errors.Join(net.ErrClosed, err))
	if results := l.src.end(lost); len(results) > 0 {
		l.b.host.Done(l, results)
	}
	l.b.mu.Lock()
	delete(l.b.lanes, l)
	l.b.mu.Unlock()
	l.b.host.LaneDown(l, err)
}

// The frames of a packet.

func (l *lane) region(f regionFrame) error           { return l.dst.region(f) }
func (l *lane) device(f deviceFrame) error           { return l.dst.device(f) }
func (l *lane) forget(index uint32) error            { return l.dst.forget(index) }
func (l *lane) pull(f pullFrame) error               { l.hints.asked = true; return l.dst.pull(f) }
func (l *lane) push(f pullFrame) error               { l.hints.asked = true; return l.dst.push(f) }
func (l *lane) hint() error                          { l.hints.hinted = true; return nil }
func (l *lane) verdict(tag uint64, valid bool) error { return l.dst.verdict(tag, valid) }
func (l *lane) pulled(tag uint64, reason transfer.Reason) error {
	return l.src.pulled(tag, reason)
}
func (l *lane) confirm(tag uint64, o transfer.Outcome, reason transfer.Reason) error {
	return l.src.confirm(tag, o, reason)
}
