package testutil

import (
	"errors"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// FullListener is a listener whose backlog is full: no connection to it is accepted, as by a host
// that is gone, until the caller accepts those that wait. They close by themselves.
func FullListener(tb testing.TB) net.Listener {
	tb.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(Loopback(), "0"))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = l.Close() })
	raw, err := l.(*net.TCPListener).SyscallConn()
	if err == nil {
		cerr := raw.Control(func(fd uintptr) { err = unix.Listen(int(fd), 0) })
		err = errors.Join(cerr, err)
	}
	if err != nil {
		tb.Fatal(err)
	}
	const tries = 8 // the queue has one or two
	for range tries {
		c, err := net.DialTimeout("tcp", l.Addr().String(), 100*time.Millisecond)
		if err != nil {
			return l
		}
		_ = c.Close()
	}
	tb.Fatal("the listener's queue does not fill")
	return nil
}
