package memory

import (
	"slices"

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
		from := t.slabs.classOf(t.pages.At(index.Node(v)).Loc)
		if from == class || !t.vacateLocked(id, from) {
			if err := t.pages.GiveUpOne(id, class); err != nil {
				return 0, err
			}
		}
	}
}

// vacateLocked empties a slab of a class: the one with the fewest pages of those without a pinned
// one. It gives up the pages of this class that the policy names until the others fit into the
// class's other slabs, and moves them there.
func (t *Tier) vacateLocked(id uint16, class uint8) bool {
	slabs := t.slabs.byUse(class)
	best := slices.IndexFunc(slabs, t.unpinnedLocked)
	if best < 0 {
		return false
	}
	slab := slabs[best]
	for t.slabs.freeOutside(slab) < t.slabs.used(slab) {
		v := index.Node(t.pages.Victim(id, class, t.pages.Now()))
		if v == 0 {
			return false
		}
		t.pages.GiveUp(v)
	}
	t.slabs.clear(slab)
	for _, n := range t.slabs.all[slab].nodes {
		if n == 0 {
			continue
		}
		e := t.pages.At(index.Node(n))
		to, _ := t.slabs.take(class) // there is room: it was made above
		size := uint64(t.slabs.classes[class].bytes)
		mem.Copy(t.arena[uint64(to)*unit:][:size], t.arena[uint64(e.Loc)*unit:][:size])
		e.Loc = to
		t.slabs.name(to, n)
		t.moved++
	}
	t.slabs.retire(slab)
	return true
}

// unpinnedLocked reports whether no page of a slab is pinned. A page that is being stored is.
func (t *Tier) unpinnedLocked(slab uint32) bool {
	return !slices.ContainsFunc(t.slabs.all[slab].nodes, func(n uint32) bool {
		return n != 0 && t.pages.At(index.Node(n)).Pins > 0
	})
}
