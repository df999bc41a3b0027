package index

import (
	"runtime"
	"testing"

	"pgregory.net/rapid"
)

// The table has what a map of maps has, whatever is added and removed.
func TestTableIsAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const holders, limit = 90, 1000
		tab := NewTable(limit, holders)
		model := map[uint64]map[int]bool{}
		keys := rapid.IntRange(1, 2000).Draw(t, "keys")
		// many holders of few blocks, or few of many
		r := rapid.Uint64().Draw(t, "seed")
		next := func(n int) int {
			r = r*6364136223846793005 + 1442695040888963407
			return int(r>>33) % n
		}
		for range rapid.IntRange(1, 5000).Draw(t, "operations") {
			k, h := uint64(next(keys))*7, next(holders)
			switch op := next(10); {
			case op < 6:
				_, there := model[k]
				if ok := tab.Add(k, h); ok != (there || len(model) < limit) {
					t.Fatalf("Add %v, there %v, %d blocks", ok, there, len(model))
				} else if ok {
					if !there {
						model[k] = map[int]bool{}
					}
					model[k][h] = true
				}
			case op < 9 || next(500) > 0:
				tab.Remove(k, h)
				delete(model[k], h)
				if len(model[k]) == 0 {
					delete(model, k)
				}
			default:
				tab.RemoveAll(h)
				for k := range model {
					delete(model[k], h)
					if len(model[k]) == 0 {
						delete(model, k)
					}
				}
			}
		}
		if tab.Blocks() != len(model) {
			t.Fatalf("%d blocks, want %d", tab.Blocks(), len(model))
		}
		hits := make([]int, holders)
		for k := range keys {
			tab.Lookup([]uint64{uint64(k) * 7}, hits)
			for h, n := range hits {
				if model[uint64(k)*7][h] != (n == 1) {
					t.Fatalf("key %d, holder %d: %d", k, h, n)
				}
			}
		}
	})
}

func TestLookupCountsWithoutGaps(t *testing.T) {
	tab := NewTable(100, 3)
	for _, k := range []uint64{1, 2, 3, 4} {
		tab.Add(k, 0)
	}
	tab.Add(1, 1)
	tab.Add(3, 1)
	tab.Add(2, 2)
	hits := make([]int, 3)
	tab.Lookup([]uint64{1, 2, 3, 4, 5}, hits)
	if hits[0] != 4 || hits[1] != 1 || hits[2] != 0 {
		t.Errorf("%v", hits)
	}
	if tab.Add(9, 3) || tab.Add(9, -1) {
		t.Error("a holder that does not exist")
	}
	if n := testing.AllocsPerRun(10, func() { tab.Lookup([]uint64{1, 2, 3, 4, 5}, hits) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A table that grows keeps its blocks, also those with many holders.
func TestGrow(t *testing.T) {
	tab := NewTable(4, 60)
	for h := range 60 {
		tab.Add(7, h)
	}
	tab.Grow(130)
	tab.Grow(10) // less than it has
	if !tab.Add(7, 129) || tab.Add(7, 130) {
		t.Error("a holder that came with the growth, or one that does not exist")
	}
	hits := make([]int, 130)
	tab.Lookup([]uint64{7}, hits)
	if hits[59] != 1 || hits[60] != 0 || hits[129] != 1 {
		t.Errorf("%v", hits)
	}
}

// An eighth of ten million blocks takes an eighth of 300 MiB: the table has slots by powers of two.
// Blocks above the bound are counted.
func TestMemoryOfBlocks(t *testing.T) {
	const blocks = 10_000_000 / 8
	var was, is runtime.MemStats
	runtime.ReadMemStats(&was)
	tab := NewTable(blocks, 64)
	for i := range uint64(blocks) + 5 {
		tab.Add(i*0x2545f4914f6cdd1d, int(i%64))
	}
	runtime.GC()
	runtime.ReadMemStats(&is)
	if n := int64(is.HeapAlloc) - int64(was.HeapAlloc); n > 300<<20/8 {
		t.Errorf("%d blocks take %d bytes", tab.Blocks(), n)
	}
	if tab.Blocks() != blocks || tab.Dropped() != 5 {
		t.Errorf("%d blocks, %d dropped", tab.Blocks(), tab.Dropped())
	}
}

func BenchmarkLookup(b *testing.B) {
	tab := NewTable(1<<20, 64)
	keys := make([]uint64, 2048) // 32k tokens in blocks of 16
	for i := range keys {
		keys[i] = uint64(i+1) * 0x2545f4914f6cdd1d
		for h := range i%8 + 1 {
			tab.Add(keys[i], h)
		}
	}
	hits := make([]int, 64)
	for b.Loop() {
		tab.Lookup(keys, hits)
	}
}
