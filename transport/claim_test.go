package transport

import (
	"testing"

	"github.com/kvspray/kvspray/transfer"
)

// TestClaimDevice: a device's claim is waited for, or ended by stopping the device, and holds where that cannot be stopped.
func TestClaimDevice(t *testing.T) {
	var sink counter
	g := &Grant{Sink: &sink}
	stops, obeys := 0, true
	stop := func() bool { stops++; return obeys }
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
	want("claim", g.ClaimDevice(&device, span(0, 8), 2, stop), transfer.ReasonNone)
	if g.DeviceBusy(span(8, 8), 3) != nil || g.DeviceBusy(span(4, 8), 1) != nil {
		t.Fatal("busy where there is nothing to wait for: beside it, or superseded by it")
	}
	busy := g.DeviceBusy(span(4, 8), 3)
	if !open(busy) {
		t.Fatal("not busy")
	}
	want("land", device.Land(nil), transfer.ReasonNone)
	if open(busy) || stops != 0 {
		t.Fatalf("landed: still busy, or stopped %d times", stops)
	}

	want("claim", g.ClaimDevice(&device, span(8, 8), 2, stop), transfer.ReasonNone)
	busy = g.DeviceBusy(span(8, 8), 2)
	obeys = false
	want("a device that goes on", g.Claim(&other, span(8, 4), 9), transfer.ReasonSuperseded)
	if stops != 1 || !open(busy) {
		t.Fatalf("stopped %d times", stops)
	}
	obeys = true
	want("a device that stops", g.Claim(&other, span(8, 4), 9), transfer.ReasonNone)
	want("its landing", device.Land(nil), transfer.ReasonSuperseded)
	if stops != 2 || open(busy) {
		t.Fatalf("stopped %d times", stops)
	}
	want("the other's", other.Land(nil), transfer.ReasonNone)
	for i := range 16 {
		if n := sink.landed[i].Load(); n != 1 && i < 12 || n != 0 && i >= 12 {
			t.Errorf("chunk %d landed %d times", i, n)
		}
	}
}
