package exec

import (
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/internal/heap"
)

// timer is an entry of the agenda: a function and its time. Its owner keeps it for life.
type timer = heap.Item[func(now Instant)]

func newTimer(fire func(now Instant)) *timer { return &timer{Value: fire} }

// agenda holds timers by time.
type agenda struct {
	heap.Heap[func(now Instant)]
}

// arm sets t to fire at `at`, whether it was armed or not. lease.Never disarms it.
func (a *agenda) arm(t *timer, at Instant) {
	if at == lease.Never {
		a.disarm(t)
		return
	}
	a.Set(t, heap.Key{At: at})
}

func (a *agenda) disarm(t *timer) { a.Remove(t) }

// next is when the earliest timer fires, or lease.Never.
func (a *agenda) next() Instant {
	if a.Len() == 0 {
		return lease.Never
	}
	k, _ := a.At(0)
	return k.At
}

// pop takes the earliest timer if it is due.
func (a *agenda) pop(now Instant) *timer {
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
