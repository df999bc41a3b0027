package gpu

import (
	"runtime"
	"testing"
	"time"
)

// awaitHops waits until so many hops are free.
func awaitHops(t *testing.T, u *GPU, want int) {
	t.Helper()
	for end := time.Now().Add(patience); len(u.hops) != want; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("%d hops are free, want %d", len(u.hops), want)
		}
	}
}

// TestWarm: a GPU that copies nothing makes a short copy; one that copies is warm.
func TestWarm(t *testing.T) {
	u := newCopyRig(t, 1).gpu[0].Device().(*GPU)
	d := u.dev.(*fakeDevice)
	u.Warm()
	awaitHops(t, u, cap(u.hops))
	d.mu.Lock()
	warmed := d.copies
	d.mu.Unlock()
	if warmed == 0 {
		t.Error("nothing was copied")
	}
	h := <-u.hops
	u.Warm()
	u.hops <- h
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.copies != warmed {
		t.Error("a GPU that copies was warmed")
	}
}

// TestWarmWaits: nobody waits for a copy that others keep waiting, and its hop is nobody else's until it is over.
func TestWarmWaits(t *testing.T) {
	u := newCopyRig(t, 1).gpu[0].Device().(*GPU)
	leave := make(chan struct{})
	for range cap(u.hops) {
		h := <-u.hops
		h.queue.(*fakeQueue).work <- func() { <-leave } // what others copy
		u.hops <- h
	}
	u.Warm() // comes back
	if n := len(u.hops); n != cap(u.hops)-1 {
		t.Errorf("%d hops are free while one copies, of %d", n, cap(u.hops))
	}
	close(leave)
	awaitHops(t, u, cap(u.hops))
}

// TestWarmFails: an error costs no hop.
func TestWarmFails(t *testing.T) {
	r := newCopyRig(t, 1)
	u := r.gpu[0].Device().(*GPU)
	d := u.dev.(*fakeDevice)
	d.mu.Lock()
	d.failAfter = 0
	d.mu.Unlock()
	u.Warm()
	awaitHops(t, u, cap(u.hops))
	d.mu.Lock()
	d.failAfter = -1
	d.mu.Unlock()
}
