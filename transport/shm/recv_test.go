package shm

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestLinger: an inbox that is to ask on does so until something comes, or its time is over; else it asks once.
func TestLinger(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	defer unix.Close(fds[1])
	in := newInbox(nil)
	came := make(chan bool)
	for _, c := range []struct {
		name   string
		linger time.Duration
		send   bool // while it asks
		came   bool
	}{{"at once", 0, false, false}, {"in vain", time.Millisecond, false, false}, {"in time", time.Hour, true, true}} {
		in.linger(c.linger)
		start := time.Now()
		go func() { came <- in.recv(uintptr(fds[0])) }()
		if c.send {
			select {
			case <-came:
				t.Fatalf("%s: it gave up with nothing there", c.name)
			case <-time.After(5 * time.Millisecond):
			}
			if _, err := unix.Write(fds[1], []byte("x")); err != nil {
				t.Fatal(err)
			}
		}
		if got := <-came; got != c.came {
			t.Errorf("%s: something came: %t, want %t", c.name, got, c.came)
		}
		if waited := time.Since(start); waited < c.linger && !c.send {
			t.Errorf("%s: it asked for %s, want %s at least", c.name, waited, c.linger)
		}
		if !c.came && !in.until.IsZero() {
			t.Errorf("%s: it goes on asking when it is woken", c.name)
		}
	}
}
