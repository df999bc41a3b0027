package shm

import (
	"errors"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// inbox receives a lane's packets. The connection's own methods would allocate a sender's address
// for each packet, and these have none. The reader owns it.
type inbox struct {
	rc  syscall.RawConn
	buf [maxPacketBytes]byte
	oob [maxPacketFDs*4 + unix.SizeofCmsghdr]byte

	iov   unix.Iovec
	hdr   unix.Msghdr
	n     int
	errno syscall.Errno
	fn    func(fd uintptr) bool // recv, made once

	// Busy polling: recv retries until then, as one of a bounded number of pollers in the process.
	until   time.Time
	polling *atomic.Int32
	limit   int32
}

// newInbox makes an inbox that polls after pollUntil, if not more than the given number poll.
func newInbox(rc syscall.RawConn, polling *atomic.Int32, limit int) *inbox {
	in := &inbox{rc: rc, polling: polling, limit: int32(limit)}
	in.iov.Base = &in.buf[0]
	in.iov.SetLen(len(in.buf))
	in.hdr.Iov = &in.iov
	in.hdr.SetIovlen(1)
	in.hdr.Control = &in.oob[0]
	in.fn = in.recv
	return in
}

// next waits for a packet, and returns it and its descriptors' message until the next call. No
// bytes: the peer has closed.
func (in *inbox) next() (packet, oob []byte, flags int, err error) {
	if err := in.rc.Read(in.fn); err != nil {
		return nil, nil, 0, err
	}
	if in.errno != 0 {
		return nil, nil, 0, in.errno
	}
	return in.buf[:in.n], in.oob[:in.hdr.Controllen], int(in.hdr.Flags), nil
}

// pollUntil makes next poll at least until then instead of sleeping.
func (in *inbox) pollUntil(until time.Time) {
	if in.limit > 0 && until.After(in.until) {
		in.until = until
	}
}

// polls reports whether next polls.
func (in *inbox) polls() bool { return !in.until.IsZero() }

// recv tries once, or polls for its time; false: no packet yet.
func (in *inbox) recv(fd uintptr) bool {
	if in.until.IsZero() {
		return in.try(fd)
	}
	if in.polling.Add(1) > in.limit {
		in.until = time.Time{}
	}
	defer in.polling.Add(-1)
	for !in.try(fd) {
		if !time.Now().Before(in.until) {
			in.until = time.Time{}
			return false
		}
	}
	return true
}

func (in *inbox) try(fd uintptr) bool {
	for {
		in.hdr.SetControllen(len(in.oob))
		n, _, errno := unix.Syscall(unix.SYS_RECVMSG, fd, uintptr(unsafe.Pointer(&in.hdr)),
			unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		in.n, in.errno = int(n), errno
		if !errors.Is(errno, unix.EINTR) {
			return errno != unix.EAGAIN
		}
	}
}
