package parseblock

import (
	"errors"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/layout"
)

// TestEveryStrategyIsTried keeps the families complete: a strategy without a reference is not
// tested.
func TestEveryStrategyIsTried(t *testing.T) {
	tried := map[string]bool{}
	d := &dims{layers: 1, n: 4, blocks: 2, kvHeads: 2, head: 2, value: 2, scale: 1, size: 1, kHeads: 1,
		kDim: 1, vHeads: 1, vDim: 1, histor: 1, elem: 2, ratio: 1, tile: 4}
	for _, f := range families {
		for _, k := range f.kinds {
			c := *d
			for _, g := range f.make(k, &c).groups {
				tried[g.Strategy] = true
			}
		}
	}
	for _, n := range Default().Names() {
		if !tried[n] {
			t.Errorf("strategy %q has no reference", n)
		}
	}
}

// mutant is a strategy that is wrong in one way.
type mutant struct {
	Strategy
	wrong func(g *layout.Group, ps []layout.Plane) []layout.Plane
}

func (m mutant) Planes(dst []layout.Plane, g *layout.Group, l *layout.Layer) ([]layout.Plane,
	error) {
	ps, err := m.Strategy.Planes(nil, g, l)
	if err != nil {
		return dst, err
	}
	return append(dst, m.wrong(g, ps)...), nil
}

// bug is a mistake that parsers of KV caches have had. It changes the planes of the strategies that
// it applies to and leaves others unchanged.
type bug struct {
	name  string
	about []string // strategies whose planes it must change; none: those that it happens to change
	wrong func(g *layout.Group, ps []layout.Plane) []layout.Plane
}

// each makes a bug from a mistake in one plane.
func each(wrong func(g *layout.Group, p *layout.Plane)) func(*layout.Group,
	[]layout.Plane) []layout.Plane {
	return func(g *layout.Group, ps []layout.Plane) []layout.Plane {
		for i := range ps {
			wrong(g, &ps[i])
		}
		return ps
	}
}

// with finds the plane of a role, or a dummy.
func with(ps []layout.Plane, role layout.Role) *layout.Plane {
	for i := range ps {
		if ps[i].Role == role {
			return &ps[i]
		}
	}
	return new(layout.Plane)
}

func isScale(r layout.Role) bool {
	return r == layout.RoleIndexScale || r == layout.RoleLatentScale || r == layout.RoleKScale ||
		r == layout.RoleVScale
}

// ranked returns the rank, the size of its group, the number of the model's heads in a plane, and
// their width.
func ranked(g *layout.Group, p *layout.Plane) (rank, size, heads, width uint32) {
	heads = p.AllHeads
	switch p.Role {
	case layout.RoleConvQ, layout.RoleConvK:
		heads = uint32(g.Params["k_heads"])
	case layout.RoleConvV:
		heads = uint32(g.Params["v_heads"])
	}
	return uint32(g.Params["tp_rank"]), uint32(max(g.Params["tp_size"], 1)), heads, p.AllHeads / heads
}

var (
	ofV     = []string{SGLangV, QuantPlanarHND, QuantPlanarNHD}
	ofHeads = append([]string{PackedHND, PackedNHD, QuantInlineHND, QuantInlineNHD, SGLangK,
		VLLMCPUAttn}, ofV...)
	ofParts  = []string{GDNState, KDAState, Mamba2State}
	ofStates = append([]string{Mamba1State}, ofParts...)
	ofShards = append([]string{ShortConvState}, append(append([]string{}, ofHeads...), ofStates...)...)
)

// bugs are mistakes by kind: the start of a plane, the size of a cell, strides, the heads of a
// rank, kernel pages, entries of several tokens, transposed columns and matrices.
var bugs = []bug{
	{"off by one byte", nil, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		ps[0].Offset++
		return ps
	}},
	{"the last plane starts where the first does", nil, func(_ *layout.Group,
		ps []layout.Plane) []layout.Plane {
		ps[len(ps)-1].Offset = 0
		return ps
	}},
	{"the last plane is forgotten", nil, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		return ps[:len(ps)-1]
	}},
	{"a cell is a byte short", nil, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		if ps[0].CellBytes > 1 {
			ps[0].CellBytes--
		}
		return ps
	}},
	{"tokens and heads exchanged", nil, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		ps[0].RowStride, ps[0].HeadStride = ps[0].HeadStride, ps[0].RowStride
		return ps
	}},
	{"the last plane ignores the row", nil, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		ps[len(ps)-1].RowStride = 0
		return ps
	}},
	{"a block has one row more", nil, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		ps[0].Rows++
		return ps
	}},
	{"the page is half as long", []string{Page, VLLMCPUAttn},
		each(func(_ *layout.Group, p *layout.Plane) {
			if p.Unit == layout.UnitBlock && p.CellBytes > 1 {
				p.CellBytes /= 2
			}
		})},
	{"opaque pages taken for tokens", []string{Page, VLLMCPUAttn},
		each(func(_ *layout.Group, p *layout.Plane) {
			if p.Unit == layout.UnitBlock {
				p.Unit = layout.UnitToken
			}
		})},

	{"V ignores the head", ofV, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		with(ps, layout.RoleV).HeadStride = 0
		return ps
	}},
	{"V begins behind K of its head", []string{QuantPlanarHND},
		func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
			k, v := with(ps, layout.RoleK), with(ps, layout.RoleV)
			if v.HeadMajor && v.ColStride == 0 {
				v.Offset = k.HeadStride // the page's middle only with one head
			}
			return ps
		}},
	{"the last plane ignores the head", nil, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		ps[len(ps)-1].HeadStride = 0
		return ps
	}},

	{"replicated heads modulo, not divided", ofShards,
		each(func(g *layout.Group, p *layout.Plane) {
			if rank, size, heads, width := ranked(g, p); size > heads {
				p.FirstHead = rank % heads * width
			}
		})},
	{"a rank's heads begin after as many for each before it", ofShards,
		each(func(g *layout.Group, p *layout.Plane) {
			if rank, size, heads, width := ranked(g, p); size < heads {
				p.FirstHead = min(rank*p.Heads, (heads-1)*width)
			}
		})},
	{"every rank has the first head", ofShards,
		each(func(_ *layout.Group, p *layout.Plane) { p.FirstHead = 0 })},

	{"kernel pages are not counted", []string{DSAIndexer, PackedHND, QuantInlineHND, QuantPlanarHND,
		QuantPlanarNHD}, each(func(_ *layout.Group, p *layout.Plane) {
		p.TileRows,
			p.TileStride = 0, 0
	})},
	{"kernel pages are as far apart as their values", []string{DSAIndexer, QuantPlanarHND,
		QuantPlanarNHD}, each(func(_ *layout.Group, p *layout.Plane) {
		if p.TileStride != 0 {
			p.TileStride = uint64(p.TileRows) * p.CellBytes
		}
	})},
	{"all kernel pages have the scales of the first", []string{DSAIndexer, QuantPlanarHND,
		QuantPlanarNHD}, each(func(_ *layout.Group, p *layout.Plane) {
		if isScale(p.Role) {
			p.TileStride = 0
		}
	})},
	{"scales behind all values of a block", []string{DSAIndexer}, func(_ *layout.Group,
		ps []layout.Plane) []layout.Plane {
		v, s := with(ps, layout.RoleIndex), with(ps, layout.RoleIndexScale)
		s.Offset = uint64(v.Rows) * v.CellBytes
		v.TileRows, v.TileStride, s.TileRows, s.TileStride = 0, 0, 0, 0
		return ps
	}},
	{"a partial page without its scales", []string{DSAIndexer, DeepSeekV4},
		each(func(_ *layout.Group, p *layout.Plane) {
			if !isScale(p.Role) || p.Heads > 1 {
				return
			}
			// One cell of all adjacent scales: it moves when the last of its tokens does, or never.
			rows := p.TileRows
			if rows == 0 {
				rows = p.Rows
			}
			p.CellBytes, p.RowTokens, p.Rows, p.RowStride = uint64(rows)*p.CellBytes, rows*p.RowTokens,
				p.Rows/rows, p.TileStride
			p.TileRows, p.TileStride = 0, 0
		})},
	{"scales lie beside their values", []string{DSAIndexer, DeepSeekV4, QuantPlanarHND,
		QuantPlanarNHD}, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		for i := 1; i < len(ps); i++ {
			if v, s := &ps[i-1], &ps[i]; isScale(s.Role) && !isScale(v.Role) {
				s.Offset, s.RowStride = v.Offset+v.CellBytes, v.RowStride
			}
		}
		return ps
	}},
	{"pages without their scales", []string{DSAIndexer, DeepSeekV4, QuantPlanarHND, QuantPlanarNHD},
		func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
			if left := slices.DeleteFunc(slices.Clone(ps),
				func(p layout.Plane) bool { return isScale(p.Role) }); len(left) > 0 {
				return left
			}
			return ps
		}},

	{"an entry is a token's", []string{DSAIndexer, DeepSeekV4},
		each(func(_ *layout.Group, p *layout.Plane) {
			if p.Unit == layout.UnitToken {
				p.RowTokens = 1
			}
		})},
	{"entries of twice the tokens", []string{DSAIndexer, DeepSeekV4},
		each(func(_ *layout.Group, p *layout.Plane) {
			if p.RowTokens > 1 && p.Unit == layout.UnitToken {
				p.RowTokens *= 2
			}
		})},
	{"as many entries as tokens", []string{DSAIndexer, DeepSeekV4}, func(g *layout.Group,
		ps []layout.Plane) []layout.Plane {
		if len(ps) == 2 && ps[0].RowTokens > 1 && ps[0].Unit == layout.UnitToken {
			ps[1].Offset = ps[0].CellBytes * uint64(g.TokensPerBlock) // the scales' position
		}
		return ps
	}},

	{"numbers of K side by side", []string{VLLMCPUAttn}, func(_ *layout.Group,
		ps []layout.Plane) []layout.Plane {
		if k := with(ps, layout.RoleK); k.ColMajor {
			k.ColStride, k.RowStride = k.CellBytes, uint64(k.Cols)*k.CellBytes
		}
		return ps
	}},
	{"only the first number of K", []string{VLLMCPUAttn}, func(_ *layout.Group,
		ps []layout.Plane) []layout.Plane {
		if k := with(ps, layout.RoleK); k.ColMajor {
			k.Cols = 1
		}
		return ps
	}},
	{"V is turned as K is", []string{VLLMCPUAttn}, func(_ *layout.Group,
		ps []layout.Plane) []layout.Plane {
		if k, v := with(ps, layout.RoleK), with(ps, layout.RoleV); k.ColMajor {
			v.CellBytes, v.RowStride, v.Cols, v.ColStride, v.ColMajor = k.CellBytes, k.RowStride, k.Cols,
				k.ColStride, true
		}
		return ps
	}},

	{"rows and columns of the state exchanged", ofStates, func(_ *layout.Group,
		ps []layout.Plane) []layout.Plane {
		r := with(ps, layout.RoleRecurrent)
		r.RowStride, r.ColStride = r.ColStride, r.RowStride
		return ps
	}},
	{"the state is never turned", ofStates, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		with(ps, layout.RoleRecurrent).Transposed = false
		return ps
	}},
	{"the state is always turned", ofStates, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		with(ps, layout.RoleRecurrent).Transposed = true
		return ps
	}},
	{"the state ignores the column", ofStates, func(_ *layout.Group,
		ps []layout.Plane) []layout.Plane {
		with(ps, layout.RoleRecurrent).ColStride = 0
		return ps
	}},
	{"q and v of the convolution exchanged", ofParts, func(_ *layout.Group,
		ps []layout.Plane) []layout.Plane {
		q, v := with(ps, layout.RoleConvQ), with(ps, layout.RoleConvV)
		q.Offset, v.Offset = v.Offset, q.Offset
		return ps
	}},
	{"the state begins where the history does", ofStates, func(_ *layout.Group,
		ps []layout.Plane) []layout.Plane {
		with(ps, layout.RoleRecurrent).Offset = 0
		return ps
	}},
}

// TestMutants verifies the laws. Every strategy of the registry is changed by each bug that affects
// it, at minCaught five, and each time some case must copy wrongly; a refused description is not
// enough. A strategy without a reference has no such case.
func TestMutants(t *testing.T) {
	const (
		seeds     = 4000
		minCaught = 5   // ways to be wrong
		tried     = 240 // cases of a mistake that applies to the strategy
		other     = 15  // cases of a mistake that applies to others
	)
	if testutil.Race {
		testutil.Skip(t, "norace", "ten times slower with -race; make test-go runs it without")
	}
	// Validate would catch some of them first; here the copy must show them.
	unchecked := func(*layout.Layout, []uint64) error { return nil }
	homes := familiesOf(t)
	for _, b := range builtins {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			caught := 0
			for _, bug := range bugs {
				changed, hit := false, false
				tried := tried
				if bug.about != nil && !slices.Contains(bug.about, b.name) {
					tried = other
				}
				all := make([]Strategy, 0, len(builtins))
				for _, o := range builtins {
					if o != b {
						all = append(all, o)
						continue
					}
					all = append(all, mutant{b, func(g *layout.Group, ps []layout.Plane) []layout.Plane {
						before := slices.Clone(ps)
						ps = bug.wrong(g, ps)
						changed = changed || !harmless(before, ps)
						return ps
					}})
				}
				reg, err := NewRegistry(all...)
				if err != nil {
					t.Fatal(err)
				}
				for seed := 0; seed < seeds && !hit && (changed || seed < tried) &&
					len(homes[b.name]) > 0; seed++ {
					f := &homes[b.name][seed%len(homes[b.name])]
					err := rapid.Custom(func(t *rapid.T) error { return lawOfCopies(t, reg, f, unchecked) }).
						Example(seed)
					var refused refusal
					hit = err != nil && !errors.As(err, &refused)
				}
				switch {
				case changed && hit:
					caught++
				case changed:
					t.Errorf("%s: not caught in %d cases", bug.name, seeds)
				case hit:
					t.Errorf("%s: a case failed that it does not change", bug.name)
				case slices.Contains(bug.about, b.name):
					t.Errorf("%s: it is about this strategy and changes nothing", bug.name)
				}
			}
			if caught < minCaught {
				t.Errorf("only %d ways to be wrong were tried and caught, want %d", caught, minCaught)
			}
			t.Logf("%d ways to be wrong, each caught", caught)
		})
	}
}

// familiesOf returns the families in which each strategy is tried, with it and one other kind.
func familiesOf(t *testing.T) map[string][]family {
	out := map[string][]family{}
	for fi := range families {
		f := families[fi]
		byStrategy := map[string][]string{}
		for _, k := range f.kinds {
			d := dims{layers: 1, n: 4, blocks: 2, kvHeads: 2, head: 2, value: 2, scale: 1, size: 1,
				kHeads: 1, kDim: 1, vHeads: 1, vDim: 1, histor: 1, elem: 2, ratio: 1, tile: 4}
			for _, g := range f.make(k, &d).groups {
				if !slices.Contains(byStrategy[g.Strategy], k) {
					byStrategy[g.Strategy] = append(byStrategy[g.Strategy], k)
				}
			}
		}
		for s, kinds := range byStrategy {
			only := f
			only.kinds = kinds
			if i := slices.IndexFunc(f.kinds, func(k string) bool {
				return !slices.Contains(kinds, k)
			}); i >= 0 {
				only.kinds = append(slices.Clone(kinds), f.kinds[i])
			}
			out[s] = append(out[s], only)
		}
	}
	if len(out) == 0 {
		t.Fatal("no strategy is tried")
	}
	return out
}

// harmless reports whether a change has no effect: a stride along an axis of one, or a kernel page
// that is the whole block.
func harmless(a, b []layout.Plane) bool {
	if len(a) != len(b) {
		return false
	}
	plain := func(p layout.Plane) layout.Plane {
		if p.TileRows == p.Rows {
			p.TileRows = 0
		}
		for _, axis := range []struct {
			n      uint32
			stride *uint64
		}{{p.Heads, &p.HeadStride}, {p.Rows, &p.RowStride}, {p.Cols, &p.ColStride}, {p.TileRows + 1,
			&p.TileStride}} {
			if axis.n == 1 {
				*axis.stride = 0
			}
		}
		return p
	}
	for i := range a {
		if plain(a[i]) != plain(b[i]) {
			return false
		}
	}
	return true
}
