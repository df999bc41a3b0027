package lease

import (
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// Tombstones remembers keys whose source leases have ended, so that a late grant is refused at
// once. Bounded by number and age.
type Tombstones struct {
	max   int
	age   time.Duration
	at    map[transfer.Key]Tombstone
	order []tombstoneEntry // by time; the front is dropped first
	head  int
}

// Tombstone is how a key ended.
type Tombstone struct {
	At     Instant
	Served bool // with every grant served; else canceled, expired or lost
}

type tombstoneEntry struct {
	key transfer.Key
	at  Instant
}

// NewTombstones returns an empty table.
func NewTombstones(max int, age time.Duration) *Tombstones {
	return &Tombstones{max: min(max, MaxTombstones), age: age, at: make(map[transfer.Key]Tombstone)}
}

// Add records the end of a key.
func (t *Tombstones) Add(now Instant, k transfer.Key, served bool) {
	t.Age(now)
	t.at[k] = Tombstone{now, served}
	t.order = append(t.order, tombstoneEntry{k, now})
	for len(t.order)-t.head > t.max {
		t.drop()
	}
}

// Remove forgets a key: a new source lease has it.
func (t *Tombstones) Remove(k transfer.Key) { delete(t.at, k) }

// Find returns how k ended.
func (t *Tombstones) Find(now Instant, k transfer.Key) (Tombstone, bool) {
	t.Age(now)
	b, ok := t.at[k]
	return b, ok
}

// Len counts the keys remembered.
func (t *Tombstones) Len() int { return len(t.at) }

// Age drops what is too old.
func (t *Tombstones) Age(now Instant) {
	for t.head < len(t.order) && now-t.order[t.head].at >= t.age {
		t.drop()
	}
}

func (t *Tombstones) drop() {
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
