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

func TestParseRail(t *testing.T) {
	for s, want := range map[string]struct {
		device    string
		port, gid int
	}{"mlx5_0": {"mlx5_0", 1, verbs.AutoGID}, "mlx5_1/2": {"mlx5_1", 2, verbs.AutoGID},
		"rxe0@1": {"rxe0", 1, 1}, "mlx5_1/2@3": {"mlx5_1", 2, 3}} {
		device, port, gid, err := ParseRail(s)
		if err != nil || device != want.device || port != want.port || gid != want.gid {
			t.Errorf("%q: %q %d %d %v", s, device, port, gid, err)
		}
	}
	for _, s := range []string{"", "/1", "a/", "a/0", "a/256", "a@", "a@-1", "a@256", "a/1@x"} {
		if _, _, _, err := ParseRail(s); err == nil {
			t.Errorf("%q was taken", s)
		}
	}
}
