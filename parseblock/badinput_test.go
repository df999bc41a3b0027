package parseblock

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/layout"
)

// badEnd is one engine of a transfer that something is wrong with.
type badEnd struct {
	l       *layout.Layout
	regions []uint64
	tables  [][]uint32
}

// TestBadInput takes what an engine, a peer or a router may say wrongly through everything that stands between it and a copy:
// the error names the field and its value, and nothing was planned.
func TestBadInput(t *testing.T) {
	const blocks, n, heads, cell = 8, 16, 4, 64
	type input struct {
		src, dst badEnd
		tokens   uint32
		skip     []uint32
		rows     layout.TokenRange // of the template
	}
	end := func(strategy string) badEnd {
		page := uint64(n * heads * cell)
		g := layout.Group{TokensPerBlock: n, NumBlocks: blocks, Strategy: strategy, Params: map[string]int64{"kv_heads": heads, "tp_size": 1, "tp_rank": 0}}
		for i := range 2 {
			g.Layers = append(g.Layers, layout.Layer{Name: []string{"a", "b"}[i], Index: i, Base: uint64(i) * blocks * page, BlockStride: page, PageBytes: page})
		}
		return badEnd{&layout.Layout{DType: "bfloat16", Groups: []layout.Group{g}}, []uint64{2 * blocks * page}, [][]uint32{{3, 1, 2}}}
	}
	param := func(name string, v int64) func(*input) {
		return func(in *input) { in.src.l.Groups[0].Params[name] = v }
	}
	group := func(edit func(*layout.Group)) func(*input) {
		return func(in *input) { edit(&in.src.l.Groups[0]) }
	}
	layer := func(edit func(*layout.Layer)) func(*input) {
		return func(in *input) { edit(&in.src.l.Groups[0].Layers[1]) }
	}
	for _, c := range []struct {
		name string
		edit func(*input)
		want string // field = value; "": nothing is wrong
	}{
		{"nothing", func(*input) {}, ""},

		{"a block that the source has not", func(in *input) { in.src.tables[0][1] = blocks }, "blocks[0][1] = 8"},
		{"a block that the receiver has not", func(in *input) { in.dst.tables[0][2] = math.MaxUint32 }, "blocks[0][2] = 4294967295"},
		{"a table for a group that is not there", func(in *input) { in.dst.tables = append(in.dst.tables, in.dst.tables[0]) }, "blocks = 2 tables"},
		{"no table", func(in *input) { in.src.tables = nil }, "blocks = 0 tables"},
		{"tokens beyond the receiver's table", func(in *input) { in.dst.tables[0] = in.dst.tables[0][:2] }, "blocks[0] = 2 blocks"},
		{"tokens beyond the source's table", func(in *input) { in.src.tables[0] = in.src.tables[0][:2] }, "blocks[0] = 2 blocks"},
		{"more tokens than any table", func(in *input) { in.tokens = math.MaxUint32 }, "tokens = 4294967295"},
		{"a range beyond the table", func(in *input) { in.rows.End = 3*n + 1 }, "from.table = 3 blocks"},
		{"an empty range", func(in *input) { in.rows = layout.TokenRange{Start: 7, End: 7} }, "tokens = [7, 7)"},
		{"a range turned round", func(in *input) { in.rows = layout.TokenRange{Start: 9, End: 7} }, "tokens = [9, 7)"},
		{"no tokens", func(in *input) { in.tokens = 0 }, "tokens = 0"},
		{"a skip inside a block", func(in *input) { in.skip[0] = n - 1 }, "skip[0] = 15"},
		{"a skip for a group that is not there", func(in *input) { in.skip = []uint32{0, 0} }, "skip = 2 groups"},

		{"blocks overlap", layer(func(l *layout.Layer) { l.BlockStride-- }), "layers[1].block_stride = 4095"},
		{"blocks all in one place", layer(func(l *layout.Layer) { l.BlockStride = 0 }), "layers[1].block_stride = 0"},
		{"layers overlap", layer(func(l *layout.Layer) { l.Base-- }), "layers[1].base = 32767"},
		{"tokens overlap", param("row_stride", heads*cell-1), "row_stride = 255"},
		{"heads overlap", param("head_stride", cell-1), "head_stride = 63"},
		{"past the region", layer(func(l *layout.Layer) { l.Base++ }), "layers[1].base = 32769"},
		{"blocks overflow", layer(func(l *layout.Layer) { l.BlockStride = 1 << 62 }), "layers[1].block_stride = 4611686018427387904"},
		{"the base overflows", layer(func(l *layout.Layer) { l.Base = math.MaxUint64 - 4095 }), "layers[1].base = 18446744073709547520"},
		{"heads overflow", func(in *input) {
			in.src.l.Groups[0].Params["kv_heads"], in.src.l.Groups[0].Params["head_stride"] = 64, 1<<60
		}, "head_stride = 1152921504606846976"},
		{"heads past the region", param("head_stride", 1<<60), "layers[0].base = 0"},
		{"tokens overflow", func(in *input) {
			g := &in.src.l.Groups[0]
			g.TokensPerBlock, g.Params["row_stride"] = 1<<20, 1<<48
			g.Layers[0].PageBytes, g.Layers[1].PageBytes = heads*cell<<20, heads*cell<<20
		}, "row_stride = 281474976710656"},
		{"a page of 2^62 bytes", layer(func(l *layout.Layer) { l.PageBytes = 1 << 62 }), "layers[1].base = 32768"},

		{"no tokens in a block", group(func(g *layout.Group) { g.TokensPerBlock = 0 }), "groups[0].tokens_per_block = 0"},
		{"a huge block", group(func(g *layout.Group) { g.TokensPerBlock = 1<<20 + 1 }), "groups[0].tokens_per_block = 1048577"},
		{"no blocks", group(func(g *layout.Group) { g.NumBlocks = 0 }), "groups[0].num_blocks = 0"},
		{"too many blocks", group(func(g *layout.Group) { g.NumBlocks = 1<<31 + 1 }), "groups[0].num_blocks = 2147483649"},
		{"blocks that are not in the region", group(func(g *layout.Group) { g.NumBlocks = 1 << 31 }), "layers[0].base = 0"},
		{"no bytes", layer(func(l *layout.Layer) { l.PageBytes = 0 }), "layers[1].page_bytes = 0"},
		{"no layers", group(func(g *layout.Group) { g.Layers = nil }), "layers = 0"},
		{"no groups", func(in *input) { in.src.l.Groups = nil }, "groups = 0"},
		{"too many layers", group(func(g *layout.Group) { g.Layers = make([]layout.Layer, layout.MaxLayers+1) }), "layers = 1025"},
		{"no heads", param("kv_heads", 0), "params.kv_heads = 0"},
		{"huge heads", param("kv_heads", 1<<40), "params.kv_heads = 1099511627776"},
		{"fewer than no heads", param("kv_heads", -4), "params.kv_heads = -4"},
		{"no ranks", param("tp_size", 0), "params.tp_size = 0"},
		{"huge ranks", param("tp_size", 1<<40), "params.tp_size = 1099511627776"},
		{"a rank past the last", param("tp_rank", 1), "params.tp_rank = 1"},
		{"a rank far past the last", param("tp_rank", 1<<40), "params.tp_rank = 1099511627776"},
		{"a rank before the first", param("tp_rank", -1), "params.tp_rank = -1"},
		{"heads of another rank", param("heads", 3), "params.heads = 3"},
		{"an unknown strategy", group(func(g *layout.Group) { g.Strategy = "flash_zigzag" }), `strategy = "flash_zigzag"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := input{src: end(PackedNHD), dst: end(PackedHND), tokens: 2*n + 5, skip: []uint32{0}, rows: layout.TokenRange{End: 2*n + 5}}
			c.edit(&in)
			planned, err := planAll(&in.src, &in.dst, in.tokens, in.skip, in.rows)
			if c.want == "" {
				if err != nil || planned == 0 {
					t.Fatalf("%d pieces, %v", planned, err)
				}
				return
			}
			var e *layout.Error
			if !errors.As(err, &e) || e.Remedy == "" || !strings.Contains(e.Field+" = "+e.Value, c.want) || planned != 0 {
				t.Fatalf("%d pieces and %v; want %q", planned, err, c.want)
			}
		})
	}
}

// planAll goes the way from two registrations to the pieces and runs of a prompt, and counts them.
func planAll(src, dst *badEnd, tokens uint32, skip []uint32, rows layout.TokenRange) (planned int, err error) {
	reg := Default()
	for _, e := range []*badEnd{src, dst} {
		if err := reg.Validate(e.l, e.regions); err != nil {
			return 0, err
		}
	}
	plan, err := NewPlan(reg, src.l, dst.l, tokens, skip)
	if err != nil {
		return 0, err
	}
	receiver, err := plan.Side(reg, dst.l, dst.tables)
	if err == nil {
		err = receiver.Covers()
	}
	if err != nil {
		return 0, err
	}
	source, err := plan.Side(reg, src.l, src.tables)
	if err != nil {
		return 0, err
	}
	for _, side := range []*Resolver{source, receiver} {
		pieces, err := side.Append(nil, plan.Space().All())
		if err != nil {
			return len(pieces), err
		}
		planned += len(pieces)
	}
	tpl, err := reg.Template(Side{&src.l.Groups[0], &src.l.Groups[0].Layers[1]}, Side{&dst.l.Groups[0], &dst.l.Groups[0].Layers[1]})
	if err != nil {
		return 0, err
	}
	runs, err := tpl.Append(nil, src.tables[0], dst.tables[0], rows)
	if err != nil {
		return len(runs), err
	}
	return planned + len(runs), nil
}
