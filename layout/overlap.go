package layout

import (
	"cmp"
	"fmt"
	"slices"
)

// Bounds of the work for checking one layout.
const (
	maxScattered = 1 << 16 // progressions of one layout
	maxCompared  = 1 << 24 // pairs of them
)

// progression is count pieces of size bytes at distance stride: bytes of one plane over all blocks.
type progression struct {
	start, stride, count, size uint64
	region, layer              int
	group, table               int
	// block 0's bytes of the plane lie in [lo, hi); other blocks are multiples of block away
	lo, hi, block uint64
}

func (p *progression) end() uint64 { return p.start + (p.count-1)*p.stride + p.size }

// checkOverlap refuses two layers that share a byte. Layers of different block tables may have the
// same pages: hybrid models draw the block tables of all groups from one pool, so that a block id
// belongs to one table at a time.
func (l *Layout) checkOverlap(all []progression) error {
	slices.SortFunc(all, func(a, b progression) int {
		return cmp.Or(cmp.Compare(a.region, b.region), cmp.Compare(a.start, b.start))
	})
	for first := 0; first < len(all); {
		end := first + 1
		for end < len(all) && all[end].region == all[first].region {
			end++
		}
		if region := all[first:end]; !apart(region) {
			if err := l.compare(region); err != nil {
				return err
			}
		}
		first = end
	}
	return nil
}

// apart reports whether progressions of one stride use bytes that differ modulo the stride, as
// interleaved layers do. It may report false wrongly; each pair is checked then.
func apart(all []progression) bool {
	type interval struct{ lo, hi uint64 }
	stride := all[0].stride
	in := make([]interval, 0, len(all))
	for i := range all {
		if all[i].stride != stride || all[i].size > stride {
			return false
		}
		lo := all[i].start % stride
		if lo+all[i].size > stride { // wraps round
			in = append(in, interval{0, lo + all[i].size - stride})
		}
		in = append(in, interval{lo, min(stride, lo+all[i].size)})
	}
	slices.SortFunc(in, func(a, b interval) int { return cmp.Compare(a.lo, b.lo) })
	for i := 1; i < len(in); i++ {
		if in[i].lo < in[i-1].hi {
			return false
		}
	}
	return true
}

func (l *Layout) compare(all []progression) error {
	work := 0
	for i := range all {
		a := &all[i]
		for k := i + 1; k < len(all); k++ {
			b := &all[k]
			if b.start >= a.end() {
				break
			}
			if work++; work > maxCompared {
				return refuse("layers", l.NumLayers(), "their pages interleave in too many ways to be checked",
					"register fewer, more regular layers")
			}
			if a.table != b.table && samePages(a, b) || !overlap(*a, *b) {
				continue
			}
			la, lb := &l.Groups[a.group].Layers[a.layer], &l.Groups[b.group].Layers[b.layer]
			if la == lb {
				return refuse(fmt.Sprintf("groups[%d].params", a.group), fmt.Sprintf("%.200s",
					fmt.Sprint(l.Groups[a.group].Params)),
					fmt.Sprintf("two planes of layer %q share bytes of region %d", la.Name, a.region),
					"check the parameters that place planes: state_offset, page_bytes and the strides")
			}
			return refuse(fmt.Sprintf("groups[%d].layers[%d].base", b.group, b.layer), lb.Base,
				fmt.Sprintf("layer %q shares bytes of region %d with layer %q (base %d)", lb.Name, b.region,
					la.Name, la.Base),
				"register each layer's own pages; only layers of different block tables may share pages")
		}
	}
	return nil
}

// samePages reports whether a and b can share bytes only within one block id, as in a slab of equal
// blocks in which layers of several groups begin at different offsets.
func samePages(a, b *progression) bool {
	return a.start == b.start && a.stride == b.stride && a.size == b.size ||
		a.block == b.block && max(a.hi, b.hi)-min(a.lo, b.lo) <= a.block
}

// overlap reports whether a piece of a and a piece of b share a byte. It is exact for equal
// strides. For different strides it reports an overlap unless the pieces are disjoint modulo the
// common divisor of the strides.
func overlap(a, b progression) bool {
	if a.start > b.start {
		a, b = b, a
	}
	if b.start >= a.end() {
		return false
	}
	if a.stride == b.stride && a.stride != 0 {
		// b's piece j and a's piece i share a byte where d-k*stride lies in (-b.size, a.size), with
		// k = i-j.
		d := b.start - a.start
		for _, k := range [2]uint64{d / a.stride, d/a.stride + 1} {
			if k > a.count-1 {
				continue // even j = 0 needs a piece beyond the end of a; larger i are further away
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
