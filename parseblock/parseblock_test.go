package parseblock

import (
	"bytes"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// propertyCases is how many cases each law is tried with.
const propertyCases = "5000"

func TestMain(m *testing.M) {
	flag.Parse()
	if flag.Lookup("rapid.checks").Value.String() == "100" { // its default: not chosen on the command line
		if err := flag.Set("rapid.checks", propertyCases); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

// model is a cache described by its shape, as an engine would: the reference for addresses.
type model struct {
	strategy       string
	n, heads, row  uint64 // tokens per block, heads, bytes of one head of one token (of K, of V, or of both where packed)
	blocks, stride uint64
	base, vOff     uint64
	size           uint64 // of the region
}

func (m model) pageBytes() uint64 {
	b := m.n * m.heads * m.row
	if m.strategy == FlashKVFirst || m.strategy == FlashBlockFirst {
		b *= 2
	}
	return b
}

// bytesOf yields the addresses of every byte of one token, in an order that depends on the token alone.
func (m model) bytesOf(block, t uint64, yield func(addr uint64)) {
	kvs := uint64(1)
	if m.strategy == FlashKVFirst || m.strategy == FlashBlockFirst {
		kvs = 2
	}
	for kv := range kvs {
		for h := range m.heads {
			for x := range m.row {
				a := m.base + block*m.stride + x
				switch m.strategy {
				case PackedHND:
					a += h*m.n*m.row + t*m.row
				case PackedNHD, MLA, VLLMCPUAttn:
					a += t*m.heads*m.row + h*m.row
				case FlashKVFirst:
					a += kv*m.vOff + t*m.heads*m.row + h*m.row
				case FlashBlockFirst:
					a += kv*m.n*m.heads*m.row + t*m.heads*m.row + h*m.row
				}
				yield(a)
			}
		}
	}
}

func (m model) group(layers int, gap uint64) layout.Group {
	g := layout.Group{TokensPerBlock: uint32(m.n), Strategy: m.strategy, NumBlocks: uint32(m.blocks), Params: map[string]int64{"heads": int64(m.heads)}}
	if m.strategy == FlashKVFirst {
		g.Params["v_offset"] = int64(m.vOff)
	}
	for i := range layers {
		g.Layers = append(g.Layers, layout.Layer{Name: fmt.Sprint("l", i), Index: i, Base: m.base + uint64(i)*gap, BlockStride: m.stride, PageBytes: m.pageBytes()})
	}
	return g
}

func genModel(t *rapid.T, label, strategy string, n, heads, row uint64) model {
	m := model{strategy: strategy, n: n, heads: heads, row: row}
	m.blocks = rapid.Uint64Range(1, 12).Draw(t, label+"blocks")
	piece := m.n * m.heads * m.row
	if strategy == FlashBlockFirst {
		piece *= 2
	}
	m.stride = piece + rapid.Uint64Range(0, 40).Draw(t, label+"pad")
	m.base = rapid.Uint64Range(0, 100).Draw(t, label+"base")
	m.size = m.base + m.blocks*m.stride
	if strategy == FlashKVFirst {
		m.vOff = m.blocks*m.stride + rapid.Uint64Range(0, 30).Draw(t, label+"gap")
		m.size += m.vOff
	}
	return m
}

func genTable(t *rapid.T, label string, m model, n int) []uint32 {
	ids := rapid.Permutation(seq(m.blocks)).Draw(t, label)
	if rapid.Bool().Draw(t, label+"sorted") {
		ids = seq(m.blocks)
	}
	return ids[:min(n, len(ids))]
}

func seq(n uint64) []uint32 {
	s := make([]uint32, n)
	for i := range s {
		s[i] = uint32(i)
	}
	return s
}

func random(n uint64, seed uint64) []byte {
	b := make([]byte, n)
	c := rand.NewChaCha8([32]byte{byte(seed)})
	_, _ = c.Read(b)
	return b
}

var strategies = []string{PackedHND, PackedNHD, FlashKVFirst, FlashBlockFirst, MLA, VLLMCPUAttn}

// TestLaws copies by runs and by the reference and compares memory: exactly the chosen tokens, nothing else, each byte once.
func TestLaws(t *testing.T) {
	reg := Default()
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.SampledFrom(strategies).Draw(t, "strategy")
		heads, row := rapid.Uint64Range(1, 4).Draw(t, "heads"), rapid.Uint64Range(1, 9).Draw(t, "row")
		n := rapid.Uint64Range(1, 9).Draw(t, "n")
		nTo := n
		if name != VLLMCPUAttn && rapid.Bool().Draw(t, "resize") {
			nTo = rapid.Uint64Range(1, 9).Draw(t, "nTo")
		}
		from, to := genModel(t, "from", name, n, heads, row), genModel(t, "to", name, nTo, heads, row)
		ft, tt := genTable(t, "fromTable", from, 12), genTable(t, "toTable", to, 12)
		limit := min(uint64(len(ft))*n, uint64(len(tt))*nTo)
		start := rapid.Uint64Range(0, limit-1).Draw(t, "start")
		end := rapid.Uint64Range(start+1, limit).Draw(t, "end")
		if name == VLLMCPUAttn {
			start -= start % n
		}

		src := random(from.size, end)
		got, want, touched := make([]byte, to.size), make([]byte, to.size), make([]int, to.size)
		refEnd := end
		if name == VLLMCPUAttn {
			refEnd = (end + n - 1) / n * n
		}
		for tok := start; tok < refEnd; tok++ {
			var addrs []uint64
			from.bytesOf(uint64(ft[tok/n]), tok%n, func(a uint64) { addrs = append(addrs, a) })
			to.bytesOf(uint64(tt[tok/nTo]), tok%nTo, func(a uint64) { want[a], addrs = src[addrs[0]], addrs[1:] })
		}

		fg, tg := from.group(1, 0), to.group(1, 0)
		s, _ := reg.Get(name)
		keep := []layout.Run{{SrcOff: 1, DstOff: 2, Count: 1, Len: 3}}
		runs, err := s.ParseBlock(keep, Side{&fg, &fg.Layers[0], ft}, Side{&tg, &tg.Layers[0], tt},
			layout.TokenRange{Start: uint32(start), End: uint32(end)})
		if err != nil {
			t.Fatal(err)
		}
		if runs[0] != keep[0] {
			t.Fatalf("the caller's run changed: %+v", runs[0])
		}
		var last layout.IpcBlock
		for b := range layout.Explode(runs[1:]) {
			if b.Len == 0 || b.SrcOff+b.Len > from.size || b.DstOff+b.Len > to.size {
				t.Fatalf("%+v is outside regions of %d and %d", b, from.size, to.size)
			}
			if last.Len != 0 && last.SrcOff+last.Len == b.SrcOff && last.DstOff+last.Len == b.DstOff {
				t.Fatalf("%+v and %+v are not coalesced", last, b)
			}
			last = b
			copy(got[b.DstOff:b.DstOff+b.Len], src[b.SrcOff:])
			for i := range b.Len {
				if touched[b.DstOff+i]++; touched[b.DstOff+i] > 1 {
					t.Fatalf("byte %d is written twice", b.DstOff+i)
				}
			}
		}
		if !bytes.Equal(got, want) {
			t.Fatal("runs and the reference differ")
		}
	})
}

// TestPlanLaws moves a whole plan between two engines with different pools, chunk range by chunk range, in random order.
func TestPlanLaws(t *testing.T) {
	reg := Default()
	rapid.Check(t, func(t *rapid.T) {
		groups := rapid.IntRange(1, 2).Draw(t, "groups")
		tokens := rapid.Uint64Range(1, 40).Draw(t, "tokens")
		src, dst := &layout.Layout{}, &layout.Layout{}
		var ms, md []model
		var ts, td [][]uint32
		var skip []uint32
		var so, do uint64
		const layers = 2
		for gi := range groups {
			l := fmt.Sprint(gi)
			name := rapid.SampledFrom(strategies).Draw(t, l+"strategy")
			heads, n := rapid.Uint64Range(1, 3).Draw(t, l+"heads"), rapid.Uint64Range(4, 16).Draw(t, l+"n")
			row := rapid.SampledFrom([]uint64{3, 64, 1500}).Draw(t, l+"row")
			a, b := genModel(t, l+"s", name, n, heads, row), genModel(t, l+"d", name, n, heads, row)
			need := (tokens + n - 1) / n
			grow := func(m *model, at *uint64) {
				m.blocks = max(m.blocks, need)
				end := m.blocks * m.stride
				if name == FlashKVFirst {
					m.vOff = end + 7
					end *= 2
				}
				m.base += *at
				m.size = m.base + end + 100
				*at = m.base + layers*(end+100)
			}
			grow(&a, &so)
			grow(&b, &do)
			gap := func(m model) uint64 { return m.size - m.base }
			ga, gb := a.group(layers, gap(a)), b.group(layers, gap(b))
			for i := range ga.Layers {
				ga.Layers[i].Name = fmt.Sprintf("g%d.%d", gi, i)
				gb.Layers[i].Name = ga.Layers[i].Name
			}
			src.Groups, dst.Groups = append(src.Groups, ga), append(dst.Groups, gb)
			ms, md = append(ms, a), append(md, b)
			ts, td = append(ts, genTable(t, l+"st", a, int(need))), append(td, genTable(t, l+"dt", b, int(need)))
			skip = append(skip, uint32(rapid.Uint64Range(0, need).Draw(t, l+"skip")*n))
		}
		for _, c := range []struct {
			l *layout.Layout
			n uint64
		}{{src, so}, {dst, do}} {
			if err := reg.Validate(c.l, []uint64{c.n}); err != nil {
				t.Fatal(err)
			}
		}
		plan, err := NewPlan(reg, src, dst, uint32(tokens), skip)
		if err != nil {
			t.Fatal(err)
		}
		own, err := NewPlan(reg, dst, dst, uint32(tokens), skip)
		if err != nil || own.Space().NumChunks() != plan.Space().NumChunks() || own.Space().TotalBytes() != plan.Space().TotalBytes() {
			t.Fatalf("the receiver's own plan differs: %v", err)
		}
		from, err := plan.Side(reg, src, ts)
		if err != nil {
			t.Fatal(err)
		}
		to, err := own.Side(reg, dst, td)
		if err != nil {
			t.Fatal(err)
		}
		if err := to.Covers(); err != nil {
			t.Fatal(err)
		}

		mem, got, want := random(so, tokens), make([]byte, do), make([]byte, do)
		for gi := range groups {
			end := tokens
			if ms[gi].strategy == VLLMCPUAttn {
				end = (tokens + ms[gi].n - 1) / ms[gi].n * ms[gi].n
			}
			for li := range uint64(layers) {
				a, b := ms[gi], md[gi]
				a.base += li * (a.size - a.base)
				b.base += li * (b.size - b.base)
				for tok := uint64(skip[gi]); tok < end && uint64(skip[gi]) < tokens; tok++ {
					var addrs []uint64
					a.bytesOf(uint64(ts[gi][tok/a.n]), tok%a.n, func(x uint64) { addrs = append(addrs, x) })
					b.bytesOf(uint64(td[gi][tok/b.n]), tok%b.n, func(x uint64) { want[x], addrs = mem[addrs[0]], addrs[1:] })
				}
			}
		}
		sp := plan.Space()
		var ranges []transfer.Range
		for c := uint32(0); c < sp.NumChunks(); {
			n := rapid.Uint32Range(1, min(5, sp.NumChunks()-c)).Draw(t, "slice")
			ranges = append(ranges, transfer.Range{First: c, Count: n})
			c += n
		}
		touched := make([]bool, do)
		var total uint64
		for _, r := range ranges {
			ps, err := from.Append(nil, r)
			if err != nil {
				t.Fatal(err)
			}
			pd, err := to.Append(nil, r)
			if err != nil {
				t.Fatal(err)
			}
			var flat []byte
			for _, p := range ps {
				flat = append(flat, mem[p.Off:p.Off+p.Len]...)
			}
			n, err := sp.Bytes(r)
			if err != nil || n != uint64(len(flat)) {
				t.Fatalf("space says %d bytes for %v, the source has %d (%v)", n, r, len(flat), err)
			}
			total += n
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
		if total != sp.TotalBytes() || !bytes.Equal(got, want) {
			t.Fatal("the plan and the reference differ")
		}
	})
}

// TestReady checks, against the reference, that a chunk is ready exactly when every token with a byte in it is complete.
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
			{Name: "b", PageBytes: uint64(page * n), BlockStride: uint64(page * n), Base: uint64(blocks) * uint64(page*n)},
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
				t.Fatalf("layer %d with %d tokens (final %v): ready %+v, want %d of %+v", layer, have, final, got, want, seg)
			}
		}
	})
}

func TestRefusals(t *testing.T) {
	reg := Default()
	g := layout.Group{TokensPerBlock: 16, Strategy: MLA, NumBlocks: 4, Layers: []layout.Layer{{Name: "a", PageBytes: 1600, BlockStride: 1600}}}
	cpu := g
	cpu.Strategy = VLLMCPUAttn
	cpu8 := cpu
	cpu8.TokensPerBlock = 8
	hnd := g
	hnd.Strategy, hnd.Params = PackedHND, map[string]int64{"heads": 3}
	wide := g
	wide.Layers = []layout.Layer{{Name: "a", PageBytes: 3200, BlockStride: 3200}}
	side := func(g *layout.Group, table ...uint32) Side { return Side{g, &g.Layers[0], table} }
	for name, c := range map[string]struct {
		from, to Side
		tokens   layout.TokenRange
		want     string
	}{
		"id past the group":  {side(&g, 0, 4), side(&g, 0, 1), layout.TokenRange{End: 32}, "from.table[1] = 4: the group has 4 blocks"},
		"range past table":   {side(&g, 0, 1), side(&g, 0), layout.TokenRange{End: 17}, "to.table = 1 blocks"},
		"empty range":        {side(&g, 0), side(&g, 0), layout.TokenRange{Start: 3, End: 3}, "tokens = [3, 3): is empty"},
		"inverted range":     {side(&g, 0), side(&g, 0), layout.TokenRange{Start: 3, End: 2}, "is empty"},
		"other strategy":     {side(&cpu, 0), side(&g, 0), layout.TokenRange{End: 16}, "from.strategy"},
		"inside a page":      {side(&cpu, 0), side(&cpu, 0), layout.TokenRange{Start: 8, End: 16}, "tokens.start = 8"},
		"unequal pages":      {side(&cpu, 0), side(&cpu8, 0, 1), layout.TokenRange{End: 16}, "tokens_per_block"},
		"unequal token size": {side(&g, 0), side(&wide, 0), layout.TokenRange{End: 16}, "page_bytes"},
		"heads do not fit":   {side(&hnd, 0), side(&hnd, 0), layout.TokenRange{End: 16}, "page_bytes = 1600"},
		"no group":           {Side{}, side(&g, 0), layout.TokenRange{End: 16}, "from = unset"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, s := range reg.Names() {
				st, _ := reg.Get(s)
				if c.to.Group.Strategy != s {
					continue
				}
				runs, err := st.ParseBlock(nil, c.from, c.to, c.tokens)
				if err == nil || !strings.Contains(err.Error(), c.want) || len(runs) != 0 {
					t.Fatalf("got %d runs and %v, want %q", len(runs), err, c.want)
				}
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
		"block size":  {mk(func(l *layout.Layout) { l.Groups[0].TokensPerBlock = 32 }), 32, []uint32{0}, "tokens_per_block: 32 here, 16 there"},
		"strategy":    {mk(func(l *layout.Layout) { l.Groups[0].Strategy = PackedNHD }), 32, []uint32{0}, `strategy: packed_nhd here, mla there`},
		"page bytes":  {mk(func(l *layout.Layout) { l.Groups[0].Layers[0].PageBytes = 512 }), 32, []uint32{0}, "page_bytes"},
		"skip inside": {mk(nil), 32, []uint32{5}, "skip[0] = 5"},
		"skip groups": {mk(nil), 32, nil, "skip = 0 groups"},
		"no tokens":   {mk(nil), 0, []uint32{0}, "tokens = 0"},
		"too big":     {mk(nil), 16 * 5000, []uint32{0}, "passes 65536 chunks"},
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
	if _, err := p.Side(reg, l, [][]uint32{{1 << 16}}); err == nil || !strings.Contains(err.Error(), "blocks[0][0] = 65536") {
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
	want := []layout.Piece{{Off: 7<<20 + 15*transfer.ChunkBytes, Len: transfer.ChunkBytes}, {Off: 9 << 20, Len: transfer.ChunkBytes}}
	if err != nil || len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Fatalf("got %+v, %v, want %+v", got, err, want)
	}
	for _, r := range []transfer.Range{{}, {First: 0, Count: 1 << 31}, {First: 1 << 31, Count: 1}, {First: 1, Count: ^uint32(0)}} {
		if got, err := s.Append(want[:1], r); err == nil || len(got) != 1 {
			t.Fatalf("%+v was resolved", r)
		}
	}
	if p, err := NewPlan(reg, l, l, 20, []uint32{32}); err != nil || p.Space().NumChunks() != 0 {
		t.Fatalf("all present: %v", err)
	}
}

func benchSides(name string, blocks int) (Side, Side) {
	const n, heads, row = 16, 8, 256
	m := model{strategy: name, n: n, heads: heads, row: row, blocks: uint64(2 * blocks), stride: n * heads * row}
	if name == FlashBlockFirst {
		m.stride *= 2
	}
	m.vOff = m.blocks * m.stride
	g := m.group(1, 0)
	r := rand.New(rand.NewPCG(1, 2))
	table := func() []uint32 {
		t := make([]uint32, blocks)
		for i, v := range r.Perm(2 * blocks)[:blocks] {
			t[i] = uint32(v)
		}
		return t
	}
	return Side{&g, &g.Layers[0], table()}, Side{&g, &g.Layers[0], table()}
}

func TestNoAllocations(t *testing.T) {
	reg := Default()
	runs := make([]layout.Run, 0, 1<<14)
	for _, name := range strategies {
		s, _ := reg.Get(name)
		from, to := benchSides(name, 64)
		if n := testing.AllocsPerRun(20, func() {
			if _, err := s.ParseBlock(runs, from, to, layout.TokenRange{End: 64*16 - 3}); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
		l := &layout.Layout{Groups: []layout.Group{*from.Group}}
		p, err := NewPlan(reg, l, l, 64*16-3, []uint32{0})
		if err != nil {
			t.Fatal(err)
		}
		side, err := p.Side(reg, l, [][]uint32{from.Table})
		if err != nil {
			t.Fatal(err)
		}
		pieces := make([]layout.Piece, 0, 1<<12)
		if n := testing.AllocsPerRun(20, func() {
			if _, err := side.Append(pieces, p.Space().All()); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%s: Append: %v allocations", name, n)
		}
	}
}

func BenchmarkParseBlock(b *testing.B) {
	reg := Default()
	for _, name := range strategies {
		b.Run(name, func(b *testing.B) {
			s, _ := reg.Get(name)
			from, to := benchSides(name, 2048)
			runs := make([]layout.Run, 0, 1<<14)
			b.ReportAllocs()
			var n int
			for b.Loop() {
				out, err := s.ParseBlock(runs, from, to, layout.TokenRange{End: 2048 * 16})
				if err != nil {
					b.Fatal(err)
				}
				n = len(out)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/run")
		})
	}
}

func BenchmarkAppend(b *testing.B) {
	reg := Default()
	from, _ := benchSides(VLLMCPUAttn, 2048)
	l := &layout.Layout{Groups: []layout.Group{*from.Group}}
	p, err := NewPlan(reg, l, l, 2048*16, []uint32{0})
	if err != nil {
		b.Fatal(err)
	}
	side, err := p.Side(reg, l, [][]uint32{from.Table})
	if err != nil {
		b.Fatal(err)
	}
	pieces := make([]layout.Piece, 0, 64)
	b.ReportAllocs()
	for i := uint32(0); b.Loop(); i += 4 {
		if _, err := side.Append(pieces, transfer.Range{First: i % 1024, Count: 4}); err != nil {
			b.Fatal(err)
		}
	}
}
