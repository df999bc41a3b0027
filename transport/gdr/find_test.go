package gdr

import (
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/verbs"
)

func TestTimer(t *testing.T) {
	for d, want := range map[time.Duration]uint8{0: 1, time.Millisecond: 4,
		50 * time.Millisecond: verbs.DefaultTimer, 300 * time.Millisecond: 13, 10 * time.Second: 18} {
		got := timer(d)
		if got != want {
			t.Errorf("timer(%s) = %d, want %d", d, got, want)
		}
		if low, high := Timers(d); got > 1 && high > d || low > high {
			t.Errorf("timer(%s) gives up after %s to %s", d, low, high)
		}
	}
}

// What the benchmarks call the device's timers.
func TestTimers(t *testing.T) {
	for d, want := range map[time.Duration]time.Duration{50 * time.Millisecond: 16777216,
		500 * time.Millisecond: 134217728} {
		if low, high := Timers(d); low != want || high != 2*want {
			t.Errorf("dead_after %s: %s to %s, want %s to twice that", d, low, high, want)
		}
	}
}
