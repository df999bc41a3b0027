package transport

import (
	"testing"

	"github.com/kvspray/kvspray/transfer"
)

type device struct {
	stops int
	obeys bool
}

func (d *device) Stop() bool {
	d.stops++
	return d.obeys
}

// A later attempt waits for a device's claim, or stops the device. If the device does not stop, its
// claim stays.
func TestClaimDevice(t *testing.T) {
	var sink counter
	g := newGrant(sink.Landed)
	d := &device{obeys: true}
	var device, other Claim
	want := func(what string, got, want transfer.Reason) {
		t.Helper()
		if got != want {
			t.Fatalf("%s: %s, want %s", what, got, want)
		}
	}
	open := func(c <-chan struct{}) bool {
		select {
		case <-c:
			return false
		default:
			return c != nil
		}
	}
	claim := func(c *Claim, r transfer.Range, attempt uint32, force bool) (Device, <-chan struct{}) {
		t.Helper()
		why, holder, ended := g.ClaimDevice(c, r, attempt, d, force)
		want("claim", why, transfer.ReasonNone)
		return holder, ended
	}
	if holder, _ := claim(&device, span(0, 8), 2, false); holder != nil {
		t.Fatal("a claim of free chunks has to wait")
	}
	if holder, _ := claim(&other, span(8, 8), 3, false); holder != nil {
		t.Fatal("a claim of other chunks has to wait")
	}
	other.Release()
	why, _, _ := g.ClaimDevice(&other, span(4, 8), 1, d, false)
	want("an earlier attempt", why, transfer.ReasonSuperseded)
	holder, busy := claim(&other, span(4, 8), 3, false)
	if holder != d || !open(busy) {
		t.Fatal("a claim of the same chunks does not wait")
	}
	want("land", device.Land(nil), transfer.ReasonNone)
	if open(busy) || d.stops != 0 {
		t.Fatalf("landed: the claim still waits, or the device was stopped %d times", d.stops)
	}

	claim(&device, span(8, 8), 2, false)
	_, busy = claim(&other, span(8, 8), 2, false)
	d.obeys = false
	want("a device that does not stop", g.Claim(&other, span(8, 4), 9), transfer.ReasonSuperseded)
	if d.stops != 1 || !open(busy) {
		t.Fatalf("stopped %d times", d.stops)
	}
	d.obeys = true
	claim(&other, span(8, 4), 9, true)
	want("the landing of a stopped device", device.Land(nil), transfer.ReasonSuperseded)
	if d.stops != 2 || open(busy) {
		t.Fatalf("stopped %d times", d.stops)
	}
	want("the landing of the other claim", other.Land(nil), transfer.ReasonNone)
	for i := range 16 {
		if n := sink.landed[i].Load(); n != 1 && i < 12 || n != 0 && i >= 12 {
			t.Errorf("chunk %d landed %d times", i, n)
		}
	}
}
