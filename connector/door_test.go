package connector

import (
	"bytes"
	"os"
	"runtime/pprof"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/mem"
)

// A worker is shut while its ring's goroutine is about to sleep on the doorbell, and waits for the
// lock to check once more: neither waits for the other. They once did, for ever, and Close with
// them.
func TestShutMeetsSleep(t *testing.T) {
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	rings, err := mem.NewAnonymous("rings", 4096)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Open("/dev/null") // stands for the pidfd, which is closed as well
	if err != nil {
		t.Fatal(err)
	}
	w := &worker{door: os.NewFile(uintptr(fd), "doorbell"), bell: -1, rings: rings, proc: &peer{pidfd: self}}
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
	go func() { _ = w.awaitDoorbell(); ended <- struct{}{} }()
	in("awaitDoorbell.func1(")
	w.mu.Unlock()
	for range 2 {
		select {
		case <-ended:
		case <-time.After(time.Minute):
			t.Fatal("they wait for each other")
		}
	}
}
