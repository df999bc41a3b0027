package parseblock

import (
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// TestReady compares with the reference: a chunk is ready exactly when every token with a byte in
// it is complete.
func TestReady(t *testing.T) {
	reg := Default()
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.SampledFrom([]string{MLA, VLLMCPUAttn, PackedNHD}).Draw(t, "strategy")
		n, page := rapid.Uint32Range(1, 32).Draw(t, "n"), rapid.Uint32Range(1, 5000).Draw(t, "token")
		tokens := rapid.Uint32Range(1, 500).Draw(t, "tokens")
		blocks := (tokens-1)/n + 1
		skip := rapid.Uint32Range(0, blocks).Draw(t, "skip") * n
		g := layout.Group{TokensPerBlock: n, Strategy: name, NumBlocks: blocks, Layers: []layout.Layer{
			{Name: "a", PageBytes: uint64(page * n), BlockStride: uint64(page * n)},
			{Name: "b", PageBytes: uint64(page * n), BlockStride: uint64(page * n), Base: uint64(blocks) *
				uint64(page*n)},
		}}
		l := &layout.Layout{Groups: []layout.Group{g}}
		p, err := NewPlan(reg, l, l, tokens, []uint32{skip})
		if err != nil {
			t.Fatal(err)
		}
		have := rapid.Uint32Range(0, tokens+50).Draw(t, "have")
		final := rapid.Bool().Draw(t, "final")
		for layer := range 2 {
			seg, bytes := p.Space().Segment(layer)
			got := p.Ready(layer, have, final)
			var want uint32
			for c := range seg.Count {
				end := min(uint64(c+1)*transfer.ChunkBytes, bytes)
				lastBlock := skip/n + uint32((end-1)/uint64(page*n))
				full := (lastBlock+1)*n <= tokens
				if final && have >= tokens || full && (lastBlock+1)*n <= have {
					want++
				} else {
					break
				}
			}
			if got.First != seg.First || got.Count != want {
				t.Fatalf("layer %d with %d tokens (final %v): ready %+v, want %d of %+v", layer, have, final,
					got, want, seg)
			}
		}
	})
}

// TestRefusals: an invalid input is refused with its field and value, and nothing is planned.
func TestRefusals(t *testing.T) {
	reg := Default()
	group := func(edit func(*layout.Group)) *layout.Group {
		g := &layout.Group{TokensPerBlock: 16, Strategy: MLA, NumBlocks: 4, Params: map[string]int64{},
			Layers: []layout.Layer{{Name: "a", PageBytes: 1600, BlockStride: 1600}}}
		if edit != nil {
			edit(g)
		}
		return g
	}
	kv := func(strategy string, page uint64, params ...any) *layout.Group {
		return group(func(g *layout.Group) {
			g.Strategy, g.Layers[0].PageBytes = strategy, page
			for i := 0; i < len(params); i += 2 {
				g.Params[params[i].(string)] = int64(params[i+1].(int))
			}
		})
	}
	type c struct {
		from, to *layout.Group
		ft, tt   []uint32
		tokens   layout.TokenRange
		want     string
	}
	one, two := []uint32{0}, []uint32{0, 1}
	gdn := func(params ...any) *layout.Group {
		return kv(GDNState, 2*2*3*2+2*1*2*2, append([]any{"k_heads", 1, "k_dim", 2, "v_heads", 2, "v_dim",
			1, "conv_len", 2}, params...)...)
	}
	for name, c := range map[string]c{
		"id past the group": {nil, nil, []uint32{0, 4}, two, layout.TokenRange{End: 32},
			"from.table[1] = 4: the group has 4 blocks"},
		"range past table": {nil, nil, two, one, layout.TokenRange{End: 17}, "to.table = 1 blocks"},
		"empty range": {nil, nil, one, one, layout.TokenRange{Start: 3, End: 3},
			"tokens = [3, 3): is empty"},
		"inverted range": {nil, nil, one, one, layout.TokenRange{Start: 3, End: 2}, "is empty"},
		"opaque and MLA": {kv(VLLMCPUAttn, 1600), nil, one, one, layout.TokenRange{End: 16},
			"latent = missing and present"},
		"K and V, and MLA": {kv(PackedNHD, 1600), nil, one, one, layout.TokenRange{End: 16},
			"latent = missing"},
		"inside a page": {kv(Page, 1600), kv(Page, 1600), one, one, layout.TokenRange{Start: 8,
			End: 16}, "tokens.start = 8"},
		"two opaque kinds": {kv(Page, 1600), kv(VLLMCPUAttn, 1600), one, one,
			layout.TokenRange{End: 16}, "page format = page and vllm_cpu_attn"},
		"opaque params": {kv(VLLMCPUAttn, 1600, "number_bytes", 2), kv(VLLMCPUAttn, 1600,
			"number_bytes", 4), one, one, layout.TokenRange{End: 16}, "page params"},
		"unequal token size": {nil, group(func(g *layout.Group) { g.Layers[0].PageBytes = 3200 }), one,
			one, layout.TokenRange{End: 16}, "bytes of a head of a token = 100 and 200"},
		"heads do not fit": {kv(PackedHND, 1600, "heads", 3), kv(PackedHND, 1600, "heads", 3), one, one,
			layout.TokenRange{End: 16}, "page_bytes = 1600"},
		"heads unsaid": {kv(PackedHND, 1600), kv(PackedHND, 1600), one, one,
			layout.TokenRange{End: 16}, "params.heads = missing"},
		"other heads": {kv(PackedNHD, 1600, "heads", 2), kv(PackedNHD, 1600, "heads", 1), one, one,
			layout.TokenRange{End: 16}, "kv heads = 2 and 1"},
		"rank past size": {kv(PackedNHD, 1600, "kv_heads", 2, "tp_size", 2, "tp_rank", 2), nil, one,
			one, layout.TokenRange{End: 16}, "params.tp_rank = 2"},
		"size without heads": {kv(PackedNHD, 1600, "tp_size", 2), nil, one, one,
			layout.TokenRange{End: 16}, "params.kv_heads = missing"},
		"heads of a rank": {kv(PackedNHD, 1600, "kv_heads", 4, "tp_size", 2, "heads", 4), nil, one,
			one, layout.TokenRange{End: 16}, "params.heads = 4"},
		"negative": {kv(PackedNHD, 1600, "row_stride", -1), nil, one, one,
			layout.TokenRange{End: 16}, "params.row_stride = -1"},
		"other quantisation": {kv(QuantInlineNHD, 1600, "value_bytes", 40, "scale_bytes", 10),
			kv(QuantInlineNHD, 1600, "value_bytes", 48, "scale_bytes", 2),
			one, one, layout.TokenRange{End: 16}, "format = inline 40+10 and inline 48+2"},
		"quantised and not": {kv(QuantInlineNHD, 1600, "value_bytes", 40, "scale_bytes", 10),
			kv(PackedNHD, 1600),
			one, one, layout.TokenRange{End: 16}, "format = inline 40+10 and plain"},
		"wrong quantisation": {kv(QuantInlineNHD, 1600, "value_bytes", 40, "scale_bytes", 8), nil, one,
			one, layout.TokenRange{End: 16}, "not 2*(40+8)"},
		"fp8 that is not": {kv(FP8DSMLA, 1600), nil, one, one, layout.TokenRange{End: 16},
			"a row has 100 bytes, not 656"},
		"fp8 and bf16 MLA": {kv(FP8DSMLA, 656*16), kv(MLA, 656*16), one, one,
			layout.TokenRange{End: 16}, "format = fp8_ds_mla and plain"},
		"scales left behind": {kv(QuantPlanarNHD, 1600, "value_bytes", 40, "scale_bytes", 10),
			kv(PackedNHD, 1280), one, one, layout.TokenRange{End: 16}, "format"},
		"compression": {kv(DeepSeekV4, 584*4, "compress_ratio", 4), kv(DeepSeekV4, 584*2,
			"compress_ratio", 8), one, one, layout.TokenRange{End: 16}, "tokens of a row = 4 and 8"},
		"kernel block": {kv(DSAIndexer, 132*16, "kernel_tokens", 5), nil, one, one,
			layout.TokenRange{End: 16}, "params.kernel_tokens = 5: strategy \"dsa_indexer\": it does not " +
				"divide tokens_per_block = 16"},
		"entries cut": {kv(DeepSeekV4, 584*4, "compress_ratio", 3), nil, one, one,
			layout.TokenRange{End: 16}, "params.compress_ratio = 3: strategy \"deepseek_v4\": it does not " +
				"divide tokens_per_block = 16"},
		"keys cut": {kv(DSAIndexer, 132*4, "compress_ratio", 8, "kernel_tokens", 4), nil, one,
			one, layout.TokenRange{End: 16}, "params.compress_ratio = 8: strategy \"dsa_indexer\": it " +
				"does not divide kernel_tokens = 4"},
		"numbers cut": {kv(VLLMCPUAttn, 16*2*6, "k_transposed", 1, "number_bytes", 4), nil, one,
			one, layout.TokenRange{End: 16}, "params.number_bytes = 4"},
		"speculation": {gdn(), kv(GDNState, 3*2*3*2+2*1*2*2, "k_heads", 1, "k_dim", 2, "v_heads",
			2, "v_dim", 1, "conv_len", 3), one, one, layout.TokenRange{End: 16}, "rows of state = 2 and 3"},
		"state dtype": {gdn(), gdn("state_bytes", 4), one, one, layout.TokenRange{End: 16},
			"recurrent bytes of a number = 2 and 4"},
		"state and tokens": {gdn(), nil, one, one, layout.TokenRange{End: 16}, "latent = missing"},
		"smaller window": {kv(MLA, 1600, "window", 8), kv(MLA, 1600, "window", 16), one, one,
			layout.TokenRange{End: 16}, "params.window = 8 and 16"},
		"larger window": {kv(MLA, 1600, "window", 16), kv(MLA, 1600, "window", 8), one, one,
			layout.TokenRange{End: 16}, "params.window = 16 and 8"},
		"a window and none": {kv(MLA, 1600), kv(MLA, 1600, "window", 8), one, one,
			layout.TokenRange{End: 16}, "params.window = 0 and 8"},
		"two at once": {kv(QuantInlineNHD, 1600, "value_bytes", 40, "scale_bytes", 10),
			kv(PackedNHD, 3200), one, one, layout.TokenRange{End: 16},
			`kv format = inline 40+10 and plain; layer "a": kv bytes of a head of a token = 100 and 200`},
		"no group": {&layout.Group{}, nil, one, one, layout.TokenRange{End: 16}, "from = unset"},
	} {
		t.Run(name, func(t *testing.T) {
			if c.from == nil {
				c.from = group(nil)
			}
			if c.to == nil {
				c.to = group(nil)
			}
			side := func(g *layout.Group) Side {
				if len(g.Layers) == 0 {
					return Side{g, nil}
				}
				return Side{g, &g.Layers[0]}
			}
			tpl, err := reg.Template(side(c.from), side(c.to))
			var runs []layout.Run
			if err == nil {
				runs, err = tpl.Append(nil, c.ft, c.tt, c.tokens)
			}
			if err == nil || !strings.Contains(err.Error(), c.want) || len(runs) != 0 {
				t.Fatalf("got %d runs and %v, want %q", len(runs), err, c.want)
			}
		})
	}
}

func TestPlanRefusals(t *testing.T) {
	reg := Default()
	mk := func(edit func(*layout.Layout)) *layout.Layout {
		l := &layout.Layout{Groups: []layout.Group{{TokensPerBlock: 16, Strategy: MLA, NumBlocks: 1 << 16,
			Layers: []layout.Layer{{Name: "a", PageBytes: 1 << 20, BlockStride: 1 << 20}}}}}
		if edit != nil {
			edit(l)
		}
		return l
	}
	for name, c := range map[string]struct {
		src    *layout.Layout
		tokens uint32
		skip   []uint32
		want   string
	}{
		"block size": {mk(func(l *layout.Layout) { l.Groups[0].TokensPerBlock = 32 }), 32, []uint32{0},
			"bytes of a head of a token = 32768 and 65536"},
		"strategy": {mk(func(l *layout.Layout) { l.Groups[0].Strategy = PackedNHD }), 32, []uint32{0},
			`layer "a": latent = missing`},
		"page bytes": {mk(func(l *layout.Layout) { l.Groups[0].Layers[0].PageBytes = 512 }), 32,
			[]uint32{0}, "bytes of a head of a token = 32 and 65536"},
		"dtype": {mk(func(l *layout.Layout) { l.DType = "float16" }), 32, []uint32{0},
			`dtype = "float16" and "": transfers copy bytes without conversion`},
		"other layer": {mk(func(l *layout.Layout) { l.Groups[0].Layers[0].Name = "b" }), 32, []uint32{0},
			`layer "a": latent = heads [0, 1): no source has them`},
		"skip inside": {mk(nil), 32, []uint32{5}, "skip[0] = 5"},
		"skip groups": {mk(nil), 32, nil, "skip = 0 entries"},
		"no tokens":   {mk(nil), 0, []uint32{0}, "tokens = 0"},
		"too big": {mk(nil), 16*4096*64 + 1, []uint32{0},
			`tokens = 4194305: the KV from one source to one rank exceeds 4194304 chunks of 65536 bytes (256 GiB) at layer "a"`},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := NewPlan(reg, c.src, mk(nil), c.tokens, c.skip)
			if err == nil || !strings.Contains(err.Error(), c.want) || p != nil {
				t.Fatalf("got %v, want %q", err, c.want)
			}
		})
	}
	l := mk(nil)
	p, err := NewPlan(reg, l, l, 20, []uint32{0})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Side(reg, l, [][]uint32{{1 << 16}}); err == nil || !strings.Contains(err.Error(),
		"blocks[0][0] = 65536") {
		t.Fatalf("a block id out of the group: %v", err)
	}
	s, err := p.Side(reg, l, [][]uint32{{7}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Covers(); err == nil {
		t.Fatal("one block covers 20 tokens of 16 a block")
	}
	if _, err := s.Append(nil, transfer.Range{First: 16, Count: 1}); err == nil {
		t.Fatal("a chunk of a block that the table lacks was resolved")
	}
	if err := s.SetTables([][]uint32{{7, 9}}); err != nil {
		t.Fatal(err)
	}
	got, err := s.Append(nil, transfer.Range{First: 15, Count: 2})
	want := []layout.Piece{{Off: 7<<20 + 15*transfer.ChunkBytes, Len: transfer.ChunkBytes},
		{Off: 9 << 20, Len: transfer.ChunkBytes}}
	if err != nil || len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Fatalf("got %+v, %v, want %+v", got, err, want)
	}
	for _, r := range []transfer.Range{{}, {First: 0, Count: 1 << 31}, {First: 1 << 31, Count: 1},
		{First: 1, Count: ^uint32(0)}} {
		if got, err := s.Append(want[:1], r); err == nil || len(got) != 1 {
			t.Fatalf("%+v was resolved", r)
		}
	}
	if p, err := NewPlan(reg, l, l, 20, []uint32{32}); err != nil || p.Space().NumChunks() != 0 {
		t.Fatalf("all present: %v", err)
	}
}

// TestAxesJoinOnBothSides: an axis that continues the previous one is joined with it, if it
// continues it on both sides.
func TestAxesJoinOnBothSides(t *testing.T) {
	for _, c := range []struct {
		src, dst uint64 // of the outer axis, of 3
		dims     int
	}{{16, 8, 1}, {16, 12, 2}, {20, 8, 2}, {20, 12, 2}} {
		s := shape{len: 4}
		s.add(2, 8, 4) // heads with V between them at the source
		if s.add(3, c.src, c.dst); s.dims != c.dims {
			t.Errorf("rows %d apart there and %d here: %+v, want %d axes", c.src, c.dst, s, c.dims)
		}
	}
}
