// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
)

const (
	lengthBytes = 4
	readBuffer  = 4 << 10
	rtoMax      = 1000 // milliseconds between two retransmissions: the least that the kernel takes
)

// ReadFrame reads one length-prefixed ControlFrame. buf is reused; the frame does not alias it.
func ReadFrame(r io.Reader, buf []byte) (*peerv1.ControlFrame, []byte, error) {
	var head [lengthBytes]byte
	if cap(buf) < lengthBytes {
		buf = make([]byte, lengthBytes, 512)
	}
	if _, err := io.ReadFull(r, buf[:lengthBytes]); err != nil {
		return nil, buf, err //nolint:wrapcheck // io.EOF between frames is the orderly end
	}
	copy(head[:], buf)
	n := binary.LittleEndian.Uint32(head[:])
	if n == 0 || n > MaxFrame {
		return nil, buf, fmt.Errorf("peer: control frame of %d bytes, want 1 to %d: %w", n,
			MaxFrame, ErrTooBig)
	}
	if cap(buf) < int(n) {
		buf = make([]byte, n)
	}
	buf = buf[:n]
	if _, err := io.ReadFull(r, buf); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, buf, fmt.Errorf("peer: read control frame: %w", err)
	}
	f := new(peerv1.ControlFrame)
	if err := proto.Unmarshal(buf, f); err != nil {
		return nil, buf, fmt.Errorf("peer: control frame of %d bytes: %w", n, err)
	}
	return f, buf, nil
}

// AppendFrame appends f behind its length.
func AppendFrame(dst []byte, f *peerv1.ControlFrame) ([]byte, error) {
	at := len(dst)
	out, err := proto.MarshalOptions{}.MarshalAppend(append(dst, 0, 0, 0, 0), f)
	if err != nil {
		return dst, fmt.Errorf("peer: encode control frame: %w", err)
	}
	n := len(out) - at - lengthBytes
	if n > MaxFrame {
		return dst, fmt.Errorf("peer: control frame of %d bytes, at most %d: %w", n, MaxFrame, ErrTooBig)
	}
	binary.LittleEndian.PutUint32(out[at:], uint32(n))
	return out, nil
}

// lane is one connection. The caller's goroutine writes while the socket accepts the bytes at once;
// a writer goroutine sends the rest and ends when the backlog is empty.
type lane struct {
	conn  net.Conn
	over  *overTLS  // nil: without TLS
	in    io.Reader // of over, or of conn
	raw   rawWriter
	addr  string // that we dialed; empty where the peer did
	local netip.Addr

	mu      sync.Mutex // protects the fields below
	backlog []byte
	writing bool          // the writer has the socket
	limit   time.Duration // for one write of the writer
	dead    bool
	err     error
	wg      sync.WaitGroup

	heard   atomic.Int64 // unix nanoseconds of the last received bytes
	doubted atomic.Int64 // when a frame was put on it that was not acknowledged in time; 0: never
	asked   atomic.Int64 // of the first ping that is not answered by anything; 0: none
}

type rawWriter interface {
	Write(f func(fd uintptr) bool) error
}

func newLane(c net.Conn, over *overTLS) (*lane, error) {
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
	l := &lane{conn: c, over: over, raw: raw, local: localAddr(c), limit: writeTimeout}
	if over != nil {
		over.under.lane = l // TLS writes by put, and so never blocks
		l.in = over.Conn
	} else {
		l.in = bufio.NewReaderSize(c, readBuffer)
	}
	l.heard.Store(time.Now().UnixNano())
	return l, nil
}

// waiting is how many bytes the socket has not taken yet.
func (l *lane) waiting() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.backlog)
}

// write never blocks. b is copied where it is kept. False: the lane is dead.
func (l *lane) write(b []byte) bool {
	if l.over == nil {
		return l.put(b)
	}
	_, err := l.over.Write(b)
	return err == nil
}

// put is write below TLS.
func (l *lane) put(b []byte) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dead {
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

// drain writes the backlog until it is gone.
func (l *lane) drain() {
	defer l.wg.Done()
	var spare []byte
	l.mu.Lock()
	for len(l.backlog) > 0 && !l.dead {
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
	// The deadline would outlive the backlog, and fail a write that comes much later.
	if err := l.conn.SetWriteDeadline(time.Time{}); err != nil {
		l.failLocked(fmt.Errorf("peer: write control lane: %w", err))
	}
	l.writing = false
	l.backlog = nil
	l.mu.Unlock()
}

func (l *lane) failLocked(err error) {
	if l.dead {
		return
	}
	l.dead, l.err = true, err
	_ = l.conn.Close() // the reader notices; err says why
}

func (l *lane) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failLocked(err)
}

// read hands every frame to take until the lane ends.
func (l *lane) read(take func(*peerv1.ControlFrame) error) error {
	var buf []byte
	for {
		var f *peerv1.ControlFrame
		var err error
		if f, buf, err = ReadFrame(l.in, buf); err == nil {
			l.heard.Store(time.Now().UnixNano())
			l.asked.Store(0)
			err = take(f)
		}
		if err != nil {
			l.fail(err)
			l.wg.Wait()
			l.mu.Lock()
			defer l.mu.Unlock()
			return l.err
		}
	}
}
