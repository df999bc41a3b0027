package policy

import (
	"testing"
	"time"
)

// TestIdleProbe: lists use kernels while the GPU is idle, which is probed before the first list and
// from time to time. Beside an engine probes become rarer. Enter waits while users leave for a
// probe.
func TestIdleProbe(t *testing.T) {
	at, busy, probes := time.Unix(1000, 0), false, 0
	waiting := make(chan struct{}, 64) // Enter has read the time
	k := NewIdleProbe(Auto, func() time.Time {
		select {
		case waiting <- struct{}{}:
		default:
		}
		return at
	}, func() bool { probes++; return !busy })
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
			t.Fatal("an idle GPU is refused")
		}
	}
	if probes < 90 || probes > 101 {
		t.Errorf("%d probes in a tenth of a second, want one a millisecond", probes)
	}
	busy, probes = true, 0
	entered := 0
	for range 100000 {
		if list(100 * time.Microsecond) {
			entered++
		}
	}
	if entered > 10 || probes == 0 || probes > 12 {
		t.Errorf("beside an engine %d lists used kernels, after %d probes in ten seconds",
			entered, probes)
	}
	busy = false
	at = at.Add(backoffLast)
	if !list(0) {
		t.Error("the engine is gone")
	}
	for range probeStreak { // one result alone admits for a short time
		if !list(resultValid) {
			t.Error("not idle")
		}
	}
	// While lists follow each other without a pause, all of them end once in probeEvery.
	probes = 0
	if at = at.Add(resultValid); !enter() {
		t.Fatal("the first one does not enter")
	}
	for range 3 {
		if at = at.Add(probeEvery / 4); !enter() {
			t.Fatal("another one does not enter")
		}
	}
	if probes != 1 {
		t.Errorf("%d probes with users", probes)
	}
	at = at.Add(probeEvery)
	for len(waiting) > 0 {
		<-waiting
	}
	waits := make(chan bool, 1)
	go func() { waits <- enter() }()
	<-waiting
	k.mu.Lock() // Enter reads the time with the lock held, and waits without it
	inside := k.users
	k.mu.Unlock()
	if inside != 4 {
		t.Errorf("%d users", inside)
	}
	for range 4 {
		if len(waits) > 0 || probes != 1 {
			t.Error("Enter did not wait for the users")
		}
		k.Leave()
	}
	if !<-waits || probes != 2 {
		t.Errorf("refused, or %d probes", probes)
	}
}

// TestOneLuckyProbe: after an engine was found, a single idle result admits users for a
// millisecond, though others hold the GPU.
func TestOneLuckyProbe(t *testing.T) {
	at, busy, probes := time.Unix(1000, 0), true, 0
	k := NewIdleProbe(Auto, func() time.Time { return at }, func() bool { probes++; return !busy })
	if k.Enter() {
		t.Fatal("admitted beside an engine")
	}
	busy = false // a moment between two of its kernels
	at = at.Add(backoffFirst)
	if !k.Enter() {
		t.Fatal("refused on an idle GPU")
	}
	busy = true
	at = at.Add(resultValid)
	admitted := make(chan bool)
	go func() { admitted <- k.Enter() }()
	select {
	case <-admitted:
		t.Error("an old result admits")
	case <-time.After(20 * time.Millisecond):
	}
	k.Leave()
	if <-admitted || probes != 3 {
		t.Errorf("admitted beside an engine after %d probes", probes)
	}
}
