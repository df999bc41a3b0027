package exec

import (
	"container/heap"

	"github.com/kvspray/kvspray/control/lease"
)

// timer is an entry of the executor's agenda. Its owner holds it for life; idx is -1 while it is not armed.
type timer struct {
	at   Instant
	idx  int
	fire func(now Instant)
}

func newTimer(fire func(now Instant)) *timer { return &timer{idx: -1, fire: fire} }

// agenda is a heap of timers by time.
type agenda []*timer

func (a agenda) Len() int           { return len(a) }
func (a agenda) Less(i, j int) bool { return a[i].at < a[j].at }

func (a agenda) Swap(i, j int) {
	a[i], a[j] = a[j], a[i]
	a[i].idx, a[j].idx = i, j
}

// Push and Pop are for package heap.
func (a *agenda) Push(x any) {
	t := x.(*timer)
	t.idx = len(*a)
	*a = append(*a, t)
}

func (a *agenda) Pop() any {
	last := len(*a) - 1
	t := (*a)[last]
	(*a)[last] = nil
	*a = (*a)[:last]
	t.idx = -1
	return t
}

// arm sets t to fire at `at`, whether it was armed or not. lease.Never disarms it.
func (a *agenda) arm(t *timer, at Instant) {
	if at == lease.Never {
		a.disarm(t)
		return
	}
	t.at = at
	if t.idx < 0 {
		heap.Push(a, t)
		return
	}
	heap.Fix(a, t.idx)
}

func (a *agenda) disarm(t *timer) {
	if t.idx >= 0 {
		heap.Remove(a, t.idx)
	}
}

// next is when the earliest timer fires, or lease.Never.
func (a agenda) next() Instant {
	if len(a) == 0 {
		return lease.Never
	}
	return a[0].at
}

// pop takes the earliest timer if it is due.
func (a *agenda) pop(now Instant) *timer {
	if len(*a) == 0 || (*a)[0].at > now {
		return nil
	}
	t := (*a)[0]
	a.disarm(t)
	return t
}
