package shm

import (
	"bytes"
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvspray/kvspray/internal/mem"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// piecesOf are the offsets of a run's pieces, one by one; false: an offset leaves 64 bits.
func (r *run) piecesOf() (all []uint64, ok bool) {
	for i := range uint64(r.count) {
		hi, lo := bits.Mul64(i, r.stride)
		off, carry := bits.Add64(r.off, lo, 0)
		if back := -r.stride; int64(r.stride) < 0 {
			hi, lo = bits.Mul64(i, back)
			off, carry = bits.Sub64(r.off, lo, 0)
		}
		if hi != 0 || carry != 0 {
			return nil, false
		}
		all = append(all, off)
	}
	return all, true
}

// What inside says without looking at the pieces is what looking at each of them says, at the edges of the region and of 64 bits, too.
func TestRunInside(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	edges := []uint64{0, 1, 16, 4096, 1 << 31, 1 << 32, 1 << 62, 1<<63 - 1, 1 << 63, 1<<63 + 1, math.MaxUint64 - 4096, math.MaxUint64 - 1, math.MaxUint64}
	near := func() uint64 {
		if rng.IntN(2) == 0 {
			return rng.Uint64N(1 << 14)
		}
		return edges[rng.IntN(len(edges))] + uint64(rng.IntN(5)) - 2
	}
	in := 0
	for range 200_000 {
		r := run{len: uint32(near())>>1 + 1, off: near(), stride: near(), count: uint32(2 + rng.IntN(20))}
		if rng.IntN(3) == 0 {
			r.stride = -rng.Uint64N(1 << 12)
		}
		if rng.IntN(4) > 0 {
			r.len = 1 + r.len%64
		}
		size := near()
		offs, want := r.piecesOf()
		for _, off := range offs {
			want = want && off <= size && uint64(r.len) <= size-off
		}
		if got := r.inside(size); got != want {
			t.Fatalf("%+v inside a region of %d: %v, want %v", r, size, got, want)
		}
		if want {
			in++
		}
	}
	if in < 1000 {
		t.Fatalf("only %d runs were inside", in)
	}
	most := run{len: 1, stride: 1 << 40, count: math.MaxUint32}
	if most.inside(mem.MaxRegionBytes) {
		t.Error("four thousand million pieces a tebibyte apart are inside a region")
	}
}

// regular is memory whose blocks lie in rows at equal distances, as pages of heads or of tokens do that another order takes apart.
func regular(tb testing.TB, n, each, stride uint64, row int, back bool) *memory {
	m := newMemory(tb, n, each, 1)
	region, count := m.blocks[0].Region, uint64(len(m.blocks))
	cells := region.Size() / stride
	for i := range count {
		at := i / uint64(row) * uint64(row)
		k := i - at
		if back {
			k = uint64(row) - 1 - k
		}
		off := (at + k) * stride
		if cells < count { // each row has a part of every cell
			off = (at+k)%cells*stride + (at+k)/cells*each
		}
		m.blocks[i] = mem.Block{Region: region, Off: off, Len: each}
	}
	return m
}

func (m *memory) content() (all []byte) {
	for _, b := range m.blocks {
		p, _ := b.Bytes()
		all = append(all, p...)
	}
	return all
}

// frameOf is what a lane asks for a range of m, and the pieces in it.
func frameOf(t *testing.T, l *lane, m *memory, r transfer.Range) (cells int, got []mem.Block) {
	t.Helper()
	blocks, err := m.Resolve(nil, r)
	if err != nil {
		t.Fatal(err)
	}
	var a asker
	fits, _, err := l.list(&a, &moved{s: transport.Slice{Origin: &transport.Origin{Source: m}}}, r, blocks)
	if err != nil || !fits {
		t.Fatalf("list: %v, %v", fits, err)
	}
	frame := a.frame[frameHeader+pullFixed:]
	for rest := frame; len(rest) > 0; {
		var x run
		if rest, err = x.next(rest); err != nil {
			t.Fatal(err)
		}
		for range x.count {
			got = append(got, mem.Block{Region: blocks[0].Region, Off: x.off, Len: uint64(x.len)})
			x.off += x.stride
		}
	}
	if !slices.Equal(got, blocks) {
		t.Fatal("the frame names other pieces than the source has")
	}
	return len(frame) / cellBytes, got
}

// Regular memory takes a few cells, and scattered memory one for each piece, as it does between sidecars of which one is older.
func TestRegularPullsAreShort(t *testing.T) {
	p := newPair(t, Config{})
	l := p.lane.(*lane)
	r := transfer.Range{Count: 16}
	scattered := newMemory(t, 1<<20, 4<<10, 1)
	rows := regular(t, 1<<20, 512, 4096, 256, false)
	if n, got := frameOf(t, l, rows, r); n > 2*(len(got)/256) || len(got) != 2048 {
		t.Errorf("%d cells for %d pieces in rows of 256", n, len(got))
	}
	if n, got := frameOf(t, l, regular(t, 1<<20, 512, 1024, 64, true), r); n > 2*(len(got)/64) {
		t.Errorf("%d cells for %d pieces in rows of 64, backwards", n, len(got))
	}
	if n, got := frameOf(t, l, scattered, r); n != len(got) {
		t.Errorf("%d cells for %d scattered pieces", n, len(got))
	}
	l.runs = false
	if n, got := frameOf(t, l, rows, r); n != len(got) {
		t.Errorf("%d cells for %d pieces to a peer that knows no runs", n, len(got))
	}
}

// Pages of Llama-3.1-8B with heads outside, in the order of those with tokens outside, and the other way round, in blocks that lie anywhere: a
// run for each token, or head, of a block. No pull has more bytes, however long the prompt is, and this is what it takes at most.
func TestCrosswisePages(t *testing.T) {
	const each, heads, tokens, pull = 512, 8, 16, 1 << 20
	p := newPair(t, Config{})
	for name, c := range map[string]struct{ outer, inner, outerStride, innerStride uint64 }{
		"heads outside":  {tokens, heads, each, tokens * each},
		"tokens outside": {heads, tokens, each, heads * each},
	} {
		m := newMemory(t, pull, each, 1)
		region, page := m.blocks[0].Region, uint64(heads*tokens*each)
		pages := region.Size() / page
		for i := range m.blocks {
			block, k := uint64(i)/(heads*tokens), uint64(i)%(heads*tokens)
			m.blocks[i] = mem.Block{Region: region, Off: block*7%pages*page + k/c.inner*c.outerStride + k%c.inner*c.innerStride, Len: each}
		}
		n, got := frameOf(t, p.lane.(*lane), m, transfer.Range{Count: pull / transfer.ChunkBytes})
		if runs := pull / page * c.outer; uint64(len(got)) != pull/each || uint64(n) != 2*runs || n*cellBytes > 8<<10 {
			t.Errorf("%s: %d cells for %d pieces, want %d runs of two cells", name, n, len(got), runs)
		}
	}
}

// Regular memory on either side arrives, whole and where some of it had landed, and from and to a sidecar
// that knows no runs.
func TestRegularMemory(t *testing.T) {
	for _, c := range []struct {
		name     string
		src, dst wire.Versions
	}{{"both know runs", frames, frames}, {"the source is older", wire.Lanes, frames}, {"the destination is older", frames, wire.Lanes}} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			p := &pair{src: newNode(t, 1, 2, Config{Dir: dir, Workers: 2, versions: c.src}),
				dst: newNode(t, 2, 1, Config{Dir: dir, Workers: 2, versions: c.dst})}
			p.lane = p.dial(t)
			if got := p.lane.(*lane).runs; got != (c.src == c.dst) {
				t.Fatalf("the source sends runs: %v", got)
			}
			const n = 1 << 19 // eight chunks
			shapes := []*memory{regular(t, n, 512, 1024, 64, false), regular(t, n, 512, 1024, 64, true), regular(t, n, 2048, 4096, 32, true),
				newMemory(t, n, 4096, 3), regular(t, n, 512, 4096, 256, false)}
			for i, from := range shapes {
				for k, to := range shapes {
					if d := (k - i + len(shapes)) % len(shapes); d != 1 && d != 3 {
						continue // each on either side, twice
					}
					to.bitmap = transfer.NewBitmap(to.space.NumChunks())
					from.fill(byte(i + 1))
					to.fill(0)
					o, g := p.bind(t, transfer.Slot(8*i+k), from, to)
					// A part first: the rest finds it landed.
					part := transfer.Range{First: 3, Count: 2}
					if err := p.lane.Move([]transport.Slice{{Origin: o, Range: part, Attempt: 1}}); err != nil {
						t.Fatal(err)
					}
					if r := p.src.result(t); r.Outcome != transfer.Landed {
						t.Fatalf("ended %s (%s): %v", r.Outcome, r.Reason, r.Err)
					}
					p.move(t, o, from.space, 16, p.lane)
					if !to.bitmap.Full() || !bytes.Equal(from.content(), to.content()) {
						t.Fatalf("%d to %d: full %v, or content differs", i, k, to.bitmap.Full())
					}
					g.Revoke()
				}
			}
		})
	}
}

// dest is a lane's destination with host memory of so many bytes under index 3.
func dest(size int) *destination {
	l := &lane{b: New(Config{})}
	l.dst.init(l)
	m := &mapping{bytes: make([]byte, size), refs: 2}
	l.b.maps.all[m.key] = m
	l.dst.regions[3] = m
	return &l.dst
}

// What a pull may not say: each is refused, before a piece of it is made.
func TestHostileRuns(t *testing.T) {
	const size = 1 << 20
	for name, c := range map[string]struct {
		r   run
		why transfer.Reason
	}{
		"behind the region":        {run{region: 3, len: 16, off: size - 15, count: 1}, transfer.ReasonRange},
		"the last piece behind it": {run{region: 3, len: 16, stride: 1024, count: 1025}, transfer.ReasonRange},
		"the last piece before it": {run{region: 3, len: 16, off: 4096, stride: 1<<64 - 1024, count: 6}, transfer.ReasonRange},
		"stride past 64 bits":      {run{region: 3, len: 16, stride: 1 << 62, count: 5}, transfer.ReasonRange},
		"the least stride":         {run{region: 3, len: 16, off: 64, stride: 1 << 63, count: 3}, transfer.ReasonRange},
		"no length":                {run{region: 3, stride: 1, count: 2}, transfer.ReasonRange},
		"another region":           {run{region: 4, len: 16, stride: 16, count: 2}, transfer.ReasonMemory},
		"the same piece for ever":  {run{region: 3, len: 16, count: math.MaxUint32}, transfer.ReasonLength},
		"too many pieces":          {run{region: 3, len: 1, stride: 1, count: maxPieces + 1}, transfer.ReasonLength},
		"too many bytes":           {run{region: 3, len: 1 << 19, count: 9}, transfer.ReasonLength},
	} {
		d := dest(size)
		f := pullOf(pullFrame{tag: 1}, c.r)
		var j job
		j.l = d.l
		why, err := d.sourceLocked(&j, f[frameHeader+pullFixed:])
		if why != c.why || err != nil {
			t.Errorf("%s: %s, %v: want %s", name, why, err, c.why)
		}
		if len(j.cells) != 0 {
			t.Errorf("%s: kept", name)
		}
	}
}

// FuzzSource: whatever cells a peer sends, what is accepted names only bytes of its region, as many and in as many pieces as is said.
func FuzzSource(f *testing.F) {
	const size = 64 << 10
	f.Add(pullOf(pullFrame{}, run{region: 3, len: 16, off: 32, stride: 64, count: 100}, run{region: 3, len: 5, count: 1})[frameHeader+pullFixed:])
	f.Add(pullOf(pullFrame{}, run{region: 3, len: 16, off: 60000, stride: 1<<64 - 64, count: 100})[frameHeader+pullFixed:])
	f.Add(pullOf(pullFrame{}, run{region: 3, len: 16, stride: 1 << 63, count: 2})[frameHeader+pullFixed:])
	f.Fuzz(func(t *testing.T, cells []byte) {
		cells = cells[:min(len(cells), maxCells*cellBytes)/cellBytes*cellBytes]
		d := dest(size)
		j := job{l: d.l}
		if why, err := d.sourceLocked(&j, cells); why != transfer.ReasonNone || err != nil {
			return
		}
		bytes, pieces := uint64(0), uint64(0)
		for c := (cursor{job: &j, cells: j.cells}); c.source(); c.from.count-- {
			if c.m == nil || c.from.off > size || uint64(c.from.len) > size-c.from.off || c.from.len == 0 {
				t.Fatalf("a piece [%d, +%d) of a region of %d", c.from.off, c.from.len, size)
			}
			bytes += uint64(c.from.len)
			c.from.off += c.from.stride
			pieces++
		}
		if bytes != j.total || pieces != j.pieces || pieces > maxPieces || bytes > maxLen {
			t.Fatalf("%d bytes in %d pieces, accepted as %d in %d", bytes, pieces, j.total, j.pieces)
		}
	})
}

// BenchmarkRuns is what a scattered pull costs by itself, without sockets and other cores: its frame, its check, and its list at the device.
func BenchmarkRuns(b *testing.B) {
	d := instant{}
	const blocks = 256
	m := scattered(b, d, deviceSlice, deviceSlice/blocks, 1, false)
	p := newPair(b, Config{Devices: d})
	l := p.lane.(*lane)
	list, err := m.Resolve(nil, m.space.All())
	if err != nil {
		b.Fatal(err)
	}
	var a asker
	slice := &moved{s: transport.Slice{Origin: &transport.Origin{Source: m}}}
	if fits, _, err := l.list(&a, slice, m.space.All(), list); !fits || err != nil {
		b.Fatal(fits, err)
	}
	cells := a.frame[frameHeader+pullFixed:]
	dst := &destination{regions: map[uint32]*mapping{0: {region: m.region, refs: 1}}, l: l}
	j := job{l: l, r: m.space.All(), grant: &transport.Grant{Sink: m}}
	if why, err := dst.sourceLocked(&j, cells); why != 0 || err != nil {
		b.Fatal(why, err)
	}
	var to batch
	for name, f := range map[string]func(){
		"frame": func() { _, _, _ = l.list(&a, slice, m.space.All(), list) },
		"check": func() {
			j.cells, j.total, j.pieces = j.cells[:0], 0, 0
			_, _ = dst.sourceLocked(&j, cells)
		},
		"list": func() {
			to.dst, to.src = to.dst[:0], to.src[:0]
			_ = to.whole(&j)
		},
		"resolve": func() { list, _ = m.Resolve(list[:0], m.space.All()) },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				f()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/blocks, "ns/block")
		})
	}
}
