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
// detector finds little and takes ten times as long: make test-go runs all cases without it.
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
		if err := lawOfCopies(t, reg, &families[rapid.IntRange(0, len(families)-1).Draw(t, "family")],
			reg.Validate); err != nil {
			t.Fatal(err)
		}
	})
}

// refusal is a law's error if nothing was copied.
type refusal struct{ error }

func lawOfCopies(t *rapid.T, reg *Registry, f *family, validate func(*layout.Layout,
	[]uint64) error) error {
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
	moved(from, to, layer, layer, ft, tt, start, end, func(_ layout.Role, s,
		d uint64) {
		want[d] = src[s]
	})

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
				if last.Len != 0 && last.SrcOff+last.Len == p.SrcOff && last.DstOff+last.Len == p.DstOff &&
					allJoin(tpl) {
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
	moved(from, to, layer, layer, ft, tt, start, end, func(_ layout.Role, s,
		_ uint64) {
		was[s] = src[s]
	})
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
	rapid.Check(t, func(t *rapid.T) {
		lawOfPlans(t, reg, &families[rapid.IntRange(0, len(families)-1).Draw(t, "family")])
	})
}

// prompt is a drawn prompt, the ranks and stages of a prefill engine, and one rank of a decode
// engine.
type prompt struct {
	sources []*cache
	at      []int // the first layer of each source
	to      *cache
	layouts []*layout.Layout // of the sources
	dst     *layout.Layout
	shares  []Share
	ft, tt  []uint32 // block tables of the two engines
	tokens  uint64
	skip    uint64
	kept    uint64 // the sources have the tokens from here on
	first   uint64 // the transfer moves the tokens from here on
}

func drawPrompt(t *rapid.T, reg *Registry, f *family) *prompt {
	common := genCommon(t, f)
	p := &prompt{tokens: rapid.Uint64Range(1, 24).Draw(t, "tokens")}
	if rapid.IntRange(0, 9).Draw(t, "big") == 0 {
		common.head *= 700 // several chunks a layer; nearly all of the time goes into these
	}
	fd, td := genDims(t, f, "from.", common), genDims(t, f, "to.", common)
	fd.blocks, td.blocks = (p.tokens-1)/fd.n+1+rapid.Uint64Range(0, 3).Draw(t, "spare"),
		(p.tokens-1)/td.n+1
	fd.size = rapid.SampledFrom(sizesOf(f)).Draw(t, "from.tp")
	td.size = rapid.SampledFrom(sizesOf(f)).Draw(t, "to.tp")
	td.rank = rapid.Uint64Range(0, td.size-1).Draw(t, "to.rank")
	fromKind := rapid.SampledFrom(f.kinds).Draw(t, "from.kind")
	p.to = f.make(rapid.SampledFrom(f.kinds).Draw(t, "to.kind"), td)
	window := uint64(0)
	if !p.to.state && !p.to.opaque {
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
	windowed(p.to)
	cut := rapid.IntRange(0, fd.layers).Draw(t, "pp")
	for stage, n := range []int{cut, fd.layers - cut} {
		for rank := range fd.size {
			if n == 0 {
				continue
			}
			d := *fd
			d.layers, d.rank, d.first = n, rank, stage*cut
			p.sources, p.at = append(p.sources, windowed(f.make(fromKind, &d))), append(p.at, stage*cut)
		}
	}
	p.layouts = make([]*layout.Layout, len(p.sources))
	for i, s := range p.sources {
		p.layouts[i] = s.layout()
		if err := reg.Validate(p.layouts[i], []uint64{s.size}); err != nil {
			t.Fatal(err)
		}
	}
	p.dst = p.to.layout()
	if err := reg.Validate(p.dst, []uint64{p.to.size}); err != nil {
		t.Fatal(err)
	}
	load := rapid.SliceOfN(rapid.Uint64Range(0, 9), len(p.sources), len(p.sources)).Draw(t, "load")
	var err error
	p.shares, err = Assign(reg, p.layouts, p.dst, func(i int) uint64 { return load[i] })
	if err != nil {
		t.Fatal(err)
	}
	p.tt = genTable(t, "toTable", p.to.blocks, 99)
	p.skip = min(p.tokens, p.to.n*rapid.Uint64Range(0, (p.tokens-1)/p.to.n+1).Draw(t, "skip"))
	// Each side has whole blocks of a window, from the block of the first token that the next token
	// sees. Freed blocks belong to another prompt: at the source they hold arbitrary bytes, and on
	// both sides the table names a block in use.
	p.first = p.skip
	p.ft = genTable(t, "fromTable", fd.blocks, 99)
	if window > 0 && p.tokens+1 > window {
		unseen := p.tokens + 1 - window
		p.kept = unseen / fd.n * fd.n
		p.first = max(p.first, p.kept, unseen/p.to.n*p.to.n)
		given := func(table []uint32, n uint64) {
			for b := range min(unseen/n, uint64(len(table))) {
				table[b] = table[len(table)-1]
			}
		}
		given(p.ft, fd.n)
		given(p.tt, p.to.n)
	}
	return p
}

func lawOfPlans(t *rapid.T, reg *Registry, f *family) {
	p := drawPrompt(t, reg, f)
	sources, at, to, layouts, dst, shares := p.sources, p.at, p.to, p.layouts, p.dst, p.shares
	ft, tt, tokens, skip, kept, first := p.ft, p.tt, p.tokens, p.skip, p.kept, p.first
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
			fillFrom(to, l, tt, first, tokens, lacks, func(int, layout.Role, uint64, uint64, uint64,
				uint64) byte {
				return 1
			})
		}
	}
	for _, share := range shares {
		from := sources[share.Source]
		skips, ftabs, ttabs := repeat(uint32(skip), len(to.groups)), repeat(ft, len(from.groups)),
			repeat(tt, len(to.groups))
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
				t.Fatalf("space has %d bytes for %v, the source has %d (%v)", n, r, len(flat), err)
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
			plan, err := NewPlan(reg, layouts[shares[0].Source], dst, uint32(tokens), repeat(uint32(skip),
				len(to.groups)))
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
		plan, err := NewShare(reg, layouts[share.Source], dst, &share, uint32(tokens),
			repeat(uint32(skip), len(to.groups)))
		if err != nil {
			t.Fatal(err)
		}
		for l := range dst.NumLayers() {
			for part := range plan.Parts(l) {
				runs, _, _, err := plan.Runs(nil, l, part, repeat(ft, len(from.groups)),
					repeat(tt, len(to.groups)))
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
			t.Fatalf("byte %d of %d: got %d, want %d (touched %v)", i, len(want), got[i],
				want[i], touched[i])
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
func fill(c *cache, firstLayer int, table []uint32, first, tokens uint64, mem []byte,
	model modelByte) {
	for l := range c.layers {
		fillFrom(c, l, table, first, tokens, mem, func(layer int, role layout.Role, head, e, col,
			x uint64) byte {
			return model(firstLayer+layer, role, head, e, col, x)
		})
	}
}

func fillFrom(c *cache, layer int, table []uint32, first, tokens uint64, mem []byte,
	model modelByte) {
	for i := range c.contents {
		k := &c.contents[i]
		for h := range k.own {
			for x := range k.bytes {
				if c.state {
					for r := range k.rows {
						for col := range k.cols {
							mem[c.at(layer, uint64(table[(tokens-1)/c.n]), r, k.role, h, col, x)] = model(layer, k.role,
								k.first+h, r, col, x)
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
					mem[c.at(layer, uint64(table[tok/c.n]), tok%c.n/c.ratio, k.role, h, 0, x)] = model(layer,
						k.role, k.first+h, e, 0, x)
				}
			}
		}
	}
}
