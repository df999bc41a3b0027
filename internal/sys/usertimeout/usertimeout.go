// Package usertimeout makes TCP connections that end when the other end's host is lost: its power
// failed, or no way leads to it any more. Without that a connection waits for a quarter of an hour,
// or, where nothing is under way on it, for as long as it is asked.
//
// It is the other end's kernel that is asked, by the user timeout of TCP (RFC 9293, 3.9.1): it
// acknowledges what was sent, and answers keepalives, while its process is stopped or gets no
// processor, so neither of these looks like a lost host. The exception is a process that has not
// read for so long that its socket is full: that it takes nothing for the whole timeout ends the
// connection as well.
//
// An accepted connection inherits the timeout of its listener, whatever protocol it carries: TLS
// lies above. No goroutines.
package usertimeout

import (
	"fmt"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Default lets a connection bear an outage of 6 s, such as that of a virtual machine that moves:
// what is under way is sent again 0.2, 0.6, 1.4, 3 and 6.2 s after the first time, and the timeout
// ends the connection in place of the next. It is longer than a sidecar may take to answer a ping
// (3 s) and than a lane may stand still under posted writes (3 s), so that it decides only where
// these see nothing, and less than the match timeout (10 s).
const Default = 7 * time.Second

// probeEvery is how often an idle connection is probed, the minimum of TCP. Linux counts
// silence from what it received last, and looks at it only when it asks: an idle connection bears
// between timeout-probeEvery and timeout of an outage.
const probeEvery = time.Second

// Dialer dials connections that bear timeout of silence; 0 is Default.
func Dialer(timeout time.Duration) *net.Dialer {
	return &net.Dialer{Control: control(timeout), KeepAliveConfig: keepAlive}
}

// ListenConfig listens for connections that bear timeout of silence; 0 is Default.
func ListenConfig(timeout time.Duration) *net.ListenConfig {
	lc := &net.ListenConfig{Control: control(timeout), KeepAliveConfig: keepAlive}
	lc.SetMultipathTCP(false) // it lacks the option
	return lc
}

func control(timeout time.Duration) func(_, _ string, c syscall.RawConn) error {
	ms := int(orDefault(timeout).Milliseconds())
	return func(_, _ string, c syscall.RawConn) error {
		var err error
		if cerr := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, ms)
		}); cerr != nil {
			return cerr //nolint:wrapcheck // the network's own error
		}
		if err != nil {
			return fmt.Errorf("TCP_USER_TIMEOUT of %d ms: %w", ms, err)
		}
		return nil
	}
}

// keepAlive sets no number of unanswered keepalives: Linux does not look at that
// where there is a user timeout.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: probeEvery, Interval: probeEvery, Count: -1}

func orDefault(timeout time.Duration) time.Duration {
	if timeout <= 0 {
		return Default
	}
	return timeout
}
