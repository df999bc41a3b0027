package connector

import (
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/internal/watch"
	"github.com/kvspray/kvspray/internal/board"
)

// TestFallingFlags: flags of replays that are cleared are no layers, and the pace of looks is not
// learned from them.
func TestFallingFlags(t *testing.T) {
	f, err := board.InitFlags(make([]byte, board.FlagsBytes(2)), [16]byte{1}, 2)
	if err != nil {
		t.Fatal(err)
	}
	s := &signals{w: &worker{flags: f}, seen: make([]uint64, 3)}
	for step := uint64(1); step < 4; step++ {
		for _, c := range []struct {
			what string
			do   func()
			want int
		}{
			{"the step begins", func() { f.StartReplay(step) }, 0},
			{"layer 0", func() { f.SetReplayed(0) }, 1},
			{"nothing", func() {}, 0},
			{"layer 1 and the end", func() { f.SetReplayed(1); f.SetLayer(2, step) }, 2},
		} {
			if c.do(); s.Moved() != c.want {
				t.Errorf("step %d, %s: not %d flags that moved", step, c.what, c.want)
			}
		}
	}
}

// TestAwaited: layers are followed closely while a source lease has a matching receiver, and for a
// while after a source lease was opened.
func TestAwaited(t *testing.T) {
	w := &worker{}
	if w.signals.Awaited(time.Hour) {
		t.Error("layers are followed closely without a lease")
	}
	w.signals.fresh.Store(int64(time.Hour + watch.Fresh))
	if !w.signals.Awaited(time.Hour + watch.Fresh - 1) {
		t.Error("a new lease is not awaited")
	}
	if w.signals.Awaited(time.Hour + watch.Fresh) {
		t.Error("a lease is new for ever")
	}
	w.Follow(true)
	if !w.signals.Awaited(2 * time.Hour) {
		t.Error("a lease has a receiver, and layers are not followed closely")
	}
	w.Follow(false)
	if w.signals.Awaited(2 * time.Hour) {
		t.Error("the last receiver is gone, and layers are followed as closely as before")
	}
}
