// Package timer has the timers of an executor, in the order of their times. It reads no clock: the
// executor takes those that are due.
package timer

import (
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/internal/heap"
)

// Instant is a point in time: the duration since the owner's start.
type Instant = lease.Instant

// Timer is an entry of an Agenda: a function and its time. Its owner keeps it for life.
type Timer = heap.Item[func(now Instant)]

// New returns a timer that is not armed.
func New(fire func(now Instant)) *Timer { return &Timer{Value: fire} }

// Agenda holds timers by time.
type Agenda struct {
	heap.Heap[func(now Instant)]
}

// Arm sets t to fire at `at`, whether it was armed or not. lease.Never disarms it.
func (a *Agenda) Arm(t *Timer, at Instant) {
	if at == lease.Never {
		a.Disarm(t)
		return
	}
	a.Set(t, heap.Key{At: at})
}

// Disarm removes t.
func (a *Agenda) Disarm(t *Timer) { a.Remove(t) }

// Next is when the earliest timer fires, or lease.Never.
func (a *Agenda) Next() Instant {
	if a.Len() == 0 {
		return lease.Never
	}
	k, _ := a.At(0)
	return k.At
}

// Pop takes the earliest timer if it is due.
func (a *Agenda) Pop(now Instant) *Timer {
	if a.Len() == 0 {
		return nil
	}
	k, t := a.At(0)
	if k.At > now {
		return nil
	}
	a.Remove(t)
	return t
}
