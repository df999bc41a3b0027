package shm

import (
	"errors"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// inbox receives a lane's packets. The connection's own calls make an address of the sender for each, which here has none. It belongs to
// the reader.
type inbox struct {
	rc  syscall.RawConn
	buf [maxPacketBytes]byte
	oob [maxPacketFDs*4 + unix.SizeofCmsghdr]byte

	iov   unix.Iovec
	hdr   unix.Msghdr
	n     int
	errno syscall.Errno
	fn    func(fd uintptr) bool // recv, made once

	// Busy polling: recv asks again and again until then, as one of so many in the process at most.
	until   time.Time
	polling *atomic.Int32
	most    int32
}

// newInbox makes one that polls, where it is told to linger, as long as not more than so many do.
func newInbox(rc syscall.RawConn, polling *atomic.Int32, most int) *inbox {
	in := &inbox{rc: rc, polling: polling, most: int32(most)}
	in.iov.Base = &in.buf[0]
	in.iov.SetLen(len(in.buf))
	in.hdr.Iov = &in.iov
	in.hdr.SetIovlen(1)
	in.hdr.Control = &in.oob[0]
	in.fn = in.recv
	return in
}

// next waits for a packet, and returns it and its descriptors' message until the next call. No bytes: the peer has closed.
func (in *inbox) next() (packet, oob []byte, flags int, err error) {
	if err := in.rc.Read(in.fn); err != nil {
		return nil, nil, 0, err
	}
	if in.errno != 0 {
		return nil, nil, 0, in.errno
	}
	return in.buf[:in.n], in.oob[:in.hdr.Controllen], int(in.hdr.Flags), nil
}

// linger has next ask again and again until then, at least, instead of sleeping.
func (in *inbox) linger(until time.Time) {
	if in.most > 0 && until.After(in.until) {
		in.until = until
	}
}

// lingers reports whether it does.
func (in *inbox) lingers() bool { return !in.until.IsZero() }

// recv tries once, or for as long as it is to poll; false: there is nothing yet.
func (in *inbox) recv(fd uintptr) bool {
	if in.until.IsZero() {
		return in.try(fd)
	}
	if in.polling.Add(1) > in.most {
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
		n, _, errno := unix.Syscall(unix.SYS_RECVMSG, fd, uintptr(unsafe.Pointer(&in.hdr)), unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		in.n, in.errno = int(n), errno
		if !errors.Is(errno, unix.EINTR) {
			return errno != unix.EAGAIN
		}
	}
}
