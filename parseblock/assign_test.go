package parseblock

import (
	"strings"
	"testing"

	"github.com/kvspray/kvspray/layout"
)

// TestAssign: the sources that Assign chooses.
func TestAssign(t *testing.T) {
	reg := Default()
	layers := func(strategy string, page uint64, params map[string]int64,
		names ...string) *layout.Layout {
		g := layout.Group{TokensPerBlock: 16, NumBlocks: 4, Strategy: strategy, Params: params}
		for i, n := range names {
			g.Layers = append(g.Layers, layout.Layer{Name: n, Index: i, Base: uint64(i) * 4 * page,
				BlockStride: page, PageBytes: page})
		}
		return &layout.Layout{Groups: []layout.Group{g}}
	}
	mla := func(names ...string) *layout.Layout { return layers(MLA, 16*1152, nil, names...) }
	kv := func(rank, size int64) *layout.Layout {
		_, own := HeadShare(4, uint64(rank), uint64(size))
		return layers(PackedNHD, 16*own*64, map[string]int64{"kv_heads": 4, "tp_rank": rank,
			"tp_size": size}, "a", "b")
	}
	ranks := func(size int64) (out []*layout.Layout) {
		for r := range size {
			out = append(out, kv(r, size))
		}
		return out
	}
	for name, c := range map[string]struct {
		sources []*layout.Layout
		dst     *layout.Layout
		load    []uint64
		want    []int // sources that give
		err     string
	}{
		"one of replicas": {[]*layout.Layout{mla("a"), mla("a"), mla("a")}, mla("a"),
			[]uint64{3, 1, 2}, []int{1}, ""},
		"stages": {[]*layout.Layout{mla("a"), mla("b")}, mla("a", "b"), nil,
			[]int{0, 1}, ""},
		"stages, the other way": {[]*layout.Layout{mla("a", "b")}, mla("b"), nil, []int{0}, ""},
		"a stage is missing": {[]*layout.Layout{mla("a")}, mla("a", "b"), nil, nil,
			`layer "b": latent = heads [0, 1): no source has them`},
		"two to one": {ranks(2), kv(0, 1), nil, []int{0, 1}, ""},
		"one to two": {ranks(1), kv(1, 2), nil, []int{0}, ""},
		"eight have four": {ranks(8), kv(0, 1), []uint64{9, 0, 0, 9, 0, 9, 9, 0},
			[]int{1, 2, 4, 7}, ""},
		"two of eight give a half": {ranks(8), kv(1, 2), []uint64{0, 0, 0, 0, 1, 0, 1, 0},
			[]int{5, 7}, ""},
		"uneven heads": {ranks(3), kv(0, 1), nil, []int{0, 1, 2}, ""},
		"a rank is missing": {ranks(4)[1:], kv(0, 1), nil, nil,
			`k = heads [0, 1): no source has them`},
		"the last is missing": {ranks(4)[:3], kv(0, 1), nil, nil,
			`k = heads [3, 4): no source has them`},
		"two divisions": {append(ranks(2), ranks(3)...), kv(0, 1), nil, nil,
			"two sources overlap in part"},
		"another kind": {[]*layout.Layout{mla("a", "b")}, kv(0, 1), nil, nil,
			"k = missing and present"},
	} {
		t.Run(name, func(t *testing.T) {
			var load func(int) uint64
			if c.load != nil {
				load = func(i int) uint64 { return c.load[i] }
			}
			shares, err := Assign(reg, c.sources, c.dst, load)
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatalf("got %v, want %q", err, c.err)
				}
				return
			}
			if err != nil || len(shares) != len(c.want) {
				t.Fatalf("%d shares, %v; want %v", len(shares), err, c.want)
			}
			for i, s := range shares {
				if s.Source != c.want[i] {
					t.Errorf("share %d is of source %d, want %v", i, s.Source, c.want)
				}
			}
		})
	}
}

// TestNothingStaysBehind: a plane of a layer that only one side has is refused by name, whichever
// side has it: a cache without its values would produce fluent wrong text.
func TestNothingStaysBehind(t *testing.T) {
	reg := Default()
	mk := func(values bool) *layout.Layout {
		l := &layout.Layout{DType: "fp8", Groups: []layout.Group{{TokensPerBlock: 16, NumBlocks: 4,
			Strategy: SGLangK, Params: map[string]int64{"heads": 2},
			Layers: []layout.Layer{{Name: "a#k", BlockStride: 4096, PageBytes: 4096}}}}}
		if values {
			l.Groups = append(l.Groups, layout.Group{TokensPerBlock: 16, NumBlocks: 4,
				Strategy: SGLangV, Params: map[string]int64{"heads": 2},
				Layers: []layout.Layer{{Name: "a#v", Index: 1, Base: 4 * 4096, BlockStride: 4096,
					PageBytes: 4096}}})
		}
		if err := reg.Validate(l, []uint64{8 * 4096}); err != nil {
			t.Fatal(err)
		}
		return l
	}
	with, without := mk(true), mk(false)
	for want, c := range map[string][2]*layout.Layout{`layer "a": v = present and missing`: {
		with, without}, `layer "a": v = missing and present`: {without, with}} {
		if _, err := NewMatch(reg, c[0], c[1], nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}
