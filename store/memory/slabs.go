package memory

import (
	"cmp"
	"fmt"
	"slices"
)

// unit is what slots are counted in and aligned to: O_DIRECT requires it of buffers.
const unit = 4096

// slabs divides the arena into slabs of one size, and slabs into slots of one class. A slot is
// named by its offset in units. Each slot that is taken carries the number of its page's node, so
// that a slab's pages are found without a walk over all pages; what a node is does not matter here.
//
// No call takes longer than the slots of one slab, or the number of slabs.
type slabs struct {
	perSlab uint32 // units
	all     []slab
	idle    []uint32 // slabs without a class
	classes []class  // 0 is none
}

type slab struct {
	class uint8
	free  []uint32 // slots
	nodes []uint32 // of each slot's page, in the order of slots; 0: none
}

type class struct {
	bytes uint32   // of a slot, a multiple of unit
	open  []uint32 // slabs with free slots
	free  int      // slots
}

func newSlabs(arena, size uint64) *slabs {
	s := &slabs{perSlab: uint32(size / unit), all: make([]slab, arena/size),
		classes: make([]class, 1)}
	for i := len(s.all) - 1; i >= 0; i-- {
		s.idle = append(s.idle, uint32(i))
	}
	return s
}

// maxClasses bounds the sizes of pages that one arena holds; 255 is evict.Any.
const maxClasses = 254

// classFor is the class of pages of a size.
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

// classOf is the class of the slab that has a slot.
func (s *slabs) classOf(slot uint32) uint8 { return s.all[slot/s.perSlab].class }

// take gives a free slot of a class. The caller names it next.
func (s *slabs) take(c uint8) (slot uint32, ok bool) {
	cl := &s.classes[c]
	if len(cl.open) == 0 && !s.begin(c) {
		return 0, false
	}
	sl := &s.all[cl.open[len(cl.open)-1]]
	slot = sl.free[len(sl.free)-1]
	sl.free = sl.free[:len(sl.free)-1]
	if cl.free--; len(sl.free) == 0 {
		cl.open = cl.open[:len(cl.open)-1]
	}
	return slot, true
}

// begin gives an idle slab to a class.
func (s *slabs) begin(c uint8) bool {
	if len(s.idle) == 0 {
		return false
	}
	cl := &s.classes[c]
	number := s.idle[len(s.idle)-1]
	s.idle = s.idle[:len(s.idle)-1]
	units := cl.bytes / unit
	n := s.perSlab / units
	sl := slab{class: c, free: make([]uint32, 0, n), nodes: make([]uint32, n)}
	for i := n; i > 0; i-- {
		sl.free = append(sl.free, number*s.perSlab+(i-1)*units)
	}
	s.all[number] = sl
	cl.open = append(cl.open, number)
	cl.free += int(n)
	return true
}

// name stores the node of the page in a slot.
func (s *slabs) name(slot, node uint32) {
	sl := &s.all[slot/s.perSlab]
	sl.nodes[slot%s.perSlab/(s.classes[sl.class].bytes/unit)] = node
}

// give takes a slot back.
func (s *slabs) give(slot uint32) {
	s.name(slot, 0)
	number := slot / s.perSlab
	sl := &s.all[number]
	cl := &s.classes[sl.class]
	if len(sl.free) == 0 {
		cl.open = append(cl.open, number)
	}
	sl.free = append(sl.free, slot)
	cl.free++
}

// used is how many slots of a slab are taken.
func (s *slabs) used(number uint32) int {
	return len(s.all[number].nodes) - len(s.all[number].free)
}

// byUse lists the slabs of a class, those with the fewest pages first.
func (s *slabs) byUse(c uint8) (out []uint32) {
	for i := range s.all {
		if s.all[i].class == c {
			out = append(out, uint32(i))
		}
	}
	slices.SortFunc(out, func(a, b uint32) int { return cmp.Compare(s.used(a), s.used(b)) })
	return out
}

// freeOutside counts the free slots of a slab's class that other slabs have.
func (s *slabs) freeOutside(number uint32) int {
	sl := &s.all[number]
	return s.classes[sl.class].free - len(sl.free)
}

// clear takes a slab's free slots away, so that no page moves into it.
func (s *slabs) clear(number uint32) {
	sl := &s.all[number]
	cl := &s.classes[sl.class]
	cl.free -= len(sl.free)
	cl.open = slices.DeleteFunc(cl.open, func(n uint32) bool { return n == number })
	sl.free = nil
}

// retire makes a slab without pages and free slots one without a class.
func (s *slabs) retire(number uint32) {
	s.all[number] = slab{}
	s.idle = append(s.idle, number)
}
