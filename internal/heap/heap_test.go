package heap

import (
	"math/rand/v2"
	"testing"
	"time"
)

// Items are inserted, moved and removed in random order: the heap is valid after every step, each
// item has its position, and the first item is the least.
func TestHeap(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		items := make([]Item[int], 1+rng.IntN(100))
		for i := range items {
			items[i].Value = i
		}
		var h Heap[int]
		in := map[int]Key{}
		for range 2000 {
			switch it := &items[rng.IntN(len(items))]; rng.IntN(3) {
			case 0:
				h.Remove(it)
				delete(in, it.Value)
			case 1:
				if h.Len() == 0 {
					break
				}
				k, first := h.At(0)
				for i, o := range in {
					if o.before(&k) {
						t.Fatalf("seed %d: item %d at %+v comes first, %d at %+v is in", seed, first.Value, k, i, o)
					}
				}
				h.Remove(first)
				delete(in, first.Value)
			default:
				k := Key{time.Duration(rng.IntN(20)), rng.Uint64N(5)}
				h.Set(it, k)
				in[it.Value] = k
			}
			if h.Len() != len(in) {
				t.Fatalf("seed %d: %d items, want %d", seed, h.Len(), len(in))
			}
			for i := range h.all {
				k, it := h.At(i)
				if it.place != i+1 || in[it.Value] != k || i > 0 && k.before(&h.all[(i-1)/2].key) {
					t.Fatalf("seed %d: entry %d: %+v, item %d at place %d", seed, i, k, it.Value, it.place)
				}
			}
			for i := range items {
				if _, is := in[i]; is != items[i].Queued() {
					t.Fatalf("seed %d: item %d is in: %v, Queued is %v", seed, i, is, items[i].Queued())
				}
			}
		}
	}
}

func TestNothingIsAllocated(t *testing.T) {
	var h Heap[int]
	items := make([]Item[int], 64)
	at := time.Duration(0)
	step := func() {
		for i := range items {
			at = (at*5 + 7) % 1000
			h.Set(&items[i], Key{At: at})
		}
		for h.Len() > 0 {
			_, it := h.At(0)
			h.Remove(it)
		}
	}
	if n := testing.AllocsPerRun(100, step); n != 0 {
		t.Errorf("%g allocations", n)
	}
}
