package shm

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestLinger: an inbox that is to ask on does so until something comes, or its time is over, unless
// enough others do; else it asks once.
func TestLinger(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	defer unix.Close(fds[1])
	var polling atomic.Int32
	in := newInbox(nil, &polling, 2)
	came := make(chan bool)
	for _, c := range []struct {
		name   string
		poll   time.Duration
		others int32
		send   bool // while it asks
		came   bool
	}{{"at once", 0, 0, false, false}, {"in vain", time.Millisecond, 1, false, false},
		{"in time", time.Hour, 1, true, true}, {"too many", time.Hour, 2, false, false}} {
		polling.Store(c.others)
		start := time.Now()
		in.pollUntil(start.Add(c.poll))
		go func() { came <- in.recv(uintptr(fds[0])) }()
		if c.send {
			select {
			case <-came:
				t.Fatalf("%s: it gave up with nothing there", c.name)
			case <-time.After(5 * time.Millisecond):
			}
			for end := time.Now().Add(waitFor); polling.Load() != c.others+1; runtime.Gosched() {
				if time.Now().After(end) {
					t.Fatalf("%s: %d poll, want %d", c.name, polling.Load(), c.others+1)
				}
			}
			if _, err := unix.Write(fds[1], []byte("x")); err != nil {
				t.Fatal(err)
			}
		}
		if got := <-came; got != c.came {
			t.Errorf("%s: something came: %t, want %t", c.name, got, c.came)
		}
		if waited := time.Since(start); waited < c.poll && !c.send && c.others < 2 {
			t.Errorf("%s: it asked for %s, want %s at least", c.name, waited, c.poll)
		}
		if n := polling.Load(); n != c.others {
			t.Errorf("%s: %d poll when it has ended, want %d", c.name, n, c.others)
		}
		if !c.came && !in.until.IsZero() {
			t.Errorf("%s: it goes on asking when it is woken", c.name)
		}
	}
}
