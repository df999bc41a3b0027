package parseblock

import (
	"bytes"
	"os"
	"testing"

	"github.com/kvspray/kvspray/layout"
)

// kimiK3Family: pages of Kimi-K3, and those of an engine with separate pools for its MLA layers.
var kimiK3Family = family{name: "kimi k3", kinds: []string{KimiK3, MLA}, make: func(kind string,
	d *dims) *cache {
	if kind == KimiK3 {
		wide := *d
		wide.pad += 2 * d.n * d.head // the rest of a KDA state
		d = &wide
	}
	return rowCache(layout.RoleLatent)(kind, d)
}}

// TestKimiK3Hybrid: a prompt of a hybrid (MLA in KDA-sized pages beside the KDA states) moves to an
// engine with other blocks: every latent, one state, and none of the bytes between.
func TestKimiK3Hybrid(t *testing.T) {
	reg := Default()
	const page, token, blocks = 8192, 96, 4
	state := map[string]int64{"k_heads": 2, "k_dim": 16, "v_heads": 2, "v_dim": 16, "conv_len": 3,
		"state_bytes": 4}
	stateBytes := uint64((2*2*16+2*16)*3*2 + 2*16*16*4)
	side := func(n uint32) *layout.Layout {
		return &layout.Layout{Groups: []layout.Group{
			{TokensPerBlock: n, NumBlocks: blocks, Strategy: KimiK3,
				Params: map[string]int64{"token_bytes": token},
				Layers: []layout.Layer{{Name: "mla", BlockStride: page, PageBytes: uint64(n) * token}}},
			{TokensPerBlock: n, NumBlocks: blocks, Strategy: KDAState, Params: state,
				Layers: []layout.Layer{{Name: "kda", Index: 1, Base: blocks * page, BlockStride: page,
					PageBytes: stateBytes}}},
		}}
	}
	src, dst := side(32), side(16)
	const size = 2 * blocks * page
	for _, l := range []*layout.Layout{src, dst} {
		if err := reg.Validate(l, []uint64{size}); err != nil {
			t.Fatal(err)
		}
	}
	const tokens = 40
	from, to := [][]uint32{{3, 1}, {0, 2}}, [][]uint32{{2, 0, 1}, {1, 3, 0}}
	plan, err := NewPlan(reg, src, dst, tokens, []uint32{0, 0})
	if err != nil {
		t.Fatal(err)
	}
	mem, got, want := random(size, 1), make([]byte, size), make([]byte, size)
	for i := range tokens {
		copy(want[int(to[0][i/16])*page+i%16*token:][:token], mem[int(from[0][i/32])*page+i%32*token:])
	}
	last := uint64(blocks * page)
	copy(want[last+uint64(to[1][2])*page:][:stateBytes], mem[last+uint64(from[1][1])*page:])
	for l := range dst.NumLayers() {
		for part := range plan.Parts(l) {
			runs, _, _, err := plan.Runs(nil, l, part, from, to)
			if err != nil {
				t.Fatal(err)
			}
			for b := range layout.Explode(runs) {
				copy(got[b.DstOff:b.DstOff+b.Len], mem[b.SrcOff:])
			}
		}
	}
	if !bytes.Equal(got, want) || plan.Space().TotalBytes() != tokens*token+stateBytes {
		t.Fatalf("%d bytes moved, want %d, or others than those", plan.Space().TotalBytes(),
			tokens*token+stateBytes)
	}
	for field, bad := range map[string]func(g *layout.Group){
		"params.token_bytes": func(g *layout.Group) { g.Params = map[string]int64{"token_bytes": 97} },
		"block_stride":       func(g *layout.Group) { g.Layers[0].BlockStride = 64 },
		"page_bytes":         func(g *layout.Group) { g.Layers[0].PageBytes++ },
	} {
		l := side(16)
		bad(&l.Groups[0])
		if err := reg.Validate(l, []uint64{size}); err == nil || !bytes.Contains([]byte(err.Error()),
			[]byte(field)) {
			t.Errorf("%s: got %v", field, err)
		}
	}
}

// TestAStrategyIsShort: a new model costs its strategy, its reference and its tests, under 150
// lines together; the laws and the mutants need no new lines. Two lines are elsewhere: in builtins
// and in families.
func TestAStrategyIsShort(t *testing.T) {
	lines := 2
	for _, f := range []string{"kimi_k3.go", "kimi_k3_test.go"} {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		lines += bytes.Count(b, []byte("\n"))
	}
	if lines >= 150 {
		t.Errorf("Kimi-K3 takes %d lines", lines)
	}
	t.Logf("Kimi-K3 takes %d lines", lines)
}
