package shm

import (
	"bytes"
	"math"
	"slices"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// regular is memory whose blocks lie in rows at equal distances, as pages of heads or of tokens do
// that another order takes apart.
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
	fits, _, err := l.src.list(&a, &moved{s: transport.Slice{Origin: &transport.Origin{Memory: m}}}, r,
		blocks)
	if err != nil || !fits {
		t.Fatalf("list: %v, %v", fits, err)
	}
	frame := a.frame[frameHeader+pullFixed:]
	for rest := frame; len(rest) > 0; {
		var x run
		if rest, err = x.next(rest); err != nil {
			t.Fatal(err)
		}
		var o mem.Offsets
		o.Start(x.off, &x.Strides)
		for more := true; more; more = o.Next(&x.Strides) {
			got = append(got, mem.Block{Region: blocks[0].Region, Off: o.Off, Len: uint64(x.len)})
		}
	}
	if !slices.Equal(got, blocks) {
		t.Fatal("the frame names other pieces than the source has")
	}
	return len(frame) / cellBytes, got
}

// Regular memory takes a few cells, and scattered memory one for each piece.
func TestRegularPullsAreShort(t *testing.T) {
	p := newPair(t, Config{})
	l := p.lane.(*lane)
	r := transfer.Range{Count: 16}
	scattered := newMemory(t, 1<<20, 4<<10, 1)
	rows := regular(t, 1<<20, 512, 4096, 256, false)
	if n, got := frameOf(t, l, rows, r); n > 3*2 || len(got) != 2048 {
		t.Errorf("%d cells for %d pieces in rows of 256", n, len(got))
	}
	if n, got := frameOf(t, l, regular(t, 1<<20, 512, 1024, 64, true), r); n != 3 {
		t.Errorf("%d cells for %d pieces in rows of 64, backwards", n, len(got))
	}
	if n, got := frameOf(t, l, scattered, r); n != len(got) {
		t.Errorf("%d cells for %d scattered pieces", n, len(got))
	}
}

// Pages of Llama-3.1-8B with heads outside, in the order of those with tokens outside, and the
// other way round, in blocks that lie anywhere: a run for each block. No pull has more bytes,
// however long the prompt is, and this is what it takes at most.
func TestCrosswisePages(t *testing.T) {
	const each, heads, tokens, pull = 512, 8, 16, 1 << 20
	l := newPair(t, Config{}).lane.(*lane)
	for name, c := range map[string]struct{ outer, inner, outerStride, innerStride uint64 }{
		"heads outside":  {tokens, heads, each, tokens * each},
		"tokens outside": {heads, tokens, each, heads * each},
	} {
		m := newMemory(t, pull, each, 1)
		region, page := m.blocks[0].Region, uint64(heads*tokens*each)
		pages := region.Size() / page
		for i := range m.blocks {
			block, k := uint64(i)/(heads*tokens), uint64(i)%(heads*tokens)
			m.blocks[i] = mem.Block{Region: region, Off: block*7%pages*page + k/c.inner*c.outerStride +
				k%c.inner*c.innerStride, Len: each}
		}
		want := pull / page * 3
		n, got := frameOf(t, l, m, transfer.Range{Count: pull / transfer.ChunkBytes})
		if uint64(len(got)) != pull/each || uint64(n) != want {
			t.Errorf("%s: %d cells for %d pieces, want %d", name, n, len(got), want)
		}
	}
}

// Regular memory on either side arrives, whole and where some of it had landed.
func TestRegularMemory(t *testing.T) {
	p := newPair(t, Config{})
	const n = 1 << 19 // eight chunks
	shapes := []*memory{regular(t, n, 512, 1024, 64, false), regular(t, n, 512, 1024, 64, true),
		regular(t, n, 2048, 4096, 32, true),
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
}

// dest is a lane's destination with host memory under index 3.
func dest(size int) *destination {
	l := &lane{b: New(Config{})}
	l.dst.init(l)
	m := &mapping{bytes: make([]byte, size), refs: 2}
	l.b.maps.all[m.key] = m
	l.dst.regions[3] = m
	return &l.dst
}

// Forbidden values of a pull: each is refused, before a piece of it is made.
func TestHostileRuns(t *testing.T) {
	const size, none = 1 << 20, 1 << 30
	for name, c := range map[string]struct {
		r   run
		why transfer.Reason
	}{
		"behind the region": {run{off: size - 15, Strides: mem.Single}, transfer.ReasonRange},
		"the last piece behind it": {run{Strides: mem.Strides{Stride: 1024, Count: 1025, Rows: 1}},
			transfer.ReasonRange},
		"the last piece before it": {run{off: 4096, Strides: mem.Strides{Stride: 1<<64 - 1024, Count: 6,
			Rows: 1}}, transfer.ReasonRange},
		"stride past 64 bits": {run{Strides: mem.Strides{Stride: 1 << 62, Count: 5, Rows: 1}},
			transfer.ReasonRange},
		"the least stride": {run{off: 64, Strides: mem.Strides{Stride: 1 << 63, Count: 3,
			Rows: 1}}, transfer.ReasonRange},
		"no length": {run{len: none, Strides: mem.Strides{Stride: 1, Count: 2, Rows: 1}},
			transfer.ReasonRange},
		"another region": {run{region: 1, Strides: mem.Strides{Stride: 16, Count: 2,
			Rows: 1}}, transfer.ReasonMemory},
		"the same piece for ever": {run{Strides: mem.Strides{Count: math.MaxUint32, Rows: 1}},
			transfer.ReasonLength},
		"too many pieces": {run{len: 1, Strides: mem.Strides{Stride: 1, Count: maxPieces + 1,
			Rows: 1}}, transfer.ReasonLength},
		"too many bytes": {run{len: 1 << 19, Strides: mem.Strides{Count: 9, Rows: 1}},
			transfer.ReasonLength},
		"the last row behind it": {run{Strides: mem.Strides{Stride: 16, Outer: 1 << 19, Count: 4,
			Rows: 3}}, transfer.ReasonRange},
		"the last row before it": {run{off: 4096, Strides: mem.Strides{Stride: 16,
			Outer: 1<<64 - 2048, Count: 4, Rows: 4}}, transfer.ReasonRange},
		"both axes, behind it": {run{Strides: mem.Strides{Stride: size / 2, Outer: size / 2,
			Count: 2, Rows: 2}}, transfer.ReasonRange},
		"rows past 64 bits": {run{Strides: mem.Strides{Stride: 16, Outer: 1 << 62, Count: 4,
			Rows: 5}}, transfer.ReasonRange},
		"axes that add to 64 bits": {run{Strides: mem.Strides{Stride: 1 << 62, Outer: 1 << 62, Count: 2,
			Rows: 4}}, transfer.ReasonRange},
		"forth and not back": {run{Strides: mem.Strides{Stride: size, Outer: 1<<64 - size,
			Count: 2, Rows: 2}}, transfer.ReasonRange},
		"pieces of 64 bits": {run{Strides: mem.Strides{Count: math.MaxUint32,
			Rows: math.MaxUint32}}, transfer.ReasonLength},
		"pieces of more than a pull": {run{len: 1, Strides: mem.Strides{Stride: 1, Outer: 1, Count: 256,
			Rows: 129}}, transfer.ReasonLength},
		"bytes of more than a pull": {run{len: 1 << 19, Strides: mem.Strides{Count: 3, Rows: 3}},
			transfer.ReasonLength},
		"a piece without length":    {run{len: none, Strides: mem.Single}, transfer.ReasonRange},
		"a piece of another region": {run{region: 1, Strides: mem.Single}, transfer.ReasonMemory},
		"a piece past 64 bits":      {run{off: 1<<64 - 1, Strides: mem.Single}, transfer.ReasonRange},
	} {
		d := dest(size)
		c.r.region += 3
		switch c.r.len {
		case 0:
			c.r.len = 16
		case none:
			c.r.len = 0
		}
		good := run{region: 3, len: 16, Strides: mem.Single}
		// first, and behind pieces that are looked at in haste
		for n, cells := range [][]run{{c.r}, {good, c.r}, {good, good, c.r, good}} {
			f := pullOf(pullFrame{tag: 1}, cells...)
			var j job
			j.l = d.l
			why, err := d.sourceLocked(&j, f[frameHeader+pullFixed:])
			if why != c.why || err != nil {
				t.Errorf("%s, %d: %s, %v: want %s", name, n, why, err, c.why)
			}
			if len(j.cells) != 0 {
				t.Errorf("%s, %d: kept", name, n)
			}
		}
	}
}

// Pieces one by one are counted as runs are: a pull takes a bounded number of them, and of bytes,
// to the piece.
func TestBoundsOfPieces(t *testing.T) {
	d := dest(1 << 20)
	piece := func(n uint32) run { return run{region: 3, len: n, Strides: mem.Single} }
	pull := func(n int, of run, then ...run) (transfer.Reason, *job) {
		cells := append(slices.Repeat([]run{of}, n), then...)
		j := &job{l: d.l}
		why, err := d.sourceLocked(j, pullOf(pullFrame{tag: 1}, cells...)[frameHeader+pullFixed:])
		if err != nil {
			t.Fatal(err)
		}
		return why, j
	}
	if why, j := pull(4, piece(1<<20)); why != transfer.ReasonNone || j.total != maxLen ||
		j.pieces != 4 {
		t.Errorf("%s, %d bytes in %d pieces", why, j.total, j.pieces)
	}
	if why, _ := pull(4, piece(1<<20), piece(1)); why != transfer.ReasonLength {
		t.Errorf("one byte more than a pull: %s", why)
	}
	if why, j := pull(maxPieces, piece(1)); why != transfer.ReasonNone || j.pieces != maxPieces {
		t.Errorf("%s, %d pieces", why, j.pieces)
	}
	if why, _ := pull(maxPieces, piece(1), piece(1)); why != transfer.ReasonLength {
		t.Errorf("one piece more than a pull: %s", why)
	}
}

// FuzzSource: whatever cells a peer sends, what is accepted names only bytes of its region, as many
// and in the expected number of pieces.
func FuzzSource(f *testing.F) {
	const size = 64 << 10
	for _, s := range []mem.Strides{{Stride: 64, Count: 100, Rows: 1}, {Stride: 1<<64 - 64, Count: 100,
		Rows: 1}, {Stride: 1 << 63, Count: 2, Rows: 1},
		{Stride: 64, Outer: 1<<64 - 8192, Count: 64, Rows: 8}, {Stride: 1 << 63, Outer: 1 << 63,
			Count: 2, Rows: 2}} {
		f.Add(pullOf(pullFrame{}, run{region: 3, len: 16, off: 60000, Strides: s}, run{region: 3, len: 5,
			Strides: mem.Single})[frameHeader+pullFixed:])
	}
	f.Fuzz(func(t *testing.T, cells []byte) {
		cells = cells[:min(len(cells), maxCells*cellBytes)/cellBytes*cellBytes]
		d := dest(size)
		j := job{l: d.l}
		if why, err := d.sourceLocked(&j, cells); why != transfer.ReasonNone || err != nil {
			return
		}
		bytes, pieces := uint64(0), uint64(0)
		for c := (cursor{job: &j, cells: j.cells}); c.source(); c.more = c.at.Next(&c.from.Strides) {
			if c.m == nil || c.at.Off > size || uint64(c.from.len) > size-c.at.Off || c.from.len == 0 {
				t.Fatalf("a piece [%d, +%d) of a region of %d", c.at.Off, c.from.len, size)
			}
			bytes += uint64(c.from.len)
			pieces++
		}
		if bytes != j.total || pieces != j.pieces || pieces > maxPieces || bytes > maxLen {
			t.Fatalf("%d bytes in %d pieces, accepted as %d in %d", bytes, pieces, j.total, j.pieces)
		}
	})
}

// BenchmarkRuns is what a scattered pull costs by itself, without sockets and other cores: its
// frame, its check, and its list at the device.
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
	slice := &moved{s: transport.Slice{Origin: &transport.Origin{Memory: m}}}
	if fits, _, err := l.src.list(&a, slice, m.space.All(), list); !fits || err != nil {
		b.Fatal(fits, err)
	}
	cells := a.frame[frameHeader+pullFixed:]
	dst := &destination{regions: map[uint32]*mapping{0: {region: m.region, refs: 1}}, l: l}
	j := job{l: l, r: m.space.All(), grant: &transport.Grant{Memory: m}}
	j.grant.Receipt.Reset(m.space.NumChunks())
	if why, err := dst.sourceLocked(&j, cells); why != 0 || err != nil {
		b.Fatal(why, err)
	}
	var to batch
	for name, f := range map[string]func(){
		"frame": func() { _, _, _ = l.src.list(&a, slice, m.space.All(), list) },
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
