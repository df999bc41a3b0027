// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"errors"

	"github.com/kvspray/kvspray/internal/mem"
	"github.com/kvspray/kvspray/store/evict"
	"github.com/kvspray/kvspray/store/index"
	"github.com/kvspray/kvspray/store/page"
)

// Reserve makes room for a page and returns it pinned, for the caller to fill and Commit, or Abort.
// after is the key of the page before it in its prompt, or nil. It returns ErrExists or ErrBusy if
// the key is taken, and ErrFull.
func (t *Tier) Reserve(id uint16, k, after *page.Key) (Page, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.table.Find(k)
	if n != 0 {
		switch e := t.table.At(n); {
		case e.State == index.Live && !e.Doomed:
			return Page{}, ErrExists
		case e.State != index.Gone:
			return Page{}, ErrBusy
		}
	}
	var parent index.Node
	if after != nil {
		if parent = t.table.Find(after); parent != 0 && (t.table.At(parent).State == index.Gone || t.policy.Owner(uint32(parent)) != id) {
			parent = 0
		}
	}
	// Neither the parent nor the key's own node may be given up to make room.
	keep := [2]index.Node{parent, n}
	for _, k := range keep {
		if k != 0 {
			t.policy.Pin(uint32(k))
		}
	}
	n, slot, err := t.roomLocked(id, n, k)
	now := t.now()
	if err == nil {
		e := t.table.At(n)
		e.State, e.Loc, e.CRC, e.Pins, e.Doomed = index.Filling, slot, 0, 1, false
		t.policy.Insert(uint32(n), uint32(parent), t.table.Hash(k), id, now)
		t.policy.Pin(uint32(n))
	}
	for _, k := range keep {
		if k != 0 {
			t.policy.Unpin(uint32(k), now, t.freeLocked)
		}
	}
	if err != nil {
		return Page{}, err
	}
	return t.pageLocked(n, id), nil
}

// roomLocked finds a node and a slot. n is the node that the key has already, or 0.
func (t *Tier) roomLocked(id uint16, n index.Node, k *page.Key) (index.Node, uint32, error) {
	for t.policy.Over(id) {
		v := t.policy.Victim(id, evict.Any, t.now())
		if v == 0 {
			return 0, 0, ErrFull
		}
		t.evictLocked(index.Node(v))
	}
	slot, err := t.slotLocked(id)
	if err != nil || n != 0 {
		return n, slot, err
	}
	for {
		n, err := t.table.Insert(k)
		if !errors.Is(err, index.ErrFull) {
			return n, slot, err
		}
		v := t.policy.Victim(id, evict.Any, t.now())
		if v == 0 {
			t.slabs.give(slot)
			return 0, 0, ErrFull
		}
		t.evictLocked(index.Node(v))
	}
}

// slotLocked finds a slot for one more page of an owner. The page that goes is the policy's choice among all. Where it is of
// another size, a whole slab of its class changes the class.
func (t *Tier) slotLocked(id uint16) (uint32, error) {
	class := t.owners[id].class
	for {
		if slot, ok := t.slabs.take(class); ok {
			return slot, nil
		}
		v := t.policy.Victim(id, evict.Any, t.now())
		if v == 0 {
			return 0, ErrFull
		}
		from := t.slabs.class[t.table.At(index.Node(v)).Loc/t.slabs.perSlab]
		if from == class || !t.vacateLocked(id, from) {
			if v = t.policy.Victim(id, class, t.now()); v == 0 {
				return 0, ErrFull
			}
			t.evictLocked(index.Node(v))
		}
	}
}

// vacateLocked empties the slab of a class that has the fewest pages: it gives up the pages of this class that the policy
// names until the others fit into the class's other slabs, and moves them there.
func (t *Tier) vacateLocked(id uint16, class uint8) bool {
	used := make([]int, len(t.slabs.class))
	held := make([]bool, len(t.slabs.class))
	for n := index.Node(1); n <= t.table.Last(); n++ {
		if e := t.table.At(n); e.State == index.Live || e.State == index.Filling {
			slab := e.Loc / t.slabs.perSlab
			used[slab]++
			held[slab] = held[slab] || e.Pins > 0
		}
	}
	best := -1
	for i, c := range t.slabs.class {
		if c == class && !held[i] && (best < 0 || used[i] < used[best]) {
			best = i
		}
	}
	if best < 0 {
		return false
	}
	slab := uint32(best)
	for room := t.slabs.freeOutside(slab); room < used[slab]; {
		v := index.Node(t.policy.Victim(id, class, t.now()))
		if v == 0 {
			return false
		}
		if t.table.At(v).Loc/t.slabs.perSlab == slab {
			used[slab]--
		} else {
			room++
		}
		t.evictLocked(v)
	}
	t.slabs.clear(slab)
	for n := index.Node(1); n <= t.table.Last() && used[slab] > 0; n++ {
		e := t.table.At(n)
		if e.State != index.Live || e.Loc/t.slabs.perSlab != slab {
			continue
		}
		to, _ := t.slabs.take(class) // there is room: it was made above
		size := uint64(t.slabs.classes[class].bytes)
		mem.Copy(t.arena[uint64(to)*unit:][:size], t.arena[uint64(e.Loc)*unit:][:size])
		e.Loc = to
		used[slab]--
		t.moved.Add(1)
	}
	t.slabs.retire(slab)
	return true
}

// Commit makes a reserved page visible. It stays pinned. A page that was removed meanwhile stays invisible.
func (t *Tier) Commit(p Page, crc uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.table.At(p.node)
	e.State, e.CRC = index.Live, crc
}

// Abort gives a reserved page up.
func (t *Tier) Abort(p Page) { t.Drop(p) }
