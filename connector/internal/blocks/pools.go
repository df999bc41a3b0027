package blocks

import "github.com/kvspray/kvspray/layout"

// poolsOf maps each block table to one table whose blocks are the same memory: hybrid models place
// the layers of all groups over one another, and a block id belongs to one table at a time.
func poolsOf(l *layout.Layout, tables []layout.Table) []int {
	pools := make([]int, len(tables))
	for t := range tables {
		pools[t] = t
		for o := range t {
			from, to := pools[t], pools[o]
			if from == to || !sharePages(l.Groups[tables[o].First:tables[o].End],
				l.Groups[tables[t].First:tables[t].End]) {
				continue
			}
			for i := range pools[:t+1] {
				if pools[i] == from {
					pools[i] = to
				}
			}
		}
	}
	return pools
}

// sharePages reports whether groups of two block tables share pages.
func sharePages(a, b []layout.Group) bool {
	for i := range a {
		for k := range b {
			if onePool(&a[i], &b[k]) {
				return true
			}
		}
	}
	return false
}

// onePool reports whether a layer of a and one of b share pages. With equal strides they share
// whole blocks or nothing, which the layout's own check has verified; with unequal strides any
// common range counts.
func onePool(a, b *layout.Group) bool {
	for i := range a.Layers {
		for k := range b.Layers {
			x, y := &a.Layers[i], &b.Layers[k]
			if x.Base > y.Base {
				x, y = y, x
			}
			n := a.NumBlocks
			if x == &b.Layers[k] {
				n = b.NumBlocks
			}
			if x.Region != y.Region || y.Base-x.Base >= uint64(n)*x.BlockStride {
				continue
			}
			if x.BlockStride != y.BlockStride {
				return true
			}
			if d := (y.Base - x.Base) % x.BlockStride; d < x.PageBytes || x.BlockStride-d < y.PageBytes {
				return true
			}
		}
	}
	return false
}
