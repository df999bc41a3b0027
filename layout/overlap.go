package layout

import (
	"cmp"
	"fmt"
	"slices"
)

// checkOverlap refuses two layers that share a byte. Layers of different groups may lie on the very same pages: hybrid models
// draw the block tables of all groups from one pool, so that a block id belongs to one group at a time.
func (l *Layout) checkOverlap(all []progression) error {
	slices.SortFunc(all, func(a, b progression) int {
		return cmp.Or(cmp.Compare(a.region, b.region), cmp.Compare(a.start, b.start))
	})
	for i, a := range all {
		for _, b := range all[i+1:] {
			if b.region != a.region || b.start >= a.end() {
				break
			}
			if a.group != b.group && a.start == b.start && a.stride == b.stride && a.size == b.size {
				continue
			}
			if !overlap(a, b) {
				continue
			}
			la, lb := &l.Groups[a.group].Layers[a.layer], &l.Groups[b.group].Layers[b.layer]
			return refuse(fmt.Sprintf("groups[%d].layers[%d].base", b.group, b.layer), lb.Base,
				fmt.Sprintf("layer %q shares bytes of region %d with layer %q (base %d)", lb.Name, b.region, la.Name, la.Base),
				"register each layer's own pages; only layers of different groups may have the same ones")
		}
	}
	return nil
}

// overlap says whether any piece of a and any of b share a byte. Exact for equal strides; for different ones it errs towards
// overlap unless the pieces are disjoint modulo the common divisor of the strides.
func overlap(a, b progression) bool {
	if a.start > b.start {
		a, b = b, a
	}
	if b.start >= a.end() {
		return false
	}
	if a.stride == b.stride && a.stride != 0 {
		// b's piece j and a's piece i share a byte where d-k*stride lies in (-b.size, a.size), with k = i-j.
		d := b.start - a.start
		for _, k := range [2]uint64{d / a.stride, d/a.stride + 1} {
			if k > a.count-1 {
				continue // even j = 0 needs a piece that a does not have; larger i are further away
			}
			if off := k * a.stride; off <= d && d-off < a.size || off > d && off-d < b.size {
				return true
			}
		}
		return false
	}
	g := gcd(a.stride, b.stride)
	if a.count == 1 && b.count == 1 || g == 0 {
		return true // both contiguous (or repeated in place) and their extents meet
	}
	ra, rb := a.start%g, b.start%g
	d := (rb + g - ra) % g // from a's residue up to b's
	return a.size+b.size > g || d < a.size || g-d < b.size
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
