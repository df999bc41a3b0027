// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/catalog"
	"github.com/kvspray/kvspray/store/evict"
	"github.com/kvspray/kvspray/store/index"
)

// slotLocked finds a slot for one more page of an owner. The page that goes is the policy's choice
// among all. Where it is of another size, a whole slab of its class changes the class.
func (t *Tier) slotLocked(id uint16) (uint32, error) {
	class := t.owners[id].class
	for {
		if slot, ok := t.slabs.take(class); ok {
			return slot, nil
		}
		v := t.pages.Victim(id, evict.Any, t.pages.Now())
		if v == 0 {
			return 0, catalog.ErrFull
		}
		from := t.slabs.class[t.pages.At(index.Node(v)).Loc/t.slabs.perSlab]
		if from == class || !t.vacateLocked(id, from) {
			if err := t.pages.GiveUpOne(id, class); err != nil {
				return 0, err
			}
		}
	}
}

// vacateLocked empties the slab of a class that has the fewest pages: it gives up the pages of this
// class that the policy names until the others fit into the class's other slabs, and moves them
// there.
func (t *Tier) vacateLocked(id uint16, class uint8) bool {
	used := make([]int, len(t.slabs.class))
	held := make([]bool, len(t.slabs.class))
	for n := index.Node(1); n <= t.pages.Last(); n++ {
		if e := t.pages.At(n); e.State == index.Live || e.State == index.Filling {
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
		v := index.Node(t.pages.Victim(id, class, t.pages.Now()))
		if v == 0 {
			return false
		}
		if t.pages.At(v).Loc/t.slabs.perSlab == slab {
			used[slab]--
		} else {
			room++
		}
		t.pages.GiveUp(v)
	}
	t.slabs.clear(slab)
	for n := index.Node(1); n <= t.pages.Last() && used[slab] > 0; n++ {
		e := t.pages.At(n)
		if e.State != index.Live || e.Loc/t.slabs.perSlab != slab {
			continue
		}
		to, _ := t.slabs.take(class) // there is room: it was made above
		size := uint64(t.slabs.classes[class].bytes)
		mem.Copy(t.arena[uint64(to)*unit:][:size], t.arena[uint64(e.Loc)*unit:][:size])
		e.Loc = to
		used[slab]--
		t.moved++
	}
	t.slabs.retire(slab)
	return true
}
