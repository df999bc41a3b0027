package testutil

import (
	"bytes"
	"sync/atomic"
	"syscall"
	"testing"
)

// contains stays a call: its prologue is the one place between two searches where the loop can be
// preempted for certain. Without it a collection may wait for minutes.
//
//go:noinline
func contains(b []byte) bool { return bytes.IndexByte(b, 1) >= 0 }

// One long search cannot be preempted, and holds the collector; the same in pieces does not. What
// the host does to the machine meanwhile may hide either once, so each has a few tries.
func TestMeasureCollectorDelayOfSearches(t *testing.T) {
	Measures(t)
	const tries = 4
	// Nothing is ever written there: it takes no memory, and a search of all of it a fifth of a
	// second and more.
	src, err := syscall.Mmap(-1, 0, 4<<30, syscall.PROT_READ,
		syscall.MAP_PRIVATE|syscall.MAP_ANON|syscall.MAP_NORESERVE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Munmap(src) }()
	for _, c := range []struct {
		name  string
		piece int
		held  bool
	}{{"whole", len(src), true}, {"pieces", 64 << 10, false}} {
		var stop atomic.Bool
		done := make(chan struct{})
		go func() {
			defer close(done)
			for at := 0; !stop.Load(); at = (at + c.piece) % len(src) {
				if contains(src[at : at+c.piece]) {
					t.Error("memory without a writer holds bytes")
				}
			}
		}()
		right, decided := false, 0
		for n := 0; n < tries && !right; n++ {
			l := collect(t)
			right = l.held >= collectorHeld == c.held && (c.held || l.good >= collectorMinimum)
			if l.good >= collectorMinimum || l.held >= collectorHeld {
				decided++
			}
			t.Logf("%s: %+v", c.name, l)
		}
		stop.Store(true)
		<-done
		if decided == 0 {
			Skip(t, "quiet", c.name+": the machine is too busy to measure")
		}
		if !right {
			t.Errorf("%s: found held: %v, want %v", c.name, !c.held, c.held)
		}
	}
}
