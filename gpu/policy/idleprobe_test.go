package policy

import (
	"testing"
	"time"
)

// TestKnocks: lists go by kernels while nobody else computes, which is asked before the first and now and then; while somebody does it is asked
// less and less often. What comes while all are to end waits for that.
func TestIdleProbe(t *testing.T) {
	at, busy, knocks := time.Unix(1000, 0), false, 0
	waiting := make(chan struct{}, 64) // somebody has looked at the time
	k := NewIdleProbe(Auto, func() time.Time {
		select {
		case waiting <- struct{}{}:
		default:
		}
		return at
	}, func() bool { knocks++; return !busy })
	enter := func() bool { return k.Enter() }
	list := func(gap time.Duration) bool {
		at = at.Add(gap)
		ok := enter()
		if ok {
			k.Leave()
		}
		return ok
	}
	for range 1000 {
		if !list(100 * time.Microsecond) {
			t.Fatal("nobody else computes")
		}
	}
	if knocks < 90 || knocks > 101 {
		t.Errorf("%d knocks in a tenth of a second, want one a millisecond", knocks)
	}
	busy, knocks = true, 0
	entered := 0
	for range 100000 {
		if list(100 * time.Microsecond) {
			entered++
		}
	}
	if entered > 10 || knocks == 0 || knocks > 12 {
		t.Errorf("beside an engine %d lists went by kernels, and %d times in ten seconds was asked", entered, knocks)
	}
	busy = false
	at = at.Add(backoffLast)
	if !list(0) {
		t.Error("the engine is gone")
	}
	// While lists follow each other without a pause all of them end once in knockEvery.
	knocks = 0
	if at = at.Add(resultValid); !enter() {
		t.Fatal("the first one does not enter")
	}
	for range 3 {
		if at = at.Add(probeEvery / 4); !enter() {
			t.Fatal("another one does not enter")
		}
	}
	if knocks != 1 {
		t.Errorf("%d knocks with lists inside", knocks)
	}
	at = at.Add(probeEvery)
	for len(waiting) > 0 {
		<-waiting
	}
	waits := make(chan bool, 1)
	go func() { waits <- enter() }()
	<-waiting
	k.mu.Lock() // it looks with this held, and waits without
	inside := k.users
	k.mu.Unlock()
	if inside != 4 {
		t.Errorf("%d are inside", inside)
	}
	for range 4 {
		if len(waits) > 0 || knocks != 1 {
			t.Error("it did not wait for those inside")
		}
		k.Leave()
	}
	if !<-waits || knocks != 2 {
		t.Errorf("refused, or %d knocks", knocks)
	}
}
