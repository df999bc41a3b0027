package parseblock

import (
	"fmt"

	"github.com/kvspray/kvspray/layout"
)

// Orders are the orders in which vLLM since 0.28 lays out one allocation of all layers, under
// vLLM's names: L layers, B blocks, H heads, N tokens, C the content of a head of a token (K and
// V). Each layer is a strided view of the allocation.
//
//	LBNHC  | l0: b0(t0(h0 h1 ..) t1(..) ..) b1(..) .. | l1: .. |    one dense NHD cache per layer, the default
//	LBHNC  | l0: b0(h0(t0 t1 ..) h1(..) ..) b1(..) .. | l1: .. |    one dense HND cache per layer
//	LHBNC  | l0: h0(b0(t0 t1 ..) b1(..) ..) h1(..) .. | l1: .. |    blocks of one head are adjacent
//	BLNHC  | b0: l0(t0(h0 h1 ..) t1(..) ..) l1(..) .. | b1: .. |    one piece per block of all layers
//	BLHNC  | b0: l0(h0(t0 t1 ..) h1(..) ..) l1(..) .. | b1: .. |    the same, heads outside
//	BHLNC  | b0: h0(l0(t0 t1 ..) l1(..) ..) h1(..) .. | b1: .. |    one piece per head of all layers
var Orders = []string{"LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC"}

// Allocation is one allocation of all layers.
type Allocation struct {
	Order   string
	Layers  int
	Blocks  uint32
	Tokens  uint32 // of a block
	Heads   uint32 // of this rank
	Content uint64 // bytes of K and V of a head of a token
	Base    uint64 // in the region
	Region  layout.RegionIndex
}

// Group describes the layers of the allocation as views: a base, a block stride, and strides of
// tokens and heads if other layers or blocks lie between them. name(i) names layer i. The caller
// adds other parameters of the group (kv_heads, window).
func (a *Allocation) Group(name func(i int) string) (layout.Group, error) {
	sizes := map[rune]uint64{'L': uint64(a.Layers), 'B': uint64(a.Blocks), 'H': uint64(a.Heads),
		'N': uint64(a.Tokens)}
	known := false
	for _, o := range Orders {
		known = known || o == a.Order
	}
	if !known {
		return layout.Group{}, &layout.Error{Field: "order", Value: fmt.Sprintf("%q", a.Order),
			Problem: "is unknown", Remedy: fmt.Sprintf("use one of %q", Orders)}
	}
	stride := map[rune]uint64{}
	at := a.Content
	axes := []rune(a.Order)
	for i := len(axes) - 2; i >= 0; i-- { // C is the innermost
		stride[axes[i]] = at
		if n := sizes[axes[i]]; n == 0 || at > 1<<60/n {
			return layout.Group{}, &layout.Error{Field: string(axes[i]), Value: fmt.Sprint(n),
				Problem: "makes the allocation empty or too large",
				Remedy:  "check layers, blocks, heads, tokens and content"}
		}
		at *= sizes[axes[i]]
	}
	g := layout.Group{TokensPerBlock: a.Tokens, NumBlocks: a.Blocks, Strategy: PackedHND,
		Params: map[string]int64{"heads": int64(a.Heads), "head_stride": int64(stride['H']),
			"row_stride": int64(stride['N'])}}
	if stride['N'] > stride['H'] {
		g.Strategy = PackedNHD
	}
	for i := range a.Layers {
		g.Layers = append(g.Layers, layout.Layer{Name: name(i), Index: i, Region: a.Region, Base: a.Base +
			uint64(i)*stride['L'], BlockStride: stride['B'],
			PageBytes: uint64(a.Tokens) * uint64(a.Heads) * a.Content})
	}
	return g, nil
}
