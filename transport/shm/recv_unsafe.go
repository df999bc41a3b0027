package shm

import (
	"errors"
	"runtime"
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
	until time.Time             // it asks again and again
}

func newInbox(rc syscall.RawConn) *inbox {
	in := &inbox{rc: rc}
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

// linger has the inbox ask again and again for so long. Who is to work on what has just come begins before, on this thread: another one would have to be
// woken first.
func (in *inbox) linger(d time.Duration) {
	if d > 0 {
		in.until = time.Now().Add(d)
		runtime.Gosched()
	}
}

// recv tries once, or until it is to ask no more; false: there is nothing yet.
func (in *inbox) recv(fd uintptr) bool {
	for {
		in.hdr.SetControllen(len(in.oob))
		n, _, errno := unix.Syscall(unix.SYS_RECVMSG, fd, uintptr(unsafe.Pointer(&in.hdr)), unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		in.n, in.errno = int(n), errno
		switch {
		case errors.Is(errno, unix.EINTR):
		case errno != unix.EAGAIN:
			return true
		case in.until.IsZero() || time.Now().After(in.until):
			in.until = time.Time{}
			return false
		}
	}
}
