package gpu

import (
	"runtime"
	"testing"
	"time"

	"github.com/kvspray/kvspray/gpu/gputest"
)

// awaitSlots waits until the wanted number of slots is free.
func awaitSlots(t *testing.T, u *GPU, want int) {
	t.Helper()
	for end := time.Now().Add(patience); len(u.slots) != want; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("%d slots are free, want %d", len(u.slots), want)
		}
	}
}

// TestWarm: an idle GPU makes a short copy; one that copies does not.
func TestWarm(t *testing.T) {
	u := newCopyRig(t, 1).gpu[0].Device().(*GPU)
	d := u.dev.(*gputest.Device)
	u.Warm()
	awaitSlots(t, u, cap(u.slots))
	d.Mu.Lock()
	warmed := d.Copies
	d.Mu.Unlock()
	if warmed == 0 {
		t.Error("nothing was copied")
	}
	h := <-u.slots
	u.Warm()
	u.slots <- h
	d.Mu.Lock()
	defer d.Mu.Unlock()
	if d.Copies != warmed {
		t.Error("a GPU that copies was warmed")
	}
}

// TestWarmWaits: Warm does not wait for a copy that is delayed, and its slot stays in use until the
// copy ends.
func TestWarmWaits(t *testing.T) {
	u := newCopyRig(t, 1).gpu[0].Device().(*GPU)
	leave := make(chan struct{})
	for range cap(u.slots) {
		h := <-u.slots
		h.queue.(*gputest.Queue).Work <- func() { <-leave } // what others copy
		u.slots <- h
	}
	u.Warm() // comes back
	if n := len(u.slots); n != cap(u.slots)-1 {
		t.Errorf("%d slots are free while one copies, of %d", n, cap(u.slots))
	}
	close(leave)
	awaitSlots(t, u, cap(u.slots))
}

// TestWarmFails: after an error the slot is free again.
func TestWarmFails(t *testing.T) {
	r := newCopyRig(t, 1)
	u := r.gpu[0].Device().(*GPU)
	d := u.dev.(*gputest.Device)
	d.Mu.Lock()
	d.FailAfter = 0
	d.Mu.Unlock()
	u.Warm()
	awaitSlots(t, u, cap(u.slots))
	d.Mu.Lock()
	d.FailAfter = -1
	d.Mu.Unlock()
}
