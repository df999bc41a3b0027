package tcp

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// iovec is struct iovec. The base is an integer, so that the garbage collector never sees an
// address of memory that was unmapped since; its user keeps the memory alive over the call:
// the lane its own buffers, a guard everything else.
type iovec struct {
	base uintptr
	len  uint64
}

func vec(p []byte) iovec {
	return iovec{base: uintptr(unsafe.Pointer(unsafe.SliceData(p))), len: uint64(len(p))}
}

// readv and sendmsg are one system call each: no retry but for EINTR, no allocation.
func readv(fd uintptr, v []iovec) (int, unix.Errno) {
	for {
		n, _, e := unix.Syscall(unix.SYS_READV, fd, uintptr(unsafe.Pointer(&v[0])), uintptr(len(v)))
		if e != unix.EINTR {
			return int(n), e
		}
	}
}

func sendmsg(fd uintptr, h *unix.Msghdr, v []iovec, flags int) (int, unix.Errno) {
	h.Iov = (*unix.Iovec)(unsafe.Pointer(&v[0]))
	h.SetIovlen(len(v))
	for {
		n, _, e := unix.Syscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(h)), uintptr(flags))
		if e != unix.EINTR {
			return int(n), e
		}
	}
}
