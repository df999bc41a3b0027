package evict

import (
	"maps"
	"testing"

	"pgregory.net/rapid"
)

// check compares a policy with what its invariants make of its links.
func (p *Policy) check(t *rapid.T, pins map[uint32]uint32) {
	var used [MaxOwners][Again + 1]uint64
	kids := maps.Clone(pins)
	pages, linked, want := 0, 0, 0
	for n := 1; n < len(p.links); n++ {
		l := p.links[n]
		if l.queue == Nowhere {
			if l != (Link{}) {
				t.Fatalf("node %d is unused and not zero: %+v", n, l)
			}
			continue
		}
		if l.parent != 0 {
			kids[l.parent]++
		}
		if l.queue == Hole {
			if l.kids == 0 {
				t.Fatalf("node %d is a hole that nothing follows", n)
			}
			continue
		}
		pages++
		used[l.owner][l.queue] += p.owners[l.owner].PageBytes
		if l.linked {
			want++
		} else if l.kids == 0 {
			t.Fatalf("node %d is a leaf and in no queue", n)
		}
		for up := l.parent; up != 0; up = p.links[up].parent {
			if l.queue == Again && p.links[up].queue == Once {
				t.Fatalf("node %d of Again has ancestor %d in Once", n, up)
			}
		}
	}
	for n := range p.links {
		if p.links[n].kids != kids[uint32(n)] {
			t.Fatalf("node %d counts %d kids and has %d", n, p.links[n].kids, kids[uint32(n)])
		}
	}
	for id := range p.owners {
		for q := Once; q <= Again; q++ {
			l := p.owners[id].lists[q]
			if l.used != used[id][q] {
				t.Fatalf("owner %d, queue %d: %d bytes, want %d", id, q, l.used, used[id][q])
			}
			before := uint32(0)
			for n := l.old; n != 0; n = p.links[n].next {
				x := p.links[n]
				if x.prev != before || x.queue != q || x.owner != uint16(id) || !x.linked {
					t.Fatalf("owner %d, queue %d: node %d is %+v", id, q, n, x)
				}
				before = n
				linked++
			}
			if before != l.young {
				t.Fatalf("owner %d, queue %d ends at %d: %+v", id, q, before, l)
			}
		}
	}
	if linked != want || pages != p.pages {
		t.Fatalf("%d linked, want %d; %d pages, want %d", linked, want, p.pages, pages)
	}
}

// Whatever happens, the invariants hold, a victim has nothing behind it, is in no other owner's
// reserve and is not pinned, and there is a victim wherever one exists.
func TestPolicy(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const nodes, owners = 24, 3
		p := New(make([]Link, nodes+1), make([]uint32, HistoryEntries(nodes)))
		for id := range uint16(owners) {
			p.SetOwner(id, Owner{PageBytes: uint64(id) + 1, Class: uint8(id / 2),
				Max: rapid.SampledFrom([]uint64{0, 8}).Draw(t, "max"),
				Min: rapid.SampledFrom([]uint64{0, 4}).Draw(t, "min")})
		}
		now := uint32(0)
		resident := func(n uint32) bool { q := p.links[n].queue; return q == Once || q == Again }
		node := rapid.Uint32Range(1, nodes)
		pins := map[uint32]uint32{}
		freed := func(n uint32) {
			if p.links[n].queue != Nowhere {
				t.Fatalf("node %d is freed and in use", n)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"insert": func(t *rapid.T) {
				n, parent := node.Draw(t, "node"), rapid.Uint32Range(0, nodes).Draw(t, "parent")
				id := rapid.Uint16Range(0, owners-1).Draw(t, "owner")
				if resident(n) {
					return
				}
				if p.links[n].queue == Hole {
					id = p.links[n].owner // the same key has the same namespace
				}
				now++
				p.Insert(n, parent, uint64(n)*0x9e3779b97f4a7c15, id, now)
			},
			"touch": func(t *rapid.T) {
				if n := node.Draw(t, "node"); resident(n) {
					now++
					p.Touch(n, now)
				}
			},
			"follow": func(t *rapid.T) {
				n, parent := node.Draw(t, "node"), node.Draw(t, "parent")
				before := p.links[n]
				p.Follow(n, parent, now)
				if l := p.links[n]; before.parent != 0 && l != before {
					t.Fatalf("node %d had a parent: %+v became %+v", n, before, l)
				}
			},
			"remove": func(t *rapid.T) {
				if n := node.Draw(t, "node"); resident(n) && pins[n] == 0 {
					p.Remove(n, freed)
				}
			},
			"pin": func(t *rapid.T) {
				if n := node.Draw(t, "node"); p.links[n].queue != Nowhere {
					p.Pin(n)
					pins[n]++
				}
			},
			"unpin": func(t *rapid.T) {
				if n := node.Draw(t, "node"); pins[n] > 0 {
					now++
					p.Unpin(n, now, freed)
					pins[n]--
				}
			},
			"evict": func(t *rapid.T) {
				by := rapid.Uint16Range(0, owners-1).Draw(t, "by")
				class := rapid.SampledFrom([]uint8{Any, p.owners[by].Class}).Draw(t, "class")
				over := p.Over(by)
				may := func(n uint32) bool {
					l := p.links[n]
					o := &p.owners[l.owner]
					return resident(n) && l.kids == 0 &&
						(class == Any || o.Class == class) && (l.owner == by || !over &&
						o.used() >= o.Min+o.PageBytes)
				}
				exists := false
				for n := uint32(1); n <= nodes; n++ {
					exists = exists || may(n)
				}
				n := p.Victim(by, class, now)
				if n != 0 && !may(n) {
					t.Fatalf("victim %d: %+v", n, p.links[n])
				}
				if n == 0 && exists {
					t.Fatal("no victim, and there is one")
				}
				if n != 0 {
					p.Evict(n, uint64(n)*0x9e3779b97f4a7c15, freed)
				}
			},
			"": func(t *rapid.T) { p.check(t, pins) },
		})
	})
}

// A flood of one owner takes nothing of another's reserve, and an owner at its quota evicts its own
// pages.
func TestQuotas(t *testing.T) {
	const room = 100
	p := New(make([]Link, room+1), make([]uint32, HistoryEntries(room)))
	p.SetOwner(1, Owner{PageBytes: 1, Min: 30})
	p.SetOwner(2, Owner{PageBytes: 1})
	p.SetOwner(3, Owner{PageBytes: 1, Max: 20})
	free := []uint32{}
	for n := uint32(room); n > 0; n-- {
		free = append(free, n)
	}
	now := uint32(0)
	put := func(id uint16) {
		now++
		for len(free) == 0 || p.Over(id) {
			n := p.Victim(id, Any, now)
			if n == 0 {
				t.Fatal("no victim")
			}
			if p.Over(id) && p.Owner(n) != id {
				t.Fatalf("owner %d is at its quota and takes a page of %d", id, p.Owner(n))
			}
			p.Evict(n, uint64(now), func(n uint32) { free = append(free, n) })
		}
		n := free[len(free)-1]
		free = free[:len(free)-1]
		p.Insert(n, 0, uint64(now)*7919, id, now)
	}
	for range 40 {
		put(1)
	}
	for range 50 {
		put(3)
	}
	if used := p.Used(3); used != 20 {
		t.Errorf("owner 3 has %d pages, its quota is 20", used)
	}
	for range 1000 {
		put(2)
	}
	if used := p.Used(1); used != 30 {
		t.Errorf("owner 1 has %d pages left, its reserve is 30", used)
	}
}

func TestHistory(t *testing.T) {
	const room = 8192
	h := newHistory(make([]uint32, room))
	hash := func(i int) uint64 { return uint64(i+1) * 0x9e3779b97f4a7c15 }
	for i := range 20 * room {
		h.add(hash(i))
	}
	recent, old := 0, 0
	for i := range room / 4 {
		if h.take(hash(20*room-1-i), room/4+room/quanta) {
			recent++
		}
		if h.take(hash(i), room) {
			old++
		}
	}
	if recent < room/4*98/100 || old > room/100 {
		t.Errorf("%d of %d recent ones are remembered, and %d old ones", recent, room/4, old)
	}
	if h.take(hash(20*room-1), room) {
		t.Error("an entry is taken twice")
	}
}
