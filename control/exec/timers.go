package exec

import "github.com/kvspray/kvspray/control/lease"

// timer is an entry of the executor's agenda. Its owner holds it for life; idx is -1 while it is not armed.
type timer struct {
	at   Instant
	idx  int
	fire func(now Instant)
}

func newTimer(fire func(now Instant)) *timer { return &timer{idx: -1, fire: fire} }

// agenda is a binary heap of timers by time.
type agenda []*timer

func (a agenda) swap(i, j int) {
	a[i], a[j] = a[j], a[i]
	a[i].idx, a[j].idx = i, j
}

func (a agenda) up(i int) {
	for i > 0 {
		p := (i - 1) / 2
		if a[p].at <= a[i].at {
			return
		}
		a.swap(i, p)
		i = p
	}
}

func (a agenda) down(i int) {
	for {
		c := 2*i + 1
		if c >= len(a) {
			return
		}
		if c+1 < len(a) && a[c+1].at < a[c].at {
			c++
		}
		if a[i].at <= a[c].at {
			return
		}
		a.swap(i, c)
		i = c
	}
}

// arm sets t to fire at `at`, whether it was armed or not. lease.Never disarms it.
func (a *agenda) arm(t *timer, at Instant) {
	if at == lease.Never {
		a.disarm(t)
		return
	}
	t.at = at
	if t.idx < 0 {
		t.idx = len(*a)
		*a = append(*a, t)
	}
	a.up(t.idx)
	a.down(t.idx)
}

func (a *agenda) disarm(t *timer) {
	i := t.idx
	if i < 0 {
		return
	}
	last := len(*a) - 1
	a.swap(i, last)
	(*a)[last] = nil
	*a = (*a)[:last]
	t.idx = -1
	if i < last {
		a.up(i)
		a.down(i)
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
