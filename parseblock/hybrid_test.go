package parseblock

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/layout"
)

// TestHybrids: models with several kinds of cache, each a group with its own block size, table and
// prefix hit, in its own region; some have draft layers, which are ordinary groups.
func TestHybrids(t *testing.T) {
	reg := Default()
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 3).Draw(t, "groups")
		tokens := rapid.Uint64Range(1, 24).Draw(t, "tokens")
		type engine struct {
			end
			caches []*cache
			sizes  []uint64
		}
		src, dst := &engine{end: end{l: &layout.Layout{}}}, &engine{end: end{l: &layout.Layout{}}}
		var skips []uint32
		var want [][]byte
		model := func(layer int, role layout.Role, head, e, col, x uint64) byte {
			return byte(uint64(layer)*131 + uint64(role)*17 + head*29 + e*7 + col*5 + x*3 + 1)
		}
		for i := range n {
			l := fmt.Sprint(i)
			f := &families[rapid.IntRange(0, len(families)-1).Draw(t, l+"family")]
			common := genCommon(t, f)
			common.first = 10 * i
			fromKind := rapid.SampledFrom(f.kinds).Draw(t, l+"from")
			skip := uint64(0)
			for _, e := range []*engine{src, dst} {
				label := l + "from."
				kind := fromKind
				if e == dst {
					label = l + "to."
					kind = rapid.SampledFrom(f.kinds).Draw(t, l+"to")
				}
				d := genDims(t, f, label, common)
				d.blocks = (tokens-1)/d.n + 1 + rapid.Uint64Range(0, 2).Draw(t, label+"spare")
				c := f.make(kind, d)
				table := genTable(t, label+"table", c.blocks, 99)
				for _, g := range c.groups {
					for k := range g.Layers {
						g.Layers[k].Region = i
					}
					e.l.Groups = append(e.l.Groups, g)
					e.tables = append(e.tables, table)
				}
				e.caches, e.sizes = append(e.caches, c), append(e.sizes, c.size)
				mem := make([]byte, c.size)
				if e == src {
					fill(c, 10*i, table, 0, tokens, mem, model)
					e.mem = append(e.mem, mem)
					continue
				}
				e.mem = append(e.mem, make([]byte, c.size))
				if skip = min(tokens, c.n*rapid.Uint64Range(0, (tokens-1)/c.n+1).Draw(t,
					l+"skip")); skip < tokens {
					for k := range c.layers {
						fillFrom(c, k, table, skip, tokens, mem, func(layer int, role layout.Role, head, e, col,
							x uint64) byte {
							return model(10*i+layer, role, head, e, col, x)
						})
					}
				}
				want = append(want, mem)
				skips = append(skips, repeat(uint32(skip), len(c.groups))...)
			}
		}
		for _, e := range []*engine{src, dst} {
			if err := reg.Validate(e.l, e.sizes); err != nil {
				t.Fatal(err)
			}
		}
		plan, err := NewPlan(reg, src.l, dst.l, uint32(tokens), skips)
		if err != nil {
			t.Fatal(err)
		}
		carry(t, reg, plan, &src.end, &dst.end)
		for i := range want {
			if !bytes.Equal(dst.mem[i], want[i]) {
				t.Fatalf("group %d differs", i)
			}
		}
	})
}

// TestSlab: DeepSeek-V4's caches and the hybrids of vLLM share a pool of equal blocks. Groups may
// have the same pages, since a block id belongs to one of them at a time. Layers of one group may
// not, and pages may not cross into the next block.
func TestSlab(t *testing.T) {
	reg := Default()
	const slab, blocks = 8192, 10
	group := func(strategy string, tokens uint32, page uint64, params map[string]int64,
		bases ...uint64) layout.Group {
		g := layout.Group{TokensPerBlock: tokens, NumBlocks: blocks, Strategy: strategy, Params: params}
		for i, b := range bases {
			g.Layers = append(g.Layers, layout.Layer{Name: fmt.Sprintf("%s.%d.%d", strategy, tokens, i),
				Index: i, Base: b, BlockStride: slab, PageBytes: page})
		}
		return g
	}
	c4 := group(DeepSeekV4, 16, 4*584, map[string]int64{"compress_ratio": 4}, 0, 4096)
	swa := group(DeepSeekV4, 4, 4*584, map[string]int64{"window": 128}, 0, 4096)
	index := group(DSAIndexer, 16, 4*132, map[string]int64{"compress_ratio": 4, "kernel_tokens": 16},
		2400, 4096+2400)
	state := group(GDNState, 1<<20, 2*2*3*2+2*1*2*2, map[string]int64{"k_heads": 1, "k_dim": 2,
		"v_heads": 2, "v_dim": 1, "conv_len": 3}, 0)
	state.Layers[0].PageBytes = 3*2*(2*2+2) + 2*1*2*2
	shifted := group(MLA, 16, 4096, nil, 6000)
	for name, c := range map[string]struct {
		groups []layout.Group
		want   string
	}{
		"four groups": {[]layout.Group{c4, swa, index, state}, ""},
		"other offsets": {[]layout.Group{c4, group(MLA, 16, 2000, nil, 1000), group(MLA, 4, 5000,
			nil, 3000)}, ""},
		"one group twice there": {[]layout.Group{group(DeepSeekV4, 16, 4*584,
			map[string]int64{"compress_ratio": 4}, 0, 2000)}, "shares bytes"},
		"into the next block": {[]layout.Group{c4, shifted}, "shares bytes"},
	} {
		l := &layout.Layout{Groups: c.groups}
		err := reg.Validate(l, []uint64{slab*blocks + 4096})
		if c.want == "" && err != nil || c.want != "" &&
			(err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// TestWideAllocations: the pools of real engines, also cross-layer and interleaved ones, pass the
// check in time.
func TestWideAllocations(t *testing.T) {
	reg := Default()
	for _, order := range Orders {
		a := Allocation{Order: order, Layers: 94, Blocks: 200_000, Tokens: 16, Heads: 8, Content: 512}
		g, err := a.Group(func(i int) string { return fmt.Sprint("l", i) })
		if err != nil {
			t.Fatal(err)
		}
		size := uint64(94) * 200_000 * 16 * 8 * 512
		if err := reg.Validate(&layout.Layout{Groups: []layout.Group{g}}, []uint64{size}); err != nil {
			t.Errorf("%s: %v", order, err)
		}
		if err := reg.Validate(&layout.Layout{Groups: []layout.Group{g}},
			[]uint64{size - 1}); err == nil {
			t.Errorf("%s: a byte outside the region was accepted", order)
		}
		g.Layers[1].Base--
		if err := reg.Validate(&layout.Layout{Groups: []layout.Group{g}}, []uint64{size}); err == nil {
			t.Errorf("%s: layers that share a byte were accepted", order)
		}
	}
	for _, a := range []Allocation{{Order: "NHLBC", Layers: 1, Blocks: 1, Tokens: 1, Heads: 1,
		Content: 1}, {Order: "LBNHC"}, {Order: "LBNHC", Layers: 1 << 30, Blocks: 1 << 31, Tokens: 1 << 20,
		Heads: 1, Content: 1}} {
		if _, err := a.Group(func(int) string { return "" }); err == nil {
			t.Errorf("%+v was accepted", a)
		}
	}
}

// stageOf is one rank of a stage of an engine that serves a hybrid, with a cache of each kind or
// none.
type stageOf struct {
	end             // a region is a kind
	caches []*cache // by kind; nil: no layer of it here
	first  []int    // by kind, the first of its layers
	sizes  []uint64
	skips  []uint32
}

// stagesOf divides the layers of each kind over the stages: stage s has layers [cuts[s], cuts[s+1])
// of a kind. If that is none, the kind's groups remain for their tables. The heads, and the
// channels of states, are divided over the ranks of a stage.
func stagesOf(fs []*family, kinds []string, ds []*dims, ranks uint64, cuts [][]int,
	tables [][]uint32, skips []uint64) []*stageOf {
	var out []*stageOf
	for worker := range uint64(len(cuts[0])-1) * ranks {
		s, rank := int(worker/ranks), worker%ranks
		st := &stageOf{end: end{l: &layout.Layout{DType: "bfloat16",
			Identity: map[string]string{IdentityGroups: fmt.Sprint(len(fs))}}}}
		for i, f := range fs {
			d := *ds[i]
			n := cuts[i][s+1] - cuts[i][s]
			d.layers, d.first = max(n, 1), 100*i+cuts[i][s]
			if slices.Contains(sizesOf(f), ranks) {
				d.rank, d.size = rank, ranks
			}
			c := f.make(kinds[i], &d)
			size := c.size
			for _, g := range c.groups {
				if n == 0 {
					g.Layers = nil
				}
				for k := range g.Layers {
					g.Layers[k].Region = i
				}
				st.l.Groups = append(st.l.Groups, g)
				st.tables, st.skips = append(st.tables, tables[i]), append(st.skips, uint32(skips[i]))
			}
			if n == 0 {
				c, size = nil, 0
			}
			st.caches, st.first, st.sizes, st.mem = append(st.caches, c), append(st.first, cuts[i][s]),
				append(st.sizes, size), append(st.mem, make([]byte, size))
		}
		if st.l.NumLayers() > 0 {
			out = append(out, st)
		}
	}
	return out
}

// TestHybridsInStages: pipeline stages whose kinds of layers differ from the other end's stages, or
// lack a kind, with other ranks than the other end's. All of them have one fingerprint, and every
// receiver's memory ends as its own engine would have written it.
func TestHybridsInStages(t *testing.T) {
	reg := Default()
	cutsOf := func(t *rapid.T, label string, stages, layers int) []int {
		cuts := []int{0}
		for s := 1; s < stages; s++ {
			cuts = append(cuts, rapid.IntRange(cuts[s-1], layers).Draw(t, label))
		}
		return append(cuts, layers)
	}
	lacking := 0
	rapid.Check(t, func(t *rapid.T) {
		tokens := rapid.Uint64Range(1, 20).Draw(t, "tokens")
		var fs []*family
		var kinds [2][]string
		var ds [2][]*dims
		var cuts [2][][]int
		var tables [2][][]uint32
		var skips []uint64
		stages := [2]int{rapid.IntRange(1, 3).Draw(t, "from.stages"), rapid.IntRange(1, 3).Draw(t,
			"to.stages")}
		ranks := [2]uint64{rapid.Uint64Range(1, 4).Draw(t, "from.tp"), rapid.Uint64Range(1, 4).Draw(t,
			"to.tp")}
		for i := range rapid.IntRange(2, 3).Draw(t, "kinds") {
			f := &families[rapid.IntRange(0, len(families)-1).Draw(t, fmt.Sprint(i, "family"))]
			common := genCommon(t, f)
			fs = append(fs, f)
			for e, label := range []string{fmt.Sprint(i, "from."), fmt.Sprint(i, "to.")} {
				kind := rapid.SampledFrom(f.kinds).Draw(t, label+"kind")
				d := genDims(t, f, label, common)
				d.blocks = (tokens-1)/d.n + 1 + rapid.Uint64Range(0, 2).Draw(t, label+"spare")
				kinds[e], ds[e], tables[e] = append(kinds[e], kind), append(ds[e], d), append(tables[e],
					genTable(t, label+"table", d.blocks, 99))
				cuts[e] = append(cuts[e], cutsOf(t, label+"cut", stages[e], common.layers))
			}
			n := ds[1][i].n
			skips = append(skips, min(tokens, n*rapid.Uint64Range(0, (tokens-1)/n+1).Draw(t,
				fmt.Sprint(i, "skip"))))
		}
		model := func(kind int) modelByte {
			return func(layer int, role layout.Role, head, e, col, x uint64) byte {
				return byte(uint64(kind)*211 + uint64(layer)*131 + uint64(role)*17 + head*29 + e*7 +
					col*5 + x*3 + 1)
			}
		}
		ps := stagesOf(fs, kinds[0], ds[0], ranks[0], cuts[0], tables[0], skips)
		var sources []*end
		for _, s := range ps {
			for i, c := range s.caches {
				if c != nil {
					fill(c, s.first[i], tables[0][i], 0, tokens, s.mem[i], model(i))
				}
			}
			sources = append(sources, &s.end)
		}
		for _, d := range stagesOf(fs, kinds[1], ds[1], ranks[1], cuts[1], tables[1], skips) {
			ours, err := reg.Describe(d.l)
			if err != nil {
				t.Fatal(err)
			}
			for i, s := range append(ps, d) {
				if err := reg.Validate(s.l, s.sizes); err != nil {
					t.Fatal(err)
				}
				theirs, err := reg.Describe(s.l)
				if err != nil {
					t.Fatal(err)
				}
				if ours.Hash() != theirs.Hash() || len(ours.Diff(theirs)) != 0 {
					t.Fatalf("stage %d differs: %q", i, ours.Diff(theirs))
				}
				for _, c := range s.caches {
					if c == nil {
						lacking++
					}
				}
			}
			want := make([][]byte, len(d.mem))
			for i, c := range d.caches {
				if want[i] = make([]byte, len(d.mem[i])); c == nil || skips[i] >= tokens {
					continue
				}
				for k := range c.layers {
					fillFrom(c, k, tables[1][i], skips[i], tokens, want[i], func(layer int, role layout.Role, head,
						e, col, x uint64) byte {
						return model(i)(d.first[i]+layer, role, head, e, col, x)
					})
				}
			}
			give(t, reg, sources, &d.end, tokens, d.skips, nil)
			for i := range want {
				if !bytes.Equal(d.mem[i], want[i]) {
					t.Fatalf("kind %d of a stage with layers from %d on differs", i, d.first[i])
				}
			}
			for gi := range d.l.Groups {
				first, end := mustMatch(t, reg, d.l).Written(gi, uint32(tokens), d.skips[gi])
				if first > end || end > len(d.tables[gi]) || len(d.l.Groups[gi].Layers) == 0 && end != 0 {
					t.Fatalf("blocks [%d, %d) of group %d are written, of a table of %d", first, end, gi,
						len(d.tables[gi]))
				}
			}
		}
	})
	if lacking == 0 {
		t.Error("every stage had every kind")
	}
}

func mustMatch(t *rapid.T, reg *Registry, l *layout.Layout) *Match {
	m, err := NewMatch(reg, l, l, nil)
	if err != nil {
		t.Fatal(err)
	}
	return m
}
