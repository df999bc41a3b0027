package lease

import (
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// Tombs remembers keys whose source leases have ended, so that a late grant is refused at once.
// Bounded by number and age.
type Tombs struct {
	max   int
	age   time.Duration
	at    map[transfer.Key]Tomb
	order []tombEntry // by time; the front is dropped first
	head  int
}

// Tomb is how a key ended.
type Tomb struct {
	At     Instant
	Served bool // with every grant served; else cancelled, expired or lost
}

type tombEntry struct {
	key transfer.Key
	at  Instant
}

// NewTombs returns an empty table.
func NewTombs(max int, age time.Duration) *Tombs {
	return &Tombs{max: min(max, MaxTombstones), age: age, at: make(map[transfer.Key]Tomb)}
}

// Bury records the end of a key.
func (t *Tombs) Bury(now Instant, k transfer.Key, served bool) {
	t.Age(now)
	t.at[k] = Tomb{now, served}
	t.order = append(t.order, tombEntry{k, now})
	for len(t.order)-t.head > t.max {
		t.drop()
	}
}

// Raise forgets a key: a new source lease has it.
func (t *Tombs) Raise(k transfer.Key) { delete(t.at, k) }

// Find returns how k ended.
func (t *Tombs) Find(now Instant, k transfer.Key) (Tomb, bool) {
	t.Age(now)
	b, ok := t.at[k]
	return b, ok
}

// Len counts the keys remembered.
func (t *Tombs) Len() int { return len(t.at) }

// Age drops what is too old.
func (t *Tombs) Age(now Instant) {
	for t.head < len(t.order) && now-t.order[t.head].at >= t.age {
		t.drop()
	}
}

func (t *Tombs) drop() {
	e := t.order[t.head]
	t.head++
	if b, ok := t.at[e.key]; ok && b.At == e.at {
		delete(t.at, e.key)
	}
	if t.head > len(t.order)/2 {
		t.order = append(t.order[:0], t.order[t.head:]...)
		t.head = 0
	}
}
