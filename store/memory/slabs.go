// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"fmt"
	"slices"
)

// unit is what slots are counted in and aligned to: what O_DIRECT wants of buffers.
const unit = 4096

// slabs divides the arena into slabs of one size, and slabs into slots of one class. A slot is
// named by its offset in units. It knows nothing of pages.
type slabs struct {
	perSlab uint32 // units
	class   []uint8
	idle    []uint32 // slabs without a class
	classes []class  // 0 is none
}

type class struct {
	bytes uint32   // of a slot, a multiple of unit
	free  []uint32 // slots
}

func newSlabs(arena, slab uint64) *slabs {
	s := &slabs{perSlab: uint32(slab / unit), class: make([]uint8, arena/slab),
		classes: make([]class, 1)}
	for i := len(s.class) - 1; i >= 0; i-- {
		s.idle = append(s.idle, uint32(i))
	}
	return s
}

// maxClasses bounds the sizes of pages that one arena holds; 255 is evict.Any.
const maxClasses = 254

// classFor is the class of pages of so many bytes.
func (s *slabs) classFor(bytes int) (uint8, error) {
	size := uint32((bytes + unit - 1) / unit * unit)
	for i := range s.classes {
		if s.classes[i].bytes == size {
			return uint8(i), nil
		}
	}
	if len(s.classes) > maxClasses {
		return 0,
			fmt.Errorf("memory: page of %d bytes: the store holds pages of %d sizes already, "+
				"and not of more",
				bytes, maxClasses)
	}
	s.classes = append(s.classes, class{bytes: size})
	return uint8(len(s.classes) - 1), nil
}

// take gives a free slot of a class.
func (s *slabs) take(c uint8) (slot uint32, ok bool) {
	cl := &s.classes[c]
	if len(cl.free) == 0 {
		if len(s.idle) == 0 {
			return 0, false
		}
		slab := s.idle[len(s.idle)-1]
		s.idle = s.idle[:len(s.idle)-1]
		s.class[slab] = c
		units := cl.bytes / unit
		for n := s.perSlab / units; n > 0; n-- {
			cl.free = append(cl.free, slab*s.perSlab+(n-1)*units)
		}
	}
	slot = cl.free[len(cl.free)-1]
	cl.free = cl.free[:len(cl.free)-1]
	return slot, true
}

// give takes a slot back.
func (s *slabs) give(slot uint32) {
	cl := &s.classes[s.class[slot/s.perSlab]]
	cl.free = append(cl.free, slot)
}

// freeOutside counts the free slots of a slab's class that other slabs have.
func (s *slabs) freeOutside(slab uint32) (n int) {
	for _, slot := range s.classes[s.class[slab]].free {
		if slot/s.perSlab != slab {
			n++
		}
	}
	return n
}

// clear takes a slab's free slots away, so that no page moves into it.
func (s *slabs) clear(slab uint32) {
	cl := &s.classes[s.class[slab]]
	cl.free = slices.DeleteFunc(cl.free, func(slot uint32) bool { return slot/s.perSlab == slab })
}

// retire makes a slab without pages and free slots one without a class.
func (s *slabs) retire(slab uint32) {
	s.class[slab] = 0
	s.idle = append(s.idle, slab)
}
