package timer

import (
	"slices"
	"testing"

	"github.com/kvspray/kvspray/control/lease"
)

// Timers fire in the order of their times; an armed one moves, and Never disarms it.
func TestAgenda(t *testing.T) {
	var a Agenda
	var fired []string
	timers := map[string]*Timer{}
	for i, name := range []string{"a", "b", "c"} {
		timers[name] = New(func(Instant) { fired = append(fired, name) })
		a.Arm(timers[name], Instant(10*(i+1)))
	}
	a.Arm(timers["a"], 25)
	a.Arm(timers["c"], lease.Never)
	a.Disarm(timers["c"])
	if a.Next() != 20 || a.Pop(19) != nil {
		t.Fatalf("next at %v", a.Next())
	}
	for x := a.Pop(30); x != nil; x = a.Pop(30) {
		x.Value(30)
	}
	if !slices.Equal(fired, []string{"b", "a"}) || a.Next() != lease.Never {
		t.Errorf("fired %v, next at %v", fired, a.Next())
	}
}
