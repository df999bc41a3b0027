package shm

import (
	"errors"
	"net"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// outbox sends a lane's frames. A caller that queues frames tries to send them itself, without
// blocking; if the socket is full the lane's writer goroutine continues. In the common case a frame
// needs no hand-over between goroutines, and no caller blocks.
type outbox struct {
	rc   syscall.RawConn
	wake chan struct{} // capacity 1: the writer has work

	// Owned by the flusher, for sendOn: a closure would be allocated for each packet.
	fn    func(fd uintptr) bool // sendOn, made once
	now   *packet
	oob   []byte
	block bool
	sent  error

	mu sync.Mutex
	// guarded by mu
	q        []*packet // oldest first; bounded by the pulls in flight, and a wake-up hint
	free     []*packet
	flushing bool // some goroutine sends, or the writer was woken for it
	handed   bool // the writer becomes the flusher at its next wake-up
	err      error
}

// maxFreePackets bounds the recycled packets of a lane.
const maxFreePackets = 4

type packet struct {
	b   []byte
	fds []int // closed once sent
}

func newOutbox(c *net.UnixConn) (*outbox, error) {
	rc, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	o := &outbox{rc: rc, wake: make(chan struct{}, 1)}
	o.fn = o.sendOn
	return o, nil
}

// put queues one whole frame, and takes ownership of fd unless it is negative.
func (o *outbox) put(frame []byte, fd int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err != nil {
		closeFD(fd)
		return
	}
	var p *packet
	if n := len(o.q); n > 0 && len(o.q[n-1].b)+len(frame) <= maxPacketBytes &&
		(fd < 0 || len(o.q[n-1].fds) < maxPacketFDs) {
		p = o.q[n-1]
	} else {
		if n := len(o.free); n > 0 {
			p, o.free = o.free[n-1], o.free[:n-1]
		} else {
			p = &packet{b: make([]byte, 0, 4096)}
		}
		o.q = append(o.q, p)
	}
	p.b = append(p.b, frame...)
	if fd >= 0 {
		p.fds = append(p.fds, fd)
	}
}

// waits reports whether something is queued.
func (o *outbox) waits() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.q) > 0
}

// kick sends queued frames until the socket is full.
func (o *outbox) kick() {
	o.mu.Lock()
	if o.flushing || len(o.q) == 0 || o.err != nil {
		o.mu.Unlock()
		return
	}
	o.flushing = true
	o.mu.Unlock()
	if !o.drain(false) {
		o.mu.Lock()
		o.handed = true
		o.mu.Unlock()
		o.wakeUp()
	}
}

func (o *outbox) wakeUp() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// resume is the writer's: it continues after kick, and may block.
func (o *outbox) resume() {
	o.mu.Lock()
	handed := o.handed
	o.handed = false
	o.mu.Unlock()
	if handed {
		o.drain(true)
	}
}

// drain sends until the queue is empty (true) or, unless it may block, the socket is full (false).
// The caller is the flusher.
func (o *outbox) drain(block bool) bool {
	for {
		o.mu.Lock()
		if len(o.q) == 0 || o.err != nil {
			o.flushing = false
			o.mu.Unlock()
			return true
		}
		p := o.q[0]
		copy(o.q, o.q[1:])
		o.q[len(o.q)-1] = nil
		o.q = o.q[:len(o.q)-1]
		o.mu.Unlock()

		err := o.send(p, block)
		if errors.Is(err, unix.EAGAIN) {
			o.mu.Lock()
			o.q = append(o.q, nil)
			copy(o.q[1:], o.q)
			o.q[0] = p
			o.mu.Unlock()
			return false
		}
		for _, fd := range p.fds {
			closeFD(fd)
		}
		p.b, p.fds = p.b[:0], p.fds[:0]
		if err != nil {
			o.fail(err)
			return true
		}
		o.mu.Lock()
		if len(o.free) < maxFreePackets {
			o.free = append(o.free, p)
		}
		o.mu.Unlock()
	}
}

func (o *outbox) send(p *packet, block bool) error {
	o.now, o.oob, o.block = p, nil, block
	if len(p.fds) > 0 {
		o.oob = unix.UnixRights(p.fds...)
	}
	if err := o.rc.Write(o.fn); err != nil {
		return err
	}
	return o.sent
}

// sendOn tries once; false: the socket is full, and the flusher may wait.
func (o *outbox) sendOn(fd uintptr) bool {
	for {
		_, o.sent = unix.SendmsgN(int(fd), o.now.b, o.oob, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		if !errors.Is(o.sent, unix.EINTR) {
			return !o.block || !errors.Is(o.sent, unix.EAGAIN)
		}
	}
}

// fail drops queued frames and refuses more. Idempotent.
func (o *outbox) fail(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err == nil {
		o.err = err
	}
	o.flushing = false
	for _, p := range o.q {
		for _, fd := range p.fds {
			closeFD(fd)
		}
	}
	o.q = nil
}

func closeFD(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd)
	}
}
