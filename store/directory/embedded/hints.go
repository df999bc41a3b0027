package embedded

import (
	"hash/maphash"
	"math/bits"

	"github.com/kvspray/kvspray/store/directory"
	"github.com/kvspray/kvspray/store/offheap"
	"github.com/kvspray/kvspray/transfer"
)

// hint is one entry of the table: 20 bytes. No holder: it is free.
type hint struct {
	key    directory.Short
	holder uint16 // of the holders, from 1 on
	at     uint16 // time, in ticks; it goes round, so an old hint may look new once in a week
}

// Of the table.
const (
	ways = 16 // hints of one bucket
	// A holder has at most half of a full bucket: one that floods the table pushes out its own hints
	// first.
	share = ways / 2
	// Buckets fill unevenly, so the table has spare places for every perHint hints.
	spare, perHint = 3, 2

	maxHolders = 4096 // in one table
)

// hints are the hints that this process keeps. It is a table of buckets, off the heap: a hint that
// finds its bucket full takes the place of an older one. Its owner locks.
type hints struct {
	array   *offheap.Array[hint]
	seed    maphash.Seed // keys come from others, and cannot be chosen to share a bucket
	ttl     uint16       // ticks
	holders []holder     // holder i+1 of hints
	current map[transfer.Boot]uint16
	used    int
}

// holder is a process that reported pages.
type holder struct {
	boot transfer.Boot
	seen uint16 // tick of the last hint
}

func newHints(capacity int, ttl uint16) (*hints, error) {
	buckets := max(1, (capacity*spare/perHint+ways-1)/ways)
	a, err := offheap.New[hint](buckets * ways)
	if err != nil {
		return nil, err
	}
	return &hints{array: a, seed: maphash.MakeSeed(), ttl: ttl,
		current: map[transfer.Boot]uint16{}}, nil
}

func (t *hints) bucket(k *directory.Short) []hint {
	all := t.array.Elems()
	i, _ := bits.Mul64(maphash.Bytes(t.seed, k[:]), uint64(len(all)/ways))
	return all[i*ways:][:ways]
}

// live reports whether a hint still counts.
func (t *hints) live(h *hint, now uint16) bool {
	return h.holder != 0 && now-h.at <= t.ttl
}

// holder returns the number of a process; 0: there are too many.
func (t *hints) holder(boot transfer.Boot, now uint16) uint16 {
	n := t.current[boot]
	if n == 0 {
		if n = t.freeHolder(now); n == 0 {
			return 0
		}
		t.holders[n-1].boot = boot
		t.current[boot] = n
	}
	t.holders[n-1].seen = now
	return n
}

// freeHolder finds a number that no live hint has.
func (t *hints) freeHolder(now uint16) uint16 {
	for i := range t.holders {
		// All of its hints have ended by their time: none can count as another's.
		if h := &t.holders[i]; now-h.seen > t.ttl {
			delete(t.current, h.boot)
			return uint16(i + 1)
		}
	}
	if len(t.holders) == maxHolders {
		return 0
	}
	t.holders = append(t.holders, holder{})
	return uint16(len(t.holders))
}

// put keeps a hint.
func (t *hints) put(k *directory.Short, n, now uint16) {
	b := t.bucket(k)
	var free, oldest, own *hint
	mine := 0
	older := func(a, b *hint) bool { return b == nil || now-a.at > now-b.at }
	for i := range b {
		h := &b[i]
		if !t.live(h, now) {
			if free == nil {
				free = h
			}
			continue
		}
		if h.holder == n {
			if h.key == *k {
				h.at = now
				return
			}
			mine++
			if older(h, own) {
				own = h
			}
		}
		if older(h, oldest) {
			oldest = h
		}
	}
	switch {
	case free != nil:
		if free.holder == 0 {
			t.used++
		}
	case mine >= share:
		free = own
	default:
		free = oldest
	}
	*free = hint{key: *k, holder: n, at: now}
}

// drop deletes a hint.
func (t *hints) drop(k *directory.Short, n uint16) {
	b := t.bucket(k)
	for i := range b {
		if b[i].holder == n && b[i].key == *k {
			b[i] = hint{}
			t.used--
			return
		}
	}
}

// find calls each with the holders of a key.
func (t *hints) find(k *directory.Short, now uint16, each func(n uint16)) {
	b := t.bucket(k)
	for i := range b {
		if b[i].key == *k && t.live(&b[i], now) {
			each(b[i].holder)
		}
	}
}
