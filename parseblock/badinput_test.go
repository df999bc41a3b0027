package parseblock

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/layout"
)

// badEnd is one engine of a transfer with an invalid input.
type badEnd struct {
	l       *layout.Layout
	regions []uint64
	tables  [][]uint32
}

// TestBadInput passes invalid inputs of an engine, a peer or a router through every check before a
// copy: the error names the field and its value, and nothing is planned.
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
		g := layout.Group{TokensPerBlock: n, NumBlocks: blocks, Strategy: strategy,
			Params: map[string]int64{"kv_heads": heads, "tp_size": 1, "tp_rank": 0}}
		for i := range 2 {
			g.Layers = append(g.Layers, layout.Layer{Name: []string{"a", "b"}[i], Index: i,
				Base: uint64(i) * blocks * page, BlockStride: page, PageBytes: page})
		}
		return badEnd{&layout.Layout{DType: "bfloat16", Groups: []layout.Group{g}},
			[]uint64{2 * blocks * page}, [][]uint32{{3, 1, 2}}}
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
		want string // field = value; "": valid
	}{
		{"nothing", func(*input) {}, ""},

		{"a block that the source has not", func(in *input) { in.src.tables[0][1] = blocks },
			"blocks[0][1] = 8"},
		{"a block that the receiver has not", func(in *input) { in.dst.tables[0][2] = math.MaxUint32 },
			"blocks[0][2] = 4294967295"},
		{"a table for a group that is not there", func(in *input) {
			in.dst.tables = append(in.dst.tables, in.dst.tables[0])
		}, "blocks = 2 tables"},
		{"no table", func(in *input) { in.src.tables = nil }, "blocks = 0 tables"},
		{"tokens beyond the receiver's table", func(in *input) {
			in.dst.tables[0] = in.dst.tables[0][:2]
		}, "blocks[0] = 2 blocks"},
		{"tokens beyond the source's table", func(in *input) { in.src.tables[0] = in.src.tables[0][:2] },
			"blocks[0] = 2 blocks"},
		{"more tokens than any table", func(in *input) { in.tokens = math.MaxUint32 },
			"tokens = 4294967295"},
		{"a range beyond the table", func(in *input) { in.rows.End = 3*n + 1 }, "from.table = 3 blocks"},
		{"an empty range", func(in *input) { in.rows = layout.TokenRange{Start: 7, End: 7} },
			"tokens = [7, 7)"},
		{"a range turned round", func(in *input) { in.rows = layout.TokenRange{Start: 9, End: 7} },
			"tokens = [9, 7)"},
		{"no tokens", func(in *input) { in.tokens = 0 }, "tokens = 0"},
		{"a skip inside a block", func(in *input) { in.skip[0] = n - 1 }, "skip[0] = 15"},
		{"a skip for a group that is not there", func(in *input) { in.skip = []uint32{0, 0} },
			"skip = 2 entries"},

		{"blocks overlap", layer(func(l *layout.Layer) { l.BlockStride-- }),
			"layers[1].block_stride = 4095"},
		{"blocks all in one place", layer(func(l *layout.Layer) { l.BlockStride = 0 }),
			"layers[1].block_stride = 0"},
		{"layers overlap", layer(func(l *layout.Layer) { l.Base-- }), "layers[1].base = 32767"},
		{"tokens overlap", param("row_stride", heads*cell-1), "row_stride = 255"},
		{"heads overlap", param("head_stride", cell-1), "head_stride = 63"},
		{"past the region", layer(func(l *layout.Layer) { l.Base++ }), "layers[1].base = 32769"},
		{"blocks overflow", layer(func(l *layout.Layer) { l.BlockStride = 1 << 62 }),
			"layers[1].block_stride = 4611686018427387904"},
		{"the base overflows", layer(func(l *layout.Layer) { l.Base = math.MaxUint64 - 4095 }),
			"layers[1].base = 18446744073709547520"},
		{"heads overflow", func(in *input) {
			in.src.l.Groups[0].Params["kv_heads"], in.src.l.Groups[0].Params["head_stride"] = 64, 1<<60
		}, "head_stride = 1152921504606846976"},
		{"heads past the region", param("head_stride", 1<<60), "layers[0].base = 0"},
		{"tokens overflow", func(in *input) {
			g := &in.src.l.Groups[0]
			g.TokensPerBlock, g.Params["row_stride"] = 1<<20, 1<<48
			g.Layers[0].PageBytes, g.Layers[1].PageBytes = heads*cell<<20, heads*cell<<20
		}, "row_stride = 281474976710656"},
		{"a page of 2^62 bytes", layer(func(l *layout.Layer) { l.PageBytes = 1 << 62 }),
			"layers[1].base = 32768"},

		{"no tokens in a block", group(func(g *layout.Group) { g.TokensPerBlock = 0 }),
			"groups[0].tokens_per_block = 0"},
		{"a huge block", group(func(g *layout.Group) { g.TokensPerBlock = 1<<20 + 1 }),
			"groups[0].tokens_per_block = 1048577"},
		{"no blocks", group(func(g *layout.Group) { g.NumBlocks = 0 }), "groups[0].num_blocks = 0"},
		{"too many blocks", group(func(g *layout.Group) { g.NumBlocks = 1<<31 + 1 }),
			"groups[0].num_blocks = 2147483649"},
		{"blocks that are not in the region", group(func(g *layout.Group) { g.NumBlocks = 1 << 31 }),
			"layers[0].base = 0"},
		{"no bytes", layer(func(l *layout.Layer) { l.PageBytes = 0 }), "layers[1].page_bytes = 0"},
		{"no layers", group(func(g *layout.Group) { g.Layers = nil }), "layers = 0"},
		{"no groups", func(in *input) { in.src.l.Groups = nil }, "groups = 0"},
		{"too many layers", group(func(g *layout.Group) {
			g.Layers = make([]layout.Layer, layout.MaxLayers+1)
		}), "layers = 1025"},
		{"no heads", param("kv_heads", 0), "params.kv_heads = 0"},
		{"huge heads", param("kv_heads", 1<<40), "params.kv_heads = 1099511627776"},
		{"fewer than no heads", param("kv_heads", -4), "params.kv_heads = -4"},
		{"no ranks", param("tp_size", 0), "params.tp_size = 0"},
		{"huge ranks", param("tp_size", 1<<40), "params.tp_size = 1099511627776"},
		{"a rank past the last", param("tp_rank", 1), "params.tp_rank = 1"},
		{"a rank far past the last", param("tp_rank", 1<<40), "params.tp_rank = 1099511627776"},
		{"a rank before the first", param("tp_rank", -1), "params.tp_rank = -1"},
		{"heads of another rank", param("heads", 3), "params.heads = 3"},
		{"an unknown strategy", group(func(g *layout.Group) { g.Strategy = "flash_zigzag" }),
			`strategy = "flash_zigzag"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := input{src: end(PackedNHD), dst: end(PackedHND), tokens: 2*n + 5, skip: []uint32{0},
				rows: layout.TokenRange{End: 2*n + 5}}
			c.edit(&in)
			planned, err := planAll(&in.src, &in.dst, in.tokens, in.skip, in.rows)
			if c.want == "" {
				if err != nil || planned == 0 {
					t.Fatalf("%d pieces, %v", planned, err)
				}
				return
			}
			var e *layout.Error
			if !errors.As(err, &e) || e.Remedy == "" || !strings.Contains(e.Field+" = "+e.Value, c.want) ||
				planned != 0 {
				t.Fatalf("%d pieces and %v; want %q", planned, err, c.want)
			}
		})
	}
}

// planAll goes from two registrations to the pieces and runs of a prompt, and counts them.
func planAll(src, dst *badEnd, tokens uint32, skip []uint32, rows layout.TokenRange) (planned int,
	err error) {
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
	tpl, err := reg.Template(Side{&src.l.Groups[0], &src.l.Groups[0].Layers[1]}, Side{&dst.l.Groups[0],
		&dst.l.Groups[0].Layers[1]})
	if err != nil {
		return 0, err
	}
	runs, err := tpl.Append(nil, src.tables[0], dst.tables[0], rows)
	if err != nil {
		return len(runs), err
	}
	return planned + len(runs), nil
}

// badDims returns the dimensions of small caches of every family.
func badDims(f *family) *dims {
	d := &dims{layers: 2, n: 4, blocks: 3, kvHeads: 2, head: 4, value: 2, scale: 1, size: 1, kHeads: 2,
		kDim: 2, vHeads: 2, vDim: 2, histor: 2, elem: 2, ratio: 2, tile: 4}
	if !compressed(f) {
		d.ratio = 1
	}
	return d
}

// readBy returns the parameters that a group's strategy reads, as recorded by params.
func readBy(t *testing.T, g *layout.Group) (reads []param) {
	for _, b := range builtins {
		if b.name != g.Strategy {
			continue
		}
		p := params{strategy: b.name, g: g, l: &g.Layers[0], n: uint64(g.TokensPerBlock)}
		if b.make(&p); p.err != nil {
			t.Fatal(p.err)
		}
		for n := range numParams {
			if p.read&(1<<n) != 0 {
				reads = append(reads, n)
			}
		}
	}
	return reads
}

// TestBadParams passes each strategy every parameter that it reads with values beyond both ends of
// its range, every parameter that only other strategies read, and misspelled ones. All are refused
// by name, and nothing is planned. The parameters come from the strategies, so a new parameter is
// tested without a change here.
func TestBadParams(t *testing.T) {
	reg := Default()
	var tried uint32
	rows := map[string]int{}
	for fi := range families {
		f := &families[fi]
		for _, kind := range f.kinds {
			groups := len(f.make(kind, badDims(f)).groups)
			for gi := range groups {
				fresh := func() badEnd {
					d := badDims(f)
					c := f.make(kind, d)
					return badEnd{c.layout(), []uint64{c.size}, repeat(seq(d.blocks), groups)}
				}
				good := fresh()
				strategy := good.l.Groups[gi].Strategy
				reads := readBy(t, &good.l.Groups[gi])
				skip := make([]uint32, groups)
				// Half of the parts of a layer have no template of their own.
				if planned, err := planAll(&good, &good, 9, skip, layout.TokenRange{End: 8}); err != nil ||
					planned == 0 {
					t.Fatalf("%s as it should be: %d pieces, %v", kind, planned, err)
				}
				bad := func(name string, v int64) {
					t.Helper()
					rows[strategy]++
					in := fresh()
					if in.l.Groups[gi].Params == nil {
						in.l.Groups[gi].Params = map[string]int64{}
					}
					in.l.Groups[gi].Params[name] = v
					refused := func(what string, err error) {
						t.Helper()
						var e *layout.Error
						if !errors.As(err, &e) || e.Field != "params."+name || e.Value != fmt.Sprint(v) ||
							e.Remedy == "" {
							t.Errorf("%s, %s with %s = %d: %v", kind, what, name, v, err)
						}
					}
					planned, err := planAll(&in, &good, 9, skip, layout.TokenRange{End: 8})
					refused("validated", err)
					_, err = reg.Describe(in.l)
					refused("described", err)
					// Omitting it does not help either.
					g, other := &in.l.Groups[gi], &good.l.Groups[gi]
					_, err = NewPlan(reg, in.l, good.l, 9, skip)
					refused("planned", err)
					_, err = NewPlan(reg, good.l, in.l, 9, skip)
					refused("received", err)
					_, err = reg.Template(Side{g, &g.Layers[0]}, Side{other, &other.Layers[0]})
					refused("compiled", err)
					_, err = reg.Planes(nil, g, nil)
					refused("validated without a layer", err)
					if planned != 0 {
						t.Errorf("%s with %s = %d: %d pieces were planned", kind, name, v, planned)
					}
				}
				for n := range numParams {
					k := &known[n]
					if !slices.Contains(reads, n) {
						bad(k.name, int64(k.lo))
						continue
					}
					tried |= 1 << n
					bad(k.name, int64(k.lo)-1)
					bad(k.name, int64(k.hi)+1)
					bad(k.name, math.MinInt64)
					bad(k.name, math.MaxInt64)
					bad(k.name+"s", int64(k.lo))
				}
				bad("", 0)
			}
		}
	}
	for n := range numParams {
		if tried&(1<<n) == 0 {
			t.Errorf("no family has a cache whose strategy reads %s", known[n].name)
		}
	}
	for _, name := range reg.Names() {
		if rows[name] == 0 {
			t.Errorf("%s was never given anything wrong", name)
		}
	}
}

// TestParamsThatDisagree: each parameter is within its bounds and contradicts the page or another
// one.
func TestParamsThatDisagree(t *testing.T) {
	for _, c := range []struct {
		kind string // of any family
		name string
		v    int64
	}{
		{PackedHND, "head_bytes", 99},
		{PackedNHD, "heads", 1},
		{PackedNHD, "tp_rank", 1},
		{MLA, "tp_rank", 3},
		{MLA, "token_bytes", 3},
		{FP8DSMLA, "token_bytes", 512},
		{KimiK3, "token_bytes", 5},
		{DSAIndexer, "kernel_tokens", 3},
		{DeepSeekV4, "compress_ratio", 3},
		{"vec", "head_bytes", 4},
		{GDNState + " sv", "state_offset", 47},
		{Mamba2State + " dv", "tp_rank", 1},
	} {
		found := false
		for fi := range families {
			f := &families[fi]
			if !slices.Contains(f.kinds, c.kind) {
				continue
			}
			found = true
			l := f.make(c.kind, badDims(f)).layout()
			l.Groups[0].Params[c.name] = c.v
			_, err := NewPlan(Default(), l, l, 9, make([]uint32, len(l.Groups)))
			var e *layout.Error
			if !errors.As(err, &e) || !strings.Contains(e.Error(), c.name) || !strings.Contains(e.Error(),
				fmt.Sprint(c.v)) || e.Remedy == "" {
				t.Errorf("%s with %s = %d: %v", c.kind, c.name, c.v, err)
			}
		}
		if !found {
			t.Errorf("no family has %s", c.kind)
		}
	}
}
