package memory

import "testing"

// BenchmarkVacate is one slab that goes from small pages to large ones, in an arena of 262,144
// pages: how long the tier's lock is held.
func BenchmarkVacate(b *testing.B) {
	const slab, small, large = 1 << 20, 4096, 1 << 20
	tier := open(b, Config{Bytes: 1 << 30, SlabBytes: slab, MaxPages: 1 << 19})
	reserve := func(owner uint16, i int) {
		k := key(owner, i)
		p, err := tier.Reserve(owner, &k, nil)
		if err != nil {
			b.Fatal(err)
		}
		tier.Commit(p, 0)
		tier.Unpin(p)
	}
	for id, size := range map[uint16]int{1: small, 2: large} {
		if err := tier.SetOwner(id, size, 0, 0); err != nil {
			b.Fatal(err)
		}
	}
	next := 0
	for b.Loop() {
		if next%512 == 0 { // half of the arena is small pages at least
			b.StopTimer()
			tier.RemoveOwner(2)
			for i := range 1 << 18 {
				reserve(1, next<<20+i)
			}
			b.StartTimer()
		}
		reserve(2, next)
		next++
	}
}
