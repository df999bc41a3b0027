// Package offheap owns arrays outside Go's heap: those that are too large for the garbage collector
// to count, and buffers that O_DIRECT reads into.
//
// Invariants: an array is zero when it is made, is aligned to a page of memory, does not move, and
// holds no Go pointer. Memory is taken from the kernel when it is first touched, in huge pages
// where the kernel has them. The owner frees an array once, when it is not used any more. No
// goroutines.
package offheap

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hugePage is where arrays begin to ask for huge pages: a lookup in a table of many megabytes
// misses the TLB each time otherwise.
const hugePage = 2 << 20

// Array is n elements of T.
type Array[T any] struct {
	elems []T
	raw   []byte
}

// New makes an array of n elements. T must hold no pointers.
func New[T any](n int) (*Array[T], error) {
	var zero T
	size := uint64(n) * uint64(unsafe.Sizeof(zero))
	if n < 1 || size/uint64(n) != uint64(unsafe.Sizeof(zero)) || size > 1<<46 {
		return nil, fmt.Errorf("offheap: %d elements of %d bytes: not a size of memory", n,
			unsafe.Sizeof(zero))
	}
	raw, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil,
			fmt.Errorf("offheap: map %d bytes: %w; use a smaller table, or raise the limit on "+
				"memory", size, err)
	}
	if size >= hugePage {
		_ = unix.Madvise(raw, unix.MADV_HUGEPAGE) // advice: small pages do as well
	}
	elems := unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(raw))), n)
	return &Array[T]{elems: elems, raw: raw}, nil
}

// Elems is the array. It is dead after Free.
func (a *Array[T]) Elems() []T { return a.elems }

// Bytes is how many bytes of addresses the array takes.
func (a *Array[T]) Bytes() int { return len(a.raw) }

// Free gives the memory back. Idempotent; nil is an empty array.
func (a *Array[T]) Free() {
	if a == nil || a.raw == nil {
		return
	}
	raw := a.raw
	a.elems, a.raw = nil, nil
	_ = unix.Munmap(raw) // fails for a range that is none
}
