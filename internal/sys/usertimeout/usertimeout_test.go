package usertimeout

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/testutil"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const (
	quick    = time.Second // a timeout
	patience = time.Minute // of a test that is about to fail
)

// connected is a connection whose ends both bear timeout of silence.
func connected(t *testing.T, timeout time.Duration) (dialed, accepted net.Conn) {
	t.Helper()
	ln, err := ListenConfig(timeout).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	if dialed, err = Dialer(timeout).DialContext(t.Context(), "tcp", ln.Addr().String()); err == nil {
		t.Cleanup(func() { _ = dialed.Close() })
		accepted, err = ln.Accept()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = accepted.Close() })
	return dialed, accepted
}

// secured is TLS over both ends of a connection.
func secured(t *testing.T, dialed, accepted net.Conn) (client, server *tls.Conn) {
	t.Helper()
	cluster, err := keys.NewCluster()
	if err != nil {
		t.Fatal(err)
	}
	c, err := keys.FromCluster(cluster, "n")
	if err != nil {
		t.Fatal(err)
	}
	client, server = tls.Client(dialed, c.Client("n")), tls.Server(accepted, c.Server())
	shaken := make(chan error, 1)
	go func() { shaken <- server.HandshakeContext(t.Context()) }()
	if err := errors.Join(client.HandshakeContext(t.Context()), <-shaken); err != nil {
		t.Fatal(err)
	}
	return client, server
}

// silent waits until a read on c ends because the other host is silent, and reports how long that
// took.
func silent(c net.Conn, began time.Time) (time.Duration, error) {
	err := c.SetReadDeadline(time.Now().Add(patience))
	for b := make([]byte, 4096); err == nil; { // what had come before
		_, err = c.Read(b)
	}
	if errors.Is(err, syscall.ETIMEDOUT) {
		return time.Since(began), nil
	}
	return 0, fmt.Errorf("after %s: %w, want %w", time.Since(began), err, syscall.ETIMEDOUT)
}

// The other host is lost: either end of a connection notices, with bytes under way or idle, under
// TLS or not.
func TestLostHost(t *testing.T) {
	t.Parallel()
	if !testutil.InNamespace(t) {
		return
	}
	for name, x := range map[string]struct{ tls, idle bool }{"plain": {}, "plain, idle": {idle: true},
		"TLS": {tls: true}, "TLS, idle": {true, true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var both [2]net.Conn
			both[0], both[1] = connected(t, quick)
			conns := both
			if x.tls {
				conns[0], conns[1] = secured(t, both[0], both[1])
			}
			testutil.LoseHost(t, both[:]...)
			over := make(chan error, len(conns))
			for _, c := range conns {
				began := time.Now() // before the kernel's count does
				if !x.idle {
					if _, err := c.Write([]byte("grant")); err != nil {
						t.Fatal(err)
					}
				}
				go func() {
					d, err := silent(c, began)
					if err == nil && d < quick {
						err = fmt.Errorf("ended after %s, and silence of %s is to be borne", d, quick)
					}
					over <- err
				}()
			}
			for range conns {
				if err := <-over; err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// An outage that is shorter than the timeout leaves a connection as it was, with bytes under way or
// idle, and however long it had been idle. The outage must end on time for the kernel's timers.
func TestMeasureOutage(t *testing.T) {
	testutil.Measures(t)
	if !testutil.InNamespace(t) {
		return
	}
	// sent again after 1.4 s and 3 s
	const timeout, idle, outage = 4 * time.Second, 2500 * time.Millisecond, 2500 * time.Millisecond
	for name, busy := range map[string]bool{"busy": true, "idle": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, b := connected(t, timeout)
			<-time.After(idle)
			found := testutil.LoseHost(t, a, b)
			if busy {
				if _, err := a.Write([]byte{1}); err != nil {
					t.Fatal(err)
				}
			}
			<-time.After(outage)
			found()
			if !busy {
				if _, err := a.Write([]byte{1}); err != nil {
					t.Fatal(err)
				}
			}
			if err := b.SetReadDeadline(time.Now().Add(patience)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(b, make([]byte, 1)); err != nil {
				t.Errorf("after an outage of %s, timeout %s: %v", outage, timeout, err)
			}
		})
	}
}

// A process that is stopped, or gets no processor, reads nothing, while its kernel answers. A busy
// machine makes the silence longer, which does no harm: the kernel answers without the process.
func TestStoppedProcess(t *testing.T) {
	t.Parallel()
	a, b := connected(t, quick)
	tick := time.NewTicker(quick / 10)
	defer tick.Stop()
	sent := 0
	for began := time.Now(); time.Since(began) < 3*quick; sent++ {
		if _, err := a.Write([]byte{1}); err != nil {
			t.Fatalf("after %s: %v", time.Since(began), err)
		}
		<-tick.C
	}
	if _, err := io.ReadFull(b, make([]byte, sent)); err != nil {
		t.Errorf("after it goes on: %v", err)
	}
}

// Only where it has not read until its socket is full, and for the timeout after that, the
// connection ends.
func TestFullSocket(t *testing.T) {
	t.Parallel()
	a, _ := connected(t, quick)
	if err := a.SetWriteDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	for b := make([]byte, 1<<20); ; {
		if _, err := a.Write(b); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("written to for %s: %v", patience, err)
		} else if err != nil {
			return
		}
	}
}

// Zero means Default, at either end.
func TestDefault(t *testing.T) {
	a, b := connected(t, 0)
	for name, c := range map[string]net.Conn{"dialed": a, "accepted": b} {
		raw, err := c.(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		get := func(option int) (v int) {
			cerr := raw.Control(func(fd uintptr) {
				v, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, option)
			})
			if err := errors.Join(cerr, err); err != nil {
				t.Fatal(err)
			}
			return v
		}
		if ms, idle, every := get(unix.TCP_USER_TIMEOUT), get(unix.TCP_KEEPIDLE),
			get(unix.TCP_KEEPINTVL); ms != 7000 || idle != 1 || every != 1 {
			t.Errorf("%s: user timeout %d ms, keepalives after %d s and every %d s: want 7000, 1, 1", name,
				ms, idle, every)
		}
	}
}
