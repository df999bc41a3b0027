package parseblock

import (
	"slices"
	"testing"

	"github.com/kvspray/kvspray/layout"
)

// TestHeadShare: the heads of each rank, written out. If there are more ranks than heads,
// neighboring ranks share a head, as their queries do: 0 0 1 1 and not 0 1 0 1.
func TestHeadShare(t *testing.T) {
	for _, c := range []struct {
		all          uint64
		first, count []uint64 // of each rank
	}{
		{8, []uint64{0}, []uint64{8}},
		{8, []uint64{0, 4}, []uint64{4, 4}},
		{8, []uint64{0, 2, 4, 6}, []uint64{2, 2, 2, 2}},
		{4, []uint64{0, 1, 2, 3}, []uint64{1, 1, 1, 1}},
		{4, []uint64{0, 0, 1, 1, 2, 2, 3, 3}, []uint64{1, 1, 1, 1, 1, 1, 1, 1}},
		{2, []uint64{0, 0, 0, 1, 1, 1}, []uint64{1, 1, 1, 1, 1, 1}},
		{1, []uint64{0, 0, 0, 0}, []uint64{1, 1, 1, 1}},
		// Not divisible: every head once.
		{5, []uint64{0, 2}, []uint64{2, 3}},
		{4, []uint64{0, 1, 2}, []uint64{1, 1, 2}},
		{7, []uint64{0, 1, 3, 5}, []uint64{1, 2, 2, 2}},
	} {
		size := uint64(len(c.first))
		for rank := range size {
			if first, count := HeadShare(c.all, rank, size); first != c.first[rank] ||
				count != c.count[rank] {
				t.Errorf("rank %d of %d has heads [%d, +%d) of %d, want [%d, +%d)", rank, size, first, count,
					c.all, c.first[rank], c.count[rank])
			}
		}
	}
}

// TestAssignKeepsToOne: a source that already contributes also sends the rest of what it holds,
// whatever its load, because each further source is one more to wait for.
func TestAssignKeepsToOne(t *testing.T) {
	l := &layout.Layout{Groups: []layout.Group{{TokensPerBlock: 16, NumBlocks: 4,
		Strategy: PackedNHD, Params: map[string]int64{"kv_heads": 4, "heads": 4}}}}
	for i, n := range []string{"a", "b", "c"} {
		l.Groups[0].Layers = append(l.Groups[0].Layers, layout.Layer{Name: n, Index: i,
			Base: uint64(i) * 4 * 4096, BlockStride: 4096, PageBytes: 4096})
	}
	some := *l
	some.Groups = slices.Clone(l.Groups)
	some.Groups[0].Layers = l.Groups[0].Layers[:1]
	// Only the loaded source holds the first layer; all sources hold the others.
	rest := *l
	rest.Groups = slices.Clone(l.Groups)
	rest.Groups[0].Layers = l.Groups[0].Layers[1:]
	shares, err := Assign(Default(), []*layout.Layout{&rest, l, &rest}, l,
		func(source int) uint64 { return []uint64{1, 9, 0}[source] })
	if err != nil || len(shares) != 1 || shares[0].Source != 1 || shares[0].Layers() != 3 {
		t.Errorf("got %+v, %v; want all of source 1", shares, err)
	}
	// Without such a layer, the least loaded source sends the first layer and therefore the rest.
	shares, err = Assign(Default(), []*layout.Layout{l, &some, l}, l,
		func(source int) uint64 { return []uint64{5, 0, 4}[source] })
	if err != nil || len(shares) != 2 || shares[0].Source != 1 || shares[0].Layers() != 1 ||
		shares[1].Source != 2 || shares[1].Layers() != 2 {
		t.Errorf("got %+v, %v; want a layer of source 1 and two of source 2", shares, err)
	}
}
