package connector

import (
	"bytes"
	"net"
	"os"
	"runtime/pprof"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector/internal/process"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// peerOfThisProcess is the peer of a socket whose other end is in this process.
func peerOfThisProcess(t *testing.T) *process.Peer {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[1])
	f := os.NewFile(uintptr(fds[0]), "socket")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p, err := process.Of(c.(*net.UnixConn))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// A worker is shut while its goroutine is about to sleep on the SQ eventfd, and waits for the lock
// to check once more. Neither may wait for the other.
func TestShutMeetsSleep(t *testing.T) {
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	rings, err := mem.NewAnonymous("rings", 4096)
	if err != nil {
		t.Fatal(err)
	}
	w := &worker{rings: rings, proc: peerOfThisProcess(t), completions: completions{event: -1}}
	w.submissions = submissions{w: w, event: os.NewFile(uintptr(fd), "sq_event")}
	w.submissions.signaled.Store(true) // there is no ring to look at, should await come first
	ended := make(chan struct{}, 2)
	in := func(frame string) {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; {
			var stacks bytes.Buffer
			if err := pprof.Lookup("goroutine").WriteTo(&stacks, 2); err != nil {
				t.Fatal(err)
			}
			if bytes.Contains(stacks.Bytes(), []byte(frame)) {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("no goroutine in %s", frame)
			}
		}
	}
	w.mu.Lock()
	go func() { w.shut(); ended <- struct{}{} }()
	in("(*worker).shut(") // first in line for the lock
	go func() { _ = w.submissions.await(); ended <- struct{}{} }()
	in("(*submissions).await.func1(")
	w.mu.Unlock()
	for range 2 {
		select {
		case <-ended:
		case <-time.After(time.Minute):
			t.Fatal("they wait for each other")
		}
	}
}
