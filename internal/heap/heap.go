// SPDX-License-Identifier: Apache-2.0

// Package heap is a binary heap whose items know their place in it, so that any of them can be moved or taken out. What is compared stands in
// the heap itself: the items are cold where there are many. Nothing is allocated but the heap's own array, and there is no lock.
package heap

import "time"

// Key orders items: by time, and among equals by number.
type Key struct {
	At  time.Duration
	Seq uint64
}

func (k *Key) before(o *Key) bool { return k.At < o.At || k.At == o.At && k.Seq < o.Seq }

// Item is in one heap at a time, or in none, as its zero value is. It must not be copied while it is in one.
type Item[T any] struct {
	Value T
	place int // one more than its index; 0: in none
}

// Queued reports whether it is in a heap.
func (it *Item[T]) Queued() bool { return it.place > 0 }

// Heap is of items that are its own while they are in it. The zero value is empty.
type Heap[T any] struct{ all []entry[T] }

type entry[T any] struct {
	key  Key
	item *Item[T]
}

// Len is how many items there are.
func (h *Heap[T]) Len() int { return len(h.all) }

// At is the key and the item at place i: the first one at 0, the others in no order but that of a heap.
func (h *Heap[T]) At(i int) (Key, *Item[T]) { return h.all[i].key, h.all[i].item }

// Set gives an item its key, and puts it in if it is in no heap.
func (h *Heap[T]) Set(it *Item[T], k Key) {
	if it.place == 0 {
		h.all = append(h.all, entry[T]{k, it})
		h.up(len(h.all) - 1)
		return
	}
	h.all[it.place-1].key = k
	h.settle(it.place - 1)
}

// Remove takes an item out, if it is in.
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

// settle brings entry i to its place.
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
