package testutil

import (
	"errors"
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

// LoseHost makes the kernel drop whatever comes for these connections, before TCP sees it. Given both ends of one, that is what is left of it
// when a host is lost: no byte, no acknowledgement, no reset.
func LoseHost(tb testing.TB, ends ...net.Conn) {
	tb.Helper()
	drop := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0}}
	prog := unix.SockFprog{Len: uint16(len(drop)), Filter: &drop[0]}
	for _, c := range ends {
		raw, err := c.(*net.TCPConn).SyscallConn()
		if err == nil {
			cerr := raw.Control(func(fd uintptr) {
				err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &prog)
			})
			err = errors.Join(cerr, err)
		}
		if err != nil {
			tb.Fatalf("filter of a connection: %v", err)
		}
	}
}
