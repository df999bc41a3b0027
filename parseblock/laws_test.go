package parseblock

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// propertyCases is the number of cases of each law. Nothing here is concurrent, so the race
// detector finds little and takes ten times as long: "bounds" in make test runs all cases without
// it.
const (
	propertyCases = "5000"
	racedCases    = "500"
)

func TestMain(m *testing.M) {
	flag.Parse()
	// the default: not set on the command line
	if flag.Lookup("rapid.checks").Value.String() == "100" {
		cases := propertyCases
		if testutil.Race {
			cases = racedCases
		}
		if err := flag.Set("rapid.checks", cases); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

// TestLaws copies one layer of one rank to one of another by runs and by the reference, for every
// pair of caches with the same content: exactly the chosen tokens and the common heads, each byte
// once, equal in two halves, and back again to where it came from.
func TestLaws(t *testing.T) {
	reg := Default()
	rapid.Check(t, func(t *rapid.T) {
		if err := lawOfCopies(t, reg, &families[rapid.IntRange(0, len(families)-1).Draw(t, "family")], reg.Validate); err != nil {
			t.Fatal(err)
		}
	})
}

// refusal is a law's error if nothing was copied.
type refusal struct{ error }

func lawOfCopies(t *rapid.T, reg *Registry, f *family, validate func(*layout.Layout, []uint64) error) error {
	common := genCommon(t, f)
	var cs [2]*cache
	var kind string
	blocks, table := rapid.Uint64Range(1, 8), 12
	if rapid.IntRange(0, 49).Draw(t, "long") == 0 { // more than maxSteps
		blocks, table = rapid.Uint64Range(maxSteps, 3*maxSteps), 3*maxSteps
	}
	for i, label := range []string{"from.", "to."} {
		d := genDims(t, f, label, common)
		d.blocks = blocks.Draw(t, label+"blocks")
		d.size = rapid.SampledFrom(sizesOf(f)).Draw(t, label+"tp")
		d.rank = rapid.Uint64Range(0, d.size-1).Draw(t, label+"rank")
		if i == 0 || rapid.Bool().Draw(t, "other kind") {
			kind = rapid.SampledFrom(f.kinds).Draw(t, label+"kind")
		}
		cs[i] = f.make(kind, d)
		if err := validate(cs[i].layout(), []uint64{cs[i].size}); err != nil {
			return err
		}
	}
	from, to := cs[0], cs[1]
	ft, tt := genTable(t, "fromTable", from.blocks, table), genTable(t, "toTable", to.blocks, table)
	limit := min(uint64(len(ft))*from.n, uint64(len(tt))*to.n)
	start := rapid.Uint64Range(0, limit-1).Draw(t, "start")
	if from.opaque {
		start -= start % from.n
	}
	end := rapid.Uint64Range(start+1, limit).Draw(t, "end")
	layer := rapid.IntRange(0, from.layers-1).Draw(t, "layer")

	src := random(from.size, end)
	want := make([]byte, to.size)
	moved(from, to, layer, layer, ft, tt, start, end, func(_ layout.Role, s, d uint64) { want[d] = src[s] })

	got, touched := make([]byte, to.size), make([]bool, to.size)
	firstGroup := rapid.IntRange(0, len(to.groups)-1).Draw(t, "first group")
	apply := func(a, b uint64) error {
		if a == b {
			return nil
		}
		for k := range to.groups {
			gi := (k + firstGroup) % len(to.groups)
			// The plan pairs layers of one model layer that are registered separately; this test
			// uses only independent layers.
			fg, tg := &from.groups[min(gi, len(from.groups)-1)], &to.groups[gi]
			tpl, err := reg.Template(Side{fg, &fg.Layers[layer]}, Side{tg, &tg.Layers[layer]})
			if err != nil {
				return refusal{err}
			}
			keep := []layout.Run{{SrcOff: 1, DstOff: 2, Count: 1, Outer: 1, Len: 3}}
			runs, err := tpl.Append(keep, ft, tt, layout.TokenRange{Start: uint32(a), End: uint32(b)})
			if err != nil {
				return err
			}
			if runs[0] != keep[0] {
				return fmt.Errorf("the caller's run changed: %+v", runs[0])
			}
			var last layout.IpcBlock
			var pieces uint64
			for i := range runs[1:] {
				pieces += runs[1+i].Pieces()
			}
			for p := range layout.Explode(runs[1:]) {
				pieces--
				if p.Len == 0 || p.SrcOff+p.Len > from.size || p.DstOff+p.Len > to.size {
					return fmt.Errorf("%+v is outside regions of %d and %d", p, from.size, to.size)
				}
				if last.Len != 0 && last.SrcOff+last.Len == p.SrcOff && last.DstOff+last.Len == p.DstOff && allJoin(tpl) {
					return fmt.Errorf("%+v and %+v are not coalesced", last, p)
				}
				last = p
				copy(got[p.DstOff:p.DstOff+p.Len], src[p.SrcOff:])
				for i := range p.Len {
					if touched[p.DstOff+i] {
						return fmt.Errorf("byte %d is written twice", p.DstOff+i)
					}
					touched[p.DstOff+i] = true
				}
			}
			if pieces != 0 {
				return fmt.Errorf("runs count %d pieces more than they have", pieces)
			}
		}
		return nil
	}
	if len(from.groups) != len(to.groups) {
		return nil // K and V apart on one side only: TestPlanLaws
	}
	mid := start
	if !from.state && rapid.Bool().Draw(t, "halves") {
		mid = rapid.Uint64Range(start, end).Draw(t, "mid")
		if from.opaque {
			mid -= mid % from.n
		}
	}
	if err := apply(start, mid); err != nil {
		return err
	}
	if err := apply(mid, end); err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return errors.New("runs and the reference differ")
	}
	// Back again: the copied bytes return to their place, and no others.
	back, was := make([]byte, from.size), make([]byte, from.size)
	moved(from, to, layer, layer, ft, tt, start, end, func(_ layout.Role, s, _ uint64) { was[s] = src[s] })
	for gi := range from.groups {
		fg, tg := &from.groups[gi], &to.groups[gi]
		tpl, err := reg.Template(Side{tg, &tg.Layers[layer]}, Side{fg, &fg.Layers[layer]})
		if err != nil {
			return refusal{fmt.Errorf("back: %w", err)}
		}
		runs, err := tpl.Append(nil, tt, ft, layout.TokenRange{Start: uint32(start), End: uint32(end)})
		if err != nil {
			return fmt.Errorf("back: %w", err)
		}
		for p := range layout.Explode(runs) {
			copy(back[p.DstOff:p.DstOff+p.Len], got[p.SrcOff:])
		}
	}
	if !bytes.Equal(back, was) {
		return errors.New("what goes there and back is not what it was")
	}
	return nil
}

// allJoin reports whether any rows are one piece of memory on both sides, so that adjacent pieces
// must have been joined. A part of an HND page is a row of pieces instead, and its first piece may
// touch the previous page.
func allJoin(t *Template) bool {
	if len(t.pairs) != 1 {
		return false
	}
	row := t.pairs[0].shape(1)
	return t.pairs[0].full.dims == 0 && row.dims == 0
}

// TestPlanLaws moves a prompt from all ranks and stages of a prefill engine to one rank of a decode
// engine with another order, block size, tensor and pipeline parallelism, chunk range by chunk
// range. Together the plans move everything once.
func TestPlanLaws(t *testing.T) {
	reg := Default()
	rapid.Check(t, func(t *rapid.T) { lawOfPlans(t, reg, &families[rapid.IntRange(0, len(families)-1).Draw(t, "family")]) })
}

func lawOfPlans(t *rapid.T, reg *Registry, f *family) {
	common := genCommon(t, f)
	tokens := rapid.Uint64Range(1, 24).Draw(t, "tokens")
	if rapid.IntRange(0, 9).Draw(t, "big") == 0 {
		common.head *= 700 // several chunks a layer; nearly all of the time goes into these
	}
	fd, td := genDims(t, f, "from.", common), genDims(t, f, "to.", common)
	fd.blocks, td.blocks = (tokens-1)/fd.n+1+rapid.Uint64Range(0, 3).Draw(t, "spare"), (tokens-1)/td.n+1
	fd.size = rapid.SampledFrom(sizesOf(f)).Draw(t, "from.tp")
	td.size = rapid.SampledFrom(sizesOf(f)).Draw(t, "to.tp")
	td.rank = rapid.Uint64Range(0, td.size-1).Draw(t, "to.rank")
	fromKind := rapid.SampledFrom(f.kinds).Draw(t, "from.kind")
	to := f.make(rapid.SampledFrom(f.kinds).Draw(t, "to.kind"), td)
	window := uint64(0)
	if !to.state && !to.opaque {
		window = rapid.Uint64Range(0, 30).Draw(t, "window")
	}
	windowed := func(c *cache) *cache {
		for gi := range c.groups {
			if window > 0 {
				c.groups[gi].Params["window"] = int64(window)
			}
		}
		return c
	}
	windowed(to)
	cut := rapid.IntRange(0, fd.layers).Draw(t, "pp")
	var sources []*cache
	var at []int // first layer
	for stage, n := range []int{cut, fd.layers - cut} {
		for rank := range fd.size {
			if n == 0 {
				continue
			}
			d := *fd
			d.layers, d.rank, d.first = n, rank, stage*cut
			sources, at = append(sources, windowed(f.make(fromKind, &d))), append(at, stage*cut)
		}
	}
	layouts := make([]*layout.Layout, len(sources))
	for i, s := range sources {
		layouts[i] = s.layout()
		if err := reg.Validate(layouts[i], []uint64{s.size}); err != nil {
			t.Fatal(err)
		}
	}
	dst := to.layout()
	if err := reg.Validate(dst, []uint64{to.size}); err != nil {
		t.Fatal(err)
	}
	load := rapid.SliceOfN(rapid.Uint64Range(0, 9), len(sources), len(sources)).Draw(t, "load")
	shares, err := Assign(reg, layouts, dst, func(i int) uint64 { return load[i] })
	if err != nil {
		t.Fatal(err)
	}
	if err := Prove(reg, layouts, dst, shares); err != nil {
		t.Fatal(err)
	}
	for i := range shares {
		// A share survives encoding and decoding.
		back, err := DecodeShare(shares[i].Encode(), dst.NumLayers())
		if err != nil || !slices.Equal(back.roles, shares[i].roles) {
			t.Fatalf("share %v came back as %v: %v", shares[i].roles, back, err)
		}
	}
	tt := genTable(t, "toTable", to.blocks, 99)
	skip := min(tokens, to.n*rapid.Uint64Range(0, (tokens-1)/to.n+1).Draw(t, "skip"))
	// Each side has whole blocks of a window, from the block of the first token that the next token
	// sees. Freed blocks belong to another prompt: at the source they hold arbitrary bytes, and on
	// both sides the table names a block in use.
	first, kept := skip, uint64(0)
	ft := genTable(t, "fromTable", fd.blocks, 99)
	if window > 0 && tokens+1 > window {
		kept = (tokens + 1 - window) / fd.n * fd.n
		first = max(first, kept, (tokens+1-window)/to.n*to.n)
		given := func(table []uint32, n uint64) {
			for b := range min((tokens+1-window)/n, uint64(len(table))) {
				table[b] = table[len(table)-1]
			}
		}
		given(ft, fd.n)
		given(tt, to.n)
	}
	got, want, touched := make([]byte, to.size), make([]byte, to.size), make([]bool, to.size)
	// Every source has the same content, so the byte's value does not depend on the source that
	// sends it.
	mems := make([][]byte, len(sources))
	model := func(layer int, role layout.Role, head, e, col, x uint64) byte {
		return byte(uint64(layer)*131 + uint64(role)*17 + head*29 + e*7 + col*5 + x*3 + 1)
	}
	for i, s := range sources {
		mems[i] = random(s.size, uint64(i))
		fill(s, at[i], ft, kept, tokens, mems[i], model)
	}
	lacks := make([]byte, to.size) // 1 for each byte that must arrive
	if skip < tokens {
		for l := range to.layers {
			fillFrom(to, l, tt, first, tokens, want, model)
			fillFrom(to, l, tt, first, tokens, lacks, func(int, layout.Role, uint64, uint64, uint64, uint64) byte { return 1 })
		}
	}
	for _, share := range shares {
		from := sources[share.Source]
		skips, ftabs, ttabs := repeat(uint32(skip), len(to.groups)), repeat(ft, len(from.groups)), repeat(tt, len(to.groups))
		plan, err := NewShare(reg, layouts[share.Source], dst, &share, uint32(tokens), skips)
		if err != nil {
			t.Fatal(err)
		}
		source, err := plan.Side(reg, layouts[share.Source], ftabs)
		if err != nil {
			t.Fatal(err)
		}
		receiver, err := plan.Side(reg, dst, ttabs)
		if err != nil {
			t.Fatal(err)
		}
		if err := receiver.Covers(); err != nil {
			t.Fatal(err)
		}
		sp := plan.Space()
		for c := uint32(0); c < sp.NumChunks(); {
			n := rapid.Uint32Range(1, min(5, sp.NumChunks()-c)).Draw(t, "slice")
			r := transfer.Range{First: c, Count: n}
			c += n
			ps, err := source.Append(nil, r)
			if err != nil {
				t.Fatal(err)
			}
			pd, err := receiver.Append(nil, r)
			if err != nil {
				t.Fatal(err)
			}
			var flat []byte
			for _, p := range ps {
				flat = append(flat, mems[share.Source][p.Off:p.Off+p.Len]...)
			}
			if n, err := sp.Bytes(r); err != nil || n != uint64(len(flat)) {
				t.Fatalf("space says %d bytes for %v, the source has %d (%v)", n, r, len(flat), err)
			}
			for _, p := range pd {
				for i := range p.Len {
					if touched[p.Off+i] {
						t.Fatalf("byte %d is written twice", p.Off+i)
					}
					touched[p.Off+i] = true
				}
				copy(got[p.Off:p.Off+p.Len], flat[:p.Len])
				flat = flat[p.Len:]
			}
			if len(flat) != 0 {
				t.Fatalf("%d bytes of %v have no place", len(flat), r)
			}
		}
	}
	for i := range touched {
		if touched[i] != (lacks[i] == 1) {
			t.Fatalf("byte %d of %d: written %v, lacking %v", i, len(touched), touched[i], lacks[i] == 1)
		}
	}
	// A receiver's plan from its own layout alone has equally many bytes in the same places, unless
	// the source has less of a window's first block; between equal engines also the same order.
	own, err := NewPlan(reg, dst, dst, uint32(tokens), repeat(uint32(skip), len(to.groups)))
	if err != nil {
		t.Fatal(err)
	}
	if own.Space().NumChunks() > 0 {
		side, err := own.Side(reg, dst, repeat(tt, len(to.groups)))
		if err != nil {
			t.Fatal(err)
		}
		mine, err := side.Append(nil, own.Space().All())
		if err != nil {
			t.Fatal(err)
		}
		n := uint64(0)
		for _, x := range touched {
			if x {
				n++
			}
		}
		for _, p := range mine {
			for i := range p.Len {
				switch {
				case touched[p.Off+i]:
					n--
				case first%to.n == 0:
					t.Fatalf("byte %d is in the receiver's own plan only", p.Off+i)
				}
			}
		}
		if n != 0 {
			t.Fatalf("the plans move %d bytes that are not in the receiver's own", n)
		}
		if len(shares) == 1 && layouts[shares[0].Source].Geometry() == dst.Geometry() {
			plan, err := NewPlan(reg, layouts[shares[0].Source], dst, uint32(tokens), repeat(uint32(skip), len(to.groups)))
			if err != nil {
				t.Fatal(err)
			}
			theirs, err := plan.Side(reg, dst, repeat(tt, len(to.groups)))
			if err != nil {
				t.Fatal(err)
			}
			if got, err := theirs.Append(nil, plan.Space().All()); err != nil || !slices.Equal(got, mine) {
				t.Fatalf("equal engines plan differently: %v and %v (%v)", got, mine, err)
			}
		}
	}
	byRuns := make([]byte, to.size)
	for _, share := range shares {
		from := sources[share.Source]
		plan, err := NewShare(reg, layouts[share.Source], dst, &share, uint32(tokens), repeat(uint32(skip), len(to.groups)))
		if err != nil {
			t.Fatal(err)
		}
		for l := range dst.NumLayers() {
			for part := range plan.Parts(l) {
				runs, _, _, err := plan.Runs(nil, l, part, repeat(ft, len(from.groups)), repeat(tt, len(to.groups)))
				if err != nil {
					t.Fatal(err)
				}
				for p := range layout.Explode(runs) {
					copy(byRuns[p.DstOff:p.DstOff+p.Len], mems[share.Source][p.SrcOff:])
				}
			}
		}
	}
	if !bytes.Equal(byRuns, want) {
		t.Fatal("the plan's runs and the reference differ")
	}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("byte %d of %d: got %d, want %d (touched %v)", i, len(want), got[i], want[i], touched[i])
		}
	}
}

func repeat[T any](v T, n int) []T {
	out := make([]T, n)
	for i := range out {
		out[i] = v
	}
	return out
}

type modelByte func(layer int, role layout.Role, head, e, col, x uint64) byte

// fill writes the model's content of a prompt into a cache, as its engine would have.
func fill(c *cache, firstLayer int, table []uint32, first, tokens uint64, mem []byte, model modelByte) {
	for l := range c.layers {
		fillFrom(c, l, table, first, tokens, mem, func(layer int, role layout.Role, head, e, col, x uint64) byte {
			return model(firstLayer+layer, role, head, e, col, x)
		})
	}
}

func fillFrom(c *cache, layer int, table []uint32, first, tokens uint64, mem []byte, model modelByte) {
	for i := range c.contents {
		k := &c.contents[i]
		for h := range k.own {
			for x := range k.bytes {
				if c.state {
					for r := range k.rows {
						for col := range k.cols {
							mem[c.at(layer, uint64(table[(tokens-1)/c.n]), r, k.role, h, col, x)] = model(layer, k.role, k.first+h, r, col, x)
						}
					}
					continue
				}
				end := tokens
				if c.opaque {
					end = (tokens + c.n - 1) / c.n * c.n
				}
				for e := first / c.ratio; e < end/c.ratio; e++ {
					tok := e * c.ratio
					mem[c.at(layer, uint64(table[tok/c.n]), tok%c.n/c.ratio, k.role, h, 0, x)] = model(layer, k.role, k.first+h, e, 0, x)
				}
			}
		}
	}
}

// TestEveryStrategyIsTried keeps the families complete: a strategy without a reference is not
// tested.
func TestEveryStrategyIsTried(t *testing.T) {
	tried := map[string]bool{}
	d := &dims{layers: 1, n: 4, blocks: 2, kvHeads: 2, head: 2, value: 2, scale: 1, size: 1, kHeads: 1, kDim: 1, vHeads: 1, vDim: 1, histor: 1, elem: 2, ratio: 1, tile: 4}
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

func (m mutant) Planes(dst []layout.Plane, g *layout.Group, l *layout.Layer) ([]layout.Plane, error) {
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
func each(wrong func(g *layout.Group, p *layout.Plane)) func(*layout.Group, []layout.Plane) []layout.Plane {
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
	return r == layout.RoleIndexScale || r == layout.RoleLatentScale || r == layout.RoleKScale || r == layout.RoleVScale
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
	ofK      = []string{FlashKVFirst, FlashKVFirstHND, FlashBlockFirst, FlashBlockFirstHND, FlashToken, SGLangLayerFirst, SGLangPageFirst, SGLangPageFirstDirect, SGLangPageHead}
	ofHeads  = append([]string{PackedHND, PackedNHD, QuantInlineHND, QuantInlineNHD, QuantPlanarHND, QuantPlanarNHD, ScalesKVFirst, SGLangK, SGLangV, VLLMCPUAttn}, ofK...)
	ofStates = []string{GDNState, KDAState, Mamba2State}
)

// bugs are mistakes by kind: the start of a plane, the size of a cell, strides, the heads of a
// rank, kernel pages, entries of several tokens, transposed columns and matrices.
var bugs = []bug{
	{"off by one byte", nil, func(_ *layout.Group, ps []layout.Plane) []layout.Plane { ps[0].Offset++; return ps }},
	{"the last plane starts where the first does", nil, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		ps[len(ps)-1].Offset = 0
		return ps
	}},
	{"the last plane is forgotten", nil, func(_ *layout.Group, ps []layout.Plane) []layout.Plane { return ps[:len(ps)-1] }},
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
	{"the last plane ignores the row", nil, func(_ *layout.Group, ps []layout.Plane) []layout.Plane { ps[len(ps)-1].RowStride = 0; return ps }},
	{"a block has one row more", nil, func(_ *layout.Group, ps []layout.Plane) []layout.Plane { ps[0].Rows++; return ps }},
	{"the page is half as long", []string{Page, VLLMCPUAttn}, each(func(_ *layout.Group, p *layout.Plane) {
		if p.Unit == layout.UnitBlock && p.CellBytes > 1 {
			p.CellBytes /= 2
		}
	})},
	{"opaque pages taken for tokens", []string{Page, VLLMCPUAttn}, each(func(_ *layout.Group, p *layout.Plane) {
		if p.Unit == layout.UnitBlock {
			p.Unit = layout.UnitToken
		}
	})},

	{"V ignores the head", ofK, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		with(ps, layout.RoleV).HeadStride = 0
		return ps
	}},
	{"V begins behind K of its head", []string{FlashBlockFirstHND, FlashKVFirstHND}, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		k, v := with(ps, layout.RoleK), with(ps, layout.RoleV)
		if v.HeadMajor && v.ColStride == 0 {
			v.Offset = k.HeadStride // the page's middle only with one head
		}
		return ps
	}},
	{"the last plane ignores the head", nil, func(_ *layout.Group, ps []layout.Plane) []layout.Plane { ps[len(ps)-1].HeadStride = 0; return ps }},

	{"replicated heads modulo, not divided", append(append([]string{}, ofHeads...), ofStates...), each(func(g *layout.Group, p *layout.Plane) {
		if rank, size, heads, width := ranked(g, p); size > heads {
			p.FirstHead = rank % heads * width
		}
	})},
	{"a rank's heads begin after as many for each before it", append(append([]string{}, ofHeads...), ofStates...), each(func(g *layout.Group, p *layout.Plane) {
		if rank, size, heads, width := ranked(g, p); size < heads {
			p.FirstHead = min(rank*p.Heads, (heads-1)*width)
		}
	})},
	{"every rank has the first head", append(append([]string{}, ofHeads...), ofStates...), each(func(_ *layout.Group, p *layout.Plane) { p.FirstHead = 0 })},

	{"kernel pages are not counted", []string{DSAIndexer, PackedHND, QuantInlineHND, QuantPlanarHND, QuantPlanarNHD}, each(func(_ *layout.Group, p *layout.Plane) { p.TileRows, p.TileStride = 0, 0 })},
	{"kernel pages are as far apart as their values", []string{DSAIndexer, QuantPlanarHND, QuantPlanarNHD}, each(func(_ *layout.Group, p *layout.Plane) {
		if p.TileStride != 0 {
			p.TileStride = uint64(p.TileRows) * p.CellBytes
		}
	})},
	{"all kernel pages have the scales of the first", []string{DSAIndexer, QuantPlanarHND, QuantPlanarNHD}, each(func(_ *layout.Group, p *layout.Plane) {
		if isScale(p.Role) {
			p.TileStride = 0
		}
	})},
	{"scales behind all values of a block", []string{DSAIndexer}, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		v, s := with(ps, layout.RoleIndex), with(ps, layout.RoleIndexScale)
		s.Offset = uint64(v.Rows) * v.CellBytes
		v.TileRows, v.TileStride, s.TileRows, s.TileStride = 0, 0, 0, 0
		return ps
	}},
	{"a partial page without its scales", []string{DSAIndexer, DeepSeekV4}, each(func(_ *layout.Group, p *layout.Plane) {
		if !isScale(p.Role) || p.Heads > 1 {
			return
		}
		// One cell of all adjacent scales: it moves when the last of its tokens does, or never.
		rows := p.TileRows
		if rows == 0 {
			rows = p.Rows
		}
		p.CellBytes, p.RowTokens, p.Rows, p.RowStride = uint64(rows)*p.CellBytes, rows*p.RowTokens, p.Rows/rows, p.TileStride
		p.TileRows, p.TileStride = 0, 0
	})},
	{"scales lie beside their values", []string{DSAIndexer, DeepSeekV4, QuantPlanarHND, QuantPlanarNHD}, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		for i := 1; i < len(ps); i++ {
			if v, s := &ps[i-1], &ps[i]; isScale(s.Role) && !isScale(v.Role) {
				s.Offset, s.RowStride = v.Offset+v.CellBytes, v.RowStride
			}
		}
		return ps
	}},
	{"pages without their scales", []string{DSAIndexer, DeepSeekV4, QuantPlanarHND, QuantPlanarNHD}, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		if left := slices.DeleteFunc(slices.Clone(ps), func(p layout.Plane) bool { return isScale(p.Role) }); len(left) > 0 {
			return left
		}
		return ps
	}},

	{"an entry is a token's", []string{DSAIndexer, DeepSeekV4}, each(func(_ *layout.Group, p *layout.Plane) {
		if p.Unit == layout.UnitToken {
			p.RowTokens = 1
		}
	})},
	{"entries of twice the tokens", []string{DSAIndexer, DeepSeekV4}, each(func(_ *layout.Group, p *layout.Plane) {
		if p.RowTokens > 1 && p.Unit == layout.UnitToken {
			p.RowTokens *= 2
		}
	})},
	{"as many entries as tokens", []string{DSAIndexer, DeepSeekV4}, func(g *layout.Group, ps []layout.Plane) []layout.Plane {
		if len(ps) == 2 && ps[0].RowTokens > 1 && ps[0].Unit == layout.UnitToken {
			ps[1].Offset = ps[0].CellBytes * uint64(g.TokensPerBlock) // the scales' position
		}
		return ps
	}},

	{"numbers of K side by side", []string{VLLMCPUAttn}, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		if k := with(ps, layout.RoleK); k.ColMajor {
			k.ColStride, k.RowStride = k.CellBytes, uint64(k.Cols)*k.CellBytes
		}
		return ps
	}},
	{"only the first number of K", []string{VLLMCPUAttn}, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		if k := with(ps, layout.RoleK); k.ColMajor {
			k.Cols = 1
		}
		return ps
	}},
	{"V is turned as K is", []string{VLLMCPUAttn}, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		if k, v := with(ps, layout.RoleK), with(ps, layout.RoleV); k.ColMajor {
			v.CellBytes, v.RowStride, v.Cols, v.ColStride, v.ColMajor = k.CellBytes, k.RowStride, k.Cols, k.ColStride, true
		}
		return ps
	}},

	{"rows and columns of the state exchanged", ofStates, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
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
	{"the state ignores the column", ofStates, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		with(ps, layout.RoleRecurrent).ColStride = 0
		return ps
	}},
	{"q and v of the convolution exchanged", ofStates, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		q, v := with(ps, layout.RoleConvQ), with(ps, layout.RoleConvV)
		q.Offset, v.Offset = v.Offset, q.Offset
		return ps
	}},
	{"the state begins where the history does", ofStates, func(_ *layout.Group, ps []layout.Plane) []layout.Plane {
		with(ps, layout.RoleRecurrent).Offset = 0
		return ps
	}},
}

// TestMutants verifies the laws. Every strategy of the registry is changed by each bug that affects
// it, at least five, and each time some case must copy wrongly; a refused description is not
// enough. A strategy without a reference has no such case.
func TestMutants(t *testing.T) {
	const (
		seeds = 4000
		least = 5   // ways to be wrong
		tried = 240 // cases of a mistake that applies to the strategy
		other = 15  // cases of a mistake that applies to others
	)
	if testutil.Race {
		testutil.Skip(t, "norace", "make test-all has it in its part bounds, without the race detector, which takes ten times as long")
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
				for seed := 0; seed < seeds && !hit && (changed || seed < tried) && len(homes[b.name]) > 0; seed++ {
					f := &homes[b.name][seed%len(homes[b.name])]
					err := rapid.Custom(func(t *rapid.T) error { return lawOfCopies(t, reg, f, unchecked) }).Example(seed)
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
			if caught < least {
				t.Errorf("only %d ways to be wrong were tried and caught, want %d", caught, least)
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
			d := dims{layers: 1, n: 4, blocks: 2, kvHeads: 2, head: 2, value: 2, scale: 1, size: 1, kHeads: 1, kDim: 1, vHeads: 1, vDim: 1, histor: 1, elem: 2, ratio: 1, tile: 4}
			for _, g := range f.make(k, &d).groups {
				if !slices.Contains(byStrategy[g.Strategy], k) {
					byStrategy[g.Strategy] = append(byStrategy[g.Strategy], k)
				}
			}
		}
		for s, kinds := range byStrategy {
			only := f
			only.kinds = kinds
			if i := slices.IndexFunc(f.kinds, func(k string) bool { return !slices.Contains(kinds, k) }); i >= 0 {
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
		}{{p.Heads, &p.HeadStride}, {p.Rows, &p.RowStride}, {p.Cols, &p.ColStride}, {p.TileRows + 1, &p.TileStride}} {
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
