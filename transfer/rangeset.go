package transfer

import "math/bits"

// RangeSet is a set of chunks that are ready and not assigned: readiness adds to it, lanes take
// from it, failed slices go back. Bounded by its size; no operation allocates. Not safe for
// concurrent use.
type RangeSet struct {
	words []uint64
	n     uint32
	count uint32
	hint  uint32 // no member below
}

// NewRangeSet returns an empty set over chunks [0, n).
func NewRangeSet(n uint32) *RangeSet {
	return &RangeSet{words: make([]uint64, (uint64(n)+63)/64), n: n, hint: n}
}

// Count is the number of chunks in the set.
func (s *RangeSet) Count() uint32 { return s.count }

// Len is the number of chunks that the set can hold.
func (s *RangeSet) Len() uint32 { return s.n }

// Contains reports whether chunk c is in the set.
func (s *RangeSet) Contains(c uint32) bool { return c < s.n && s.words[c/64]&(1<<(c%64)) != 0 }

// Add puts chunks r in and returns how many were new. Chunks outside are ignored.
func (s *RangeSet) Add(r Range) uint32 {
	first, end := clip(r, s.n)
	if first == end {
		return 0
	}
	s.hint = min(s.hint, first)
	added := s.apply(first, end, func(w *uint64, mask uint64) uint64 {
		fresh := mask &^ *w
		*w |= mask
		return fresh
	})
	s.count += added
	return added
}

// Remove takes chunks r out and returns how many were in.
func (s *RangeSet) Remove(r Range) uint32 {
	first, end := clip(r, s.n)
	gone := s.apply(first, end, func(w *uint64, mask uint64) uint64 {
		hit := mask & *w
		*w &^= mask
		return hit
	})
	s.count -= gone
	return gone
}

// Take removes the first run of the set, at most limit chunks of it. Count is 0 where the set is
// empty.
func (s *RangeSet) Take(limit uint32) Range {
	r := s.Peek(limit)
	s.Remove(r)
	if r.Count > 0 {
		s.hint = r.End()
	}
	return r
}

// Peek is Take without taking.
func (s *RangeSet) Peek(limit uint32) Range {
	if s.count == 0 || limit == 0 {
		return Range{}
	}
	first := s.next(s.hint, s.n, true)
	s.hint = first
	// No further than asked for: a slice must not cost a scan of the whole run that it begins.
	end := s.next(first, first+min(limit, s.n-first), false)
	return Range{First: first, Count: end - first}
}

// Ranges yields the runs of the set in order.
func (s *RangeSet) Ranges() func(yield func(Range) bool) {
	return func(yield func(Range) bool) {
		for c := s.next(0, s.n, true); c < s.n; {
			end := s.next(c, s.n, false)
			if !yield(Range{First: c, Count: end - c}) {
				return
			}
			c = s.next(end, s.n, true)
		}
	}
}

// Clear empties the set.
func (s *RangeSet) Clear() {
	clear(s.words)
	s.count, s.hint = 0, s.n
}

func (s *RangeSet) apply(first, end uint32, fn func(w *uint64, mask uint64) uint64) uint32 {
	var n uint32
	for first < end {
		lo := first % 64
		span := min(64-lo, end-first)
		n += uint32(bits.OnesCount64(fn(&s.words[first/64], ^uint64(0)>>(64-span)<<lo)))
		first += span
	}
	return n
}

// next is the first chunk from c on, and before end, whose membership is want, or end.
func (s *RangeSet) next(c, end uint32, want bool) uint32 {
	for c < end {
		w := s.words[c/64]
		if !want {
			w = ^w
		}
		if w = w >> (c % 64) << (c % 64); w != 0 {
			return min(end, c/64*64+uint32(bits.TrailingZeros64(w)))
		}
		c = (c/64 + 1) * 64
	}
	return end
}
