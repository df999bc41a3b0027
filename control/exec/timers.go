package exec

import (
	"github.com/kvspray/kvspray/control/lease"
)

// timer is an entry of the executor's agenda. Its owner holds it for life; idx is -1 while it is not armed.
type timer struct {
	idx  int
	fire func(now Instant)
}

func newTimer(fire func(now Instant)) *timer { return &timer{idx: -1, fire: fire} }

// agenda is a heap of timers by time. The times stand in it: the timers themselves are cold where there are many.
type agenda []due

type due struct {
	at Instant
	t  *timer
}

// up and down bring entry i to its place.
func (a agenda) up(i int) {
	x := a[i]
	for ; i > 0 && x.at < a[(i-1)/2].at; i = (i - 1) / 2 {
		a[i] = a[(i-1)/2]
		a[i].t.idx = i
	}
	a[i] = x
	x.t.idx = i
}

func (a agenda) down(i int) {
	x := a[i]
	for {
		child := 2*i + 1
		if child >= len(a) {
			break
		}
		if child+1 < len(a) && a[child+1].at < a[child].at {
			child++
		}
		if a[child].at >= x.at {
			break
		}
		a[i] = a[child]
		a[i].t.idx = i
		i = child
	}
	a[i] = x
	x.t.idx = i
}

// arm sets t to fire at `at`, whether it was armed or not. lease.Never disarms it.
func (a *agenda) arm(t *timer, at Instant) {
	if at == lease.Never {
		a.disarm(t)
		return
	}
	if t.idx < 0 {
		*a = append(*a, due{at, t})
		a.up(len(*a) - 1)
		return
	}
	(*a)[t.idx].at = at
	a.down(t.idx)
	a.up(t.idx)
}

func (a *agenda) disarm(t *timer) {
	i := t.idx
	if i < 0 {
		return
	}
	t.idx = -1
	last := len(*a) - 1
	moved := (*a)[last]
	(*a)[last] = due{}
	*a = (*a)[:last]
	if i < last {
		(*a)[i] = moved
		a.down(i)
		a.up(moved.t.idx)
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
	t := (*a)[0].t
	a.disarm(t)
	return t
}
