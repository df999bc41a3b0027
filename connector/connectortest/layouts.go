package connectortest

import (
	"fmt"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
)

// Shape is a plain cache: one group, equal layers one behind the other in one region, K and V
// packed by token.
type Shape struct {
	Layers         int
	NumBlocks      uint32
	TokensPerBlock uint32
	TokenBytes     uint64 // of one layer
	Strategy       string // parseblock.PackedNHD when empty
	Identity       map[string]string
}

// PageBytes is the size of one block of one layer.
func (s Shape) PageBytes() uint64 { return s.TokenBytes * uint64(s.TokensPerBlock) }

// Layout is the shape as a shim registers it, in region 0.
func (s Shape) Layout() *layout.Layout {
	strategy := s.Strategy
	if strategy == "" {
		strategy = parseblock.PackedNHD
	}
	id := s.Identity
	if id == nil {
		id = Identity()
	}
	g := layout.Group{TokensPerBlock: s.TokensPerBlock, Strategy: strategy, NumBlocks: s.NumBlocks}
	for i := range s.Layers {
		g.Layers = append(g.Layers, layout.Layer{Name: fmt.Sprintf("layers.%d", i), Index: i,
			Base: uint64(i) * uint64(s.NumBlocks) * s.PageBytes(), BlockStride: s.PageBytes(),
			PageBytes: s.PageBytes()})
	}
	return &layout.Layout{Model: "test", DType: "bfloat16", Groups: []layout.Group{g}, Identity: id}
}

// Identity is the identity that an engine must register, with other values for the given pairs
// of key and value.
func Identity(pairs ...string) map[string]string {
	id := map[string]string{
		parseblock.IdentityModel: "test", parseblock.IdentityWeights: "1", parseblock.IdentityLayers: "4",
		parseblock.IdentityRope: "10000", parseblock.IdentityGroups: "full",
		parseblock.IdentityHeadSize: "64", parseblock.IdentityBackoff: "0", parseblock.IdentitySpec: "",
		parseblock.IdentityPacking: "none",
	}
	for i := 0; i < len(pairs); i += 2 {
		id[pairs[i]] = pairs[i+1]
	}
	return id
}

// Region makes a sealed memfd that the shape fits in exactly.
func (s Shape) Region() (*mem.Region, error) {
	return mem.NewAnonymous("kv", uint64(s.Layers)*uint64(s.NumBlocks)*s.PageBytes())
}

// Page returns one block of one layer in the shape's region.
func (s Shape) Page(r *mem.Region, layer int, block uint32) []byte {
	off := (uint64(layer)*uint64(s.NumBlocks) + uint64(block)) * s.PageBytes()
	b, _ := r.Bytes()
	return b[off : off+s.PageBytes()]
}
