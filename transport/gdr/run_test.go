package gdr

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/sys/verbs/fake"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// spansOf makes the spans of runs, one by one.
func spansOf(runs []run) (all []span) {
	for _, r := range runs {
		for row := range uint64(r.Rows) {
			for k := range uint64(r.Count) {
				all = append(all, span{r.addr + row*r.Outer + k*r.Stride, r.len, r.key})
			}
		}
	}
	return all
}

// singles are spans as runs of one.
func singles(spans []span) (all []run) {
	for _, s := range spans {
		all = append(all, single(s))
	}
	return all
}

// randomRuns lie anywhere and evenly, in rows and in rows of rows, forwards and backwards, with
// gaps that have landed between them.
func randomRuns(rng *rand.Rand, longest int) (all []run) {
	for range 1 + rng.IntN(12) {
		r := single(span{addr: 1<<40 + rng.Uint64N(1<<30), len: 1 + uint32(rng.IntN(longest)), key: 1 +
			uint32(rng.IntN(3))})
		switch rng.IntN(4) {
		case 0:
			r.addr, r.key = 0, 0
		case 1:
			r.Stride, r.Count = uint64(r.len)+rng.Uint64N(4096), uint32(2+rng.IntN(40))
		case 2:
			r.Stride, r.Count = uint64(r.len)+rng.Uint64N(4096), uint32(2+rng.IntN(10))
			r.Outer, r.Rows = 1<<17+rng.Uint64N(4096), uint32(2+rng.IntN(5))
		}
		if rng.IntN(2) == 0 {
			r.Stride = -r.Stride
		}
		if rng.IntN(2) == 0 {
			r.Outer = -r.Outer
		}
		all = append(all, r)
	}
	return all
}

// A GO is read as it was written.
func TestCellsRoundTrip(t *testing.T) {
	for seed := range uint64(500) {
		runs := randomRuns(rand.New(rand.NewPCG(seed, 7)), 4096)
		got, err := appendRuns(nil, appendCells(nil, runs))
		if err != nil || !slices.Equal(got, runs) {
			t.Fatalf("seed %d: %v, or other runs", seed, err)
		}
		n, bytes := uint64(0), uint64(0)
		for _, s := range spansOf(runs) {
			n, bytes = n+1, bytes+uint64(s.len)
		}
		if spans, all := total(got); spans != n || all != bytes {
			t.Fatalf("seed %d: %d spans of %d bytes, want %d of %d", seed, spans, all, n, bytes)
		}
	}
}

// Golden vector: the cells of a GO, byte for byte: a span, one that is to skip, a
// run and a run of rows.
func TestCellsGolden(t *testing.T) {
	got := hex.EncodeToString(appendCells(nil, []run{
		single(span{1 << 40, 4096, 7}), single(span{len: 65536}),
		{span{1 << 41, 512, 8}, mem.Strides{Stride: 4096, Count: 100, Rows: 1}},
		{span{1 << 42, 512, 9}, mem.Strides{Stride: 8192, Outer: 1<<64 - 512, Count: 8, Rows: 16}},
	}))
	want := "0000000000010000" + "00100000" + "07000000" + // address, length, key
		"0000000000000000" + "00000100" + "00000000" +
		// flagged; stride, count, no rows
		"0000000000020000" + "00020080" + "08000000" + "0010000000000000" + "64000000" + "00000000" +
		// flagged; stride, count, rows
		"0000000000040000" + "00020080" + "09000000" + "0020000000000000" + "08000000" + "10000000" +
		"00feffffffffffff" + "0000000000000000" // outer stride
	if got != want {
		t.Errorf("\n%s, want\n%s", got, want)
	}
}

// A GO with forbidden values is refused as it is read.
func TestMalformedCells(t *testing.T) {
	row := appendCells(nil, []run{{span{1, 16, 3}, mem.Strides{Stride: 32, Count: 3, Rows: 1}}})
	rows := appendCells(nil, []run{{span{1, 16, 3}, mem.Strides{Stride: 32, Outer: 1024,
		Count: 3, Rows: 2}}})
	change := func(b []byte, at int, v uint32) []byte {
		b = slices.Clone(b)
		binary.LittleEndian.PutUint32(b[at:], v)
		return b
	}
	for name, b := range map[string][]byte{
		"cut off":            row[:cellBytes],
		"cut off its rows":   rows[:2*cellBytes],
		"of one":             change(row, cellBytes+8, 1),
		"of none":            change(row, cellBytes+8, 0),
		"rows of one":        change(rows, cellBytes+8, 1),
		"one row":            change(rows, cellBytes+12, 1),
		"rows and no stride": change(row, cellBytes+12, 2),
		"reserved bytes":     change(rows, 2*cellBytes+8, 1),
		"no length":          change(row, 8, wire.RunFlag),
		"more than may be":   change(row, cellBytes+8, maxSpans+1),
		"far more":           change(row, cellBytes+8, math.MaxUint32),
		"more, both of them": append(change(row, cellBytes+8, maxSpans), row...),
		"more rows":          change(rows, cellBytes+12, maxSpans/3+1),
		"64 bits of them": change(change(rows, cellBytes+8, math.MaxUint32), cellBytes+12,
			math.MaxUint32),
		"and some before": append(slices.Clone(row), change(change(rows, cellBytes+8, math.MaxUint32),
			cellBytes+12, math.MaxUint32)...),
	} {
		if _, err := appendRuns(nil, b); !errors.Is(err, errFrame) {
			t.Errorf("a run %s: %v", name, err)
		}
	}
}

// The posted writes cover what the GO names, byte for byte, from the source's spans in their order,
// whatever room the queue has.
func TestPlanExpandsRuns(t *testing.T) {
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(seed, 8))
		runs, err := appendRuns(nil, appendCells(nil, randomRuns(rng, 60)))
		if err != nil {
			t.Fatal(err)
		}
		s := sending{dst: runs}
		_, left := total(runs)
		for left > 0 {
			for _, r := range randomRuns(rng, 130) {
				if _, n := total([]run{r}); n > left {
					r = single(span{len: uint32(min(left, 130))})
				}
				_, n := total([]run{r})
				left -= n
				if r.addr, r.key = 1<<50+rng.Uint64N(1<<30), 77; n > 0 {
					s.src = append(s.src, r)
				}
			}
		}
		type move struct{ from, to uint64 }
		var want, got []move
		dst, src := spansOf(s.dst), spansOf(s.src)
		k, off := 0, uint32(0)
		for _, d := range dst {
			for i := range d.len {
				if !d.skip() {
					want = append(want, move{src[k].addr + uint64(off), d.addr + uint64(i)})
				}
				if off++; off == src[k].len {
					k, off = k+1, 0
				}
			}
		}
		s.from.begin(s.src)
		s.to.begin(s.dst)
		works := make([]verbs.Work, 1+rng.IntN(30))
		posted := uint64(0)
		for len(s.to.runs) > 0 {
			n := s.plan(works, posted, 1+rng.Uint64N(50))
			for i, w := range works[:n] {
				if w.ID != posted+uint64(i)+1 || w.Op != verbs.Write || w.LocalKey != 77 || w.RemoteKey == 0 {
					t.Fatalf("seed %d: %+v", seed, w)
				}
				for b := range uint64(w.Len) {
					got = append(got, move{w.LocalAddr + b, w.RemoteAddr + b})
				}
			}
			posted += uint64(n)
		}
		if !slices.Equal(got, want) || len(s.from.runs) != 0 {
			t.Fatalf("seed %d: %d bytes are written otherwise than %d are named", seed, len(got), len(want))
		}
	}
}

// part is a registration of bytes.
type part struct {
	verbs.Memory
	addr, len uint64
	key       uint32
}

func (p *part) Addr() uint64      { return p.addr }
func (p *part) Len() uint64       { return p.len }
func (p *part) LocalKey() uint32  { return p.key }
func (p *part) RemoteKey() uint32 { return p.key + 1000 }

// A region is registered in parts. Runs that lie in one go as they are, and of others every byte is
// named under its own part's key, in order.
func TestRunsAcrossParts(t *testing.T) {
	const size, each = 1 << 16, 1 << 12
	e := &key{k: &keys{part: each}}
	for i := range uint64(size / each) {
		e.parts = append(e.parts, &part{addr: 1<<40 + i<<20, len: each, key: uint32(i)})
	}
	rng := rand.New(rand.NewPCG(5, 6))
	whole, cut := 0, 0
	for whole+cut < 2000 {
		n, off := 1+rng.Uint64N(each), rng.Uint64N(size)
		s := mem.Strides{Stride: rng.Uint64N(512) - 256, Outer: rng.Uint64N(4096) - 2048,
			Count: uint32(2 + rng.IntN(6)), Rows: uint32(1 + rng.IntN(4))}
		if rng.IntN(2) == 0 {
			n = 1 + rng.Uint64N(64)
		}
		if s.Rows == 1 {
			s.Outer = 0
		}
		if !s.Inside(off, n, size) {
			continue
		}
		got := e.runs(nil, off, n, &s, true)
		var want, named []span // of a byte each
		bytes := func(dst []span, off, n uint64) []span {
			for at := off; at < off+n; at++ {
				dst = append(dst, span{1<<40 + at/each<<20 + at%each, 1, 1000 + uint32(at/each)})
			}
			return dst
		}
		for row := range uint64(s.Rows) {
			for k := range uint64(s.Count) {
				want = bytes(want, off+row*s.Outer+k*s.Stride, n)
			}
		}
		for _, x := range spansOf(got) {
			for i := range uint64(x.len) {
				named = append(named, span{x.addr + i, 1, x.key})
			}
		}
		if !slices.Equal(named, want) {
			t.Fatalf("%+v of %d bytes from %d on: other bytes are named", s, n, off)
		}
		if len(got) == 1 {
			whole++
		} else {
			cut++
		}
	}
	if whole < 200 || cut < 200 {
		t.Errorf("%d runs in one part, %d in several", whole, cut)
	}
}

// Even memory arrives.
func TestEvenMemory(t *testing.T) {
	even := transporttest.Shape{Chunks: 24, BlockBytes: 2 << 10, TailBytes: 4096}
	across := transporttest.Shape{Chunks: 24, BlockBytes: 2 << 10, TailBytes: 4096, Across: 16}
	f := fake.New()
	t.Cleanup(f.Serve())
	p := transporttest.NewPair(t, func(testing.TB) transport.Backend { return New(config(f)) })
	a, _ := p.Dial()
	for i, shapes := range [][2]transporttest.Shape{{even, even}, {across, even}, {even, across},
		{across, across}} {
		src, dst := transporttest.NewMemory(t, shapes[0]), transporttest.NewMemory(t, shapes[1])
		src.Write(5)
		bind := transporttest.NewBind(t, p.A, p.B, src, dst, transfer.Slot(i), 1)
		// Landed compares every chunk
		bind.Dest.Seed.Store(5)
		// a part first: the rest finds it landed
		for _, r := range []transfer.Range{{First: 3, Count: 4}, src.All()} {
			if res := p.A.MoveWait(a, bind.Origin, r, 1); res.Outcome != transfer.Landed {
				t.Fatalf("%s %s: %v", res.Outcome, res.Reason, res.Err)
			}
		}
		if !bind.Dest.Full() {
			t.Fatal("not full")
		}
		bind.End(t)
		dst.GapsIntact(t)
	}
}

// What a GO names takes three cells for a page that lies across.
func TestCellsOfAPage(t *testing.T) {
	_, p, _, _ := oddPair(t, nil)
	_, b := p.Dial()
	l := b.(*lane)
	m := transporttest.NewMemory(t, transporttest.Shape{Chunks: 16, BlockBytes: 4 << 10, Across: 16})
	blocks, err := m.Resolve(nil, m.All())
	if err != nil || len(blocks) != 256 {
		t.Fatal(len(blocks), err)
	}
	runs, held, err := l.runs(nil, nil, blocks, access{remote: true, wait: true})
	if err != nil {
		t.Fatal(err)
	}
	if got := len(appendCells(nil, runs)) / cellBytes; got != 3 {
		t.Errorf("%d cells, want 3", got)
	}
	spans := spansOf(runs)
	for i, s := range spans {
		if want := blocks[i].Off - blocks[0].Off; s.addr-spans[0].addr != want ||
			uint64(s.len) != blocks[i].Len {
			t.Fatalf("span %d is %+v, %d behind the first wanted", i, s, want)
		}
	}
	for _, k := range held {
		k.put()
	}
}

// FuzzCells: whatever a receiver sends, what is accepted is bounded, and its spans survive the
// round trip.
func FuzzCells(f *testing.F) {
	f.Add(appendCells(nil, []run{{span{1, 16, 3}, mem.Strides{Stride: 32, Count: 3, Rows: 1}},
		single(span{0, 5, 0}), single(span{7, 8, 9})}))
	f.Add(appendCells(nil, []run{{span{1 << 63, 16, 3}, mem.Strides{Stride: 1 << 63, Count: 3,
		Rows: 1}}}))
	f.Add(appendCells(nil, []run{{span{1 << 63, 16, 3}, mem.Strides{Stride: 1 << 63, Outer: 1<<64 - 1,
		Count: 3, Rows: 5}}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		runs, err := appendRuns(nil, b)
		if err != nil {
			return
		}
		spans, n := spansOf(runs), uint64(0)
		for _, s := range spans {
			n += uint64(s.len)
		}
		if k, bytes := total(runs); len(spans) > maxSpans || k != uint64(len(spans)) || bytes != n {
			t.Fatalf("%d spans of %d bytes, want %d of %d", len(spans), n, k, bytes)
		}
		if again, err := appendRuns(nil, appendCells(nil, runs)); err != nil ||
			!slices.Equal(again, runs) {
			t.Fatalf("the runs do not survive the round trip: %v", err)
		}
	})
}
