// Package heap is a binary heap whose items store their position, so that any of them can be moved
// or removed. The keys are stored in the heap itself, because many items would be cold in the
// cache. It allocates only its array, and has no lock.
package heap

import "time"

// Key orders items: by time, and among equals by number.
type Key struct {
	At  time.Duration
	Seq uint64
}

func (k *Key) before(o *Key) bool { return k.At < o.At || k.At == o.At && k.Seq < o.Seq }

// Item is in at most one heap; the zero value is in none. It must not be copied while it is in one.
type Item[T any] struct {
	Value T
	place int // its index plus one; 0: in none
}

// Queued reports whether it is in a heap.
func (it *Item[T]) Queued() bool { return it.place > 0 }

// Heap is a heap of items. The zero value is empty.
type Heap[T any] struct{ all []entry[T] }

type entry[T any] struct {
	key  Key
	item *Item[T]
}

// Len is the number of items.
func (h *Heap[T]) Len() int { return len(h.all) }

// At returns the key and the item at index i: the first in order at 0, the others in the order of a
// heap.
func (h *Heap[T]) At(i int) (Key, *Item[T]) { return h.all[i].key, h.all[i].item }

// Set sets an item's key, and inserts the item if it is in no heap.
func (h *Heap[T]) Set(it *Item[T], k Key) {
	if it.place == 0 {
		h.all = append(h.all, entry[T]{k, it})
		h.up(len(h.all) - 1)
		return
	}
	h.all[it.place-1].key = k
	h.settle(it.place - 1)
}

// Remove removes an item if it is in the heap.
func (h *Heap[T]) Remove(it *Item[T]) {
	i := it.place - 1
	if i < 0 {
		return
	}
	it.place = 0
	last := len(h.all) - 1
	moved := h.all[last]
	h.all[last] = entry[T]{}
	h.all = h.all[:last]
	if i < last {
		h.all[i] = moved
		h.settle(i)
	}
}

// settle moves entry i to its position.
func (h *Heap[T]) settle(i int) {
	if h.down(i) == i {
		h.up(i)
	}
}

func (h *Heap[T]) up(i int) {
	all := h.all
	x := all[i]
	for ; i > 0 && x.key.before(&all[(i-1)/2].key); i = (i - 1) / 2 {
		all[i] = all[(i-1)/2]
		all[i].item.place = i + 1
	}
	all[i] = x
	x.item.place = i + 1
}

func (h *Heap[T]) down(i int) int {
	all := h.all
	x := all[i]
	for {
		child := 2*i + 1
		if child >= len(all) {
			break
		}
		if child+1 < len(all) && all[child+1].key.before(&all[child].key) {
			child++
		}
		if !all[child].key.before(&x.key) {
			break
		}
		all[i] = all[child]
		all[i].item.place = i + 1
		i = child
	}
	all[i] = x
	x.item.place = i + 1
	return i
}
