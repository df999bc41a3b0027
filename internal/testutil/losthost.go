package testutil

import (
	"errors"
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

// LoseHost makes the kernel drop all packets for these connections before TCP sees them. With both
// ends of a connection, the result equals the loss of a host: no byte, no acknowledgement, no
// reset. The returned function brings the host back. Some kernels require root for the filter, so a
// test that calls this first calls InNamespace.
func LoseHost(tb testing.TB, ends ...net.Conn) (found func()) {
	tb.Helper()
	drop := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0}}
	prog := unix.SockFprog{Len: uint16(len(drop)), Filter: &drop[0]}
	each := func(what string, set func(fd int) error) {
		tb.Helper()
		for _, c := range ends {
			raw, err := c.(*net.TCPConn).SyscallConn()
			if err == nil {
				cerr := raw.Control(func(fd uintptr) { err = set(int(fd)) })
				err = errors.Join(cerr, err)
			}
			if err != nil {
				tb.Fatalf("%s of a connection: %v", what, err)
			}
		}
	}
	each("filter", func(fd int) error {
		return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &prog)
	})
	return func() {
		tb.Helper()
		each("end of the filter", func(fd int) error {
			return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
		})
	}
}
