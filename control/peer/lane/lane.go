// Package lane has one control lane: a proved connection that carries control frames.
//
// Invariants: Write never blocks, and frames leave in the order of the calls. The caller's
// goroutine writes while the socket accepts the bytes at once; a writer goroutine sends the rest
// and ends when the backlog is empty. After Fail, or an error, nothing more is written.
//
// Goroutines: the caller of Read, and the writer, which Read joins. Lane.mu is a leaf lock.
package lane

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/frame"
	"github.com/kvspray/kvspray/control/peer/opening"
)

const (
	readBuffer   = 4 << 10
	rtoMax       = 1000 // milliseconds between two retransmissions: the kernel's lower limit
	writeTimeout = 10 * time.Second
)

// Lane is one connection.
type Lane struct {
	conn    net.Conn
	over    *opening.TLS // nil: without TLS
	in      io.Reader    // of over, or of conn
	raw     rawWriter
	address string // that this process dialed; empty if the peer did
	local   netip.Addr

	mu      sync.Mutex // protects the fields below
	backlog []byte
	writing bool          // the writer has the socket
	limit   time.Duration // for one write of the writer
	err     error         // nil: the lane lives
	wg      sync.WaitGroup

	received atomic.Int64 // unix nanoseconds of the last reception
}

type rawWriter interface {
	Write(f func(fd uintptr) bool) error
}

// New makes a lane of a proved connection. address is the one that this process dialed; empty: the
// peer dialed.
func New(c net.Conn, over *opening.TLS, address string) (*Lane, error) {
	tc, ok := c.(*net.TCPConn)
	if !ok {
		return nil, fmt.Errorf("peer: control lane over %T, want TCP", c)
	}
	if err := tc.SetNoDelay(true); err != nil {
		return nil, fmt.Errorf("peer: control lane: %w", err)
	}
	raw, err := tc.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("peer: control lane: %w", err)
	}
	if err := raw.Control(func(fd uintptr) {
		// As on data lanes (transport/tcp). Kernels before 6.15 lack it.
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_RTO_MAX_MS, rtoMax)
	}); err != nil {
		return nil, fmt.Errorf("peer: control lane: %w", err)
	}
	l := &Lane{conn: c, over: over, raw: raw, address: address, limit: writeTimeout}
	if a, ok := c.LocalAddr().(*net.TCPAddr); ok {
		l.local = a.AddrPort().Addr().Unmap()
	}
	if over != nil {
		over.Through(records{l}) // so TLS never blocks either
		l.in = over.Conn
	} else {
		l.in = bufio.NewReaderSize(c, readBuffer)
	}
	l.received.Store(time.Now().UnixNano())
	return l, nil
}

// Conn is the connection.
func (l *Lane) Conn() net.Conn { return l.conn }

// Address is the one that this process dialed; empty if the peer dialed.
func (l *Lane) Address() string { return l.address }

// Local is this end's address; the zero address: unknown.
func (l *Lane) Local() netip.Addr { return l.local }

func (l *Lane) String() string {
	return l.conn.LocalAddr().String() + " " + l.conn.RemoteAddr().String()
}

// Received is the time of the last reception, in unix nanoseconds.
func (l *Lane) Received() int64 { return l.received.Load() }

// Backlog is how many bytes the socket has not accepted yet.
func (l *Lane) Backlog() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.backlog)
}

// Err is why the lane has ended; nil: it lives.
func (l *Lane) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Write does not block. It copies the bytes of b that it keeps. False: the lane has ended.
func (l *Lane) Write(b []byte) bool {
	if l.over == nil {
		return l.put(b)
	}
	_, err := l.over.Write(b)
	return err == nil
}

// records writes the records of TLS.
type records struct{ l *Lane }

func (r records) Write(b []byte) (int, error) {
	if !r.l.put(b) {
		return 0, net.ErrClosed
	}
	return len(b), nil
}

// put is Write below TLS.
func (l *Lane) put(b []byte) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return false
	}
	if l.writing || len(l.backlog) > 0 {
		l.backlog = append(l.backlog, b...)
		return true
	}
	var n int
	var werr error
	err := l.raw.Write(func(fd uintptr) bool {
		for {
			n, werr = unix.SendmsgN(int(fd), b, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			if !errors.Is(werr, unix.EINTR) {
				return true // never wait for the socket here
			}
		}
	})
	if errors.Is(werr, unix.EAGAIN) {
		n, werr = 0, nil
	}
	if err = errors.Join(err, werr); err != nil {
		l.failLocked(fmt.Errorf("peer: write control lane: %w", err))
		return false
	}
	if n < len(b) {
		l.backlog = append(l.backlog, b[n:]...)
		l.writing = true
		l.wg.Add(1)
		go l.drain()
	}
	return true
}

// drain writes the backlog until it is empty.
func (l *Lane) drain() {
	defer l.wg.Done()
	var spare []byte
	l.mu.Lock()
	for len(l.backlog) > 0 && l.err == nil {
		b := l.backlog
		l.backlog = spare[:0]
		l.mu.Unlock()
		err := l.conn.SetWriteDeadline(time.Now().Add(l.limit))
		if err == nil {
			_, err = l.conn.Write(b)
		}
		spare = b
		l.mu.Lock()
		if err != nil {
			l.failLocked(fmt.Errorf("peer: write control lane: %w", err))
		}
	}
	// The deadline would outlive the backlog, and fail a much later write.
	if err := l.conn.SetWriteDeadline(time.Time{}); err != nil {
		l.failLocked(fmt.Errorf("peer: write control lane: %w", err))
	}
	l.writing = false
	l.backlog = nil
	l.mu.Unlock()
}

func (l *Lane) failLocked(err error) {
	if l.err != nil {
		return
	}
	l.err = err
	_ = l.conn.Close() // Read notices
}

// Fail ends the lane with an error, unless it has ended.
func (l *Lane) Fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failLocked(err)
}

// Read passes every frame to take until the lane ends, and returns the reason.
func (l *Lane) Read(take func(*peerv1.ControlFrame) error) error {
	var buf []byte
	for {
		var f *peerv1.ControlFrame
		var err error
		if f, buf, err = frame.Read(l.in, buf); err == nil {
			l.received.Store(time.Now().UnixNano())
			err = take(f)
		}
		if err != nil {
			l.Fail(err)
			l.wg.Wait()
			return l.Err()
		}
	}
}
