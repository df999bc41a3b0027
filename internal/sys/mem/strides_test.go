package mem

import (
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
)

// pieces are the offsets of a run's pieces by the definition; false: one of them leaves 64 bits on
// either side.
func (s *Strides) pieces(off uint64) (all []uint64, ok bool) {
	step := func(at, stride, n uint64) (uint64, bool) {
		if int64(stride) < 0 {
			hi, lo := bits.Mul64(n, -stride)
			to, borrow := bits.Sub64(at, lo, 0)
			return to, hi == 0 && borrow == 0
		}
		hi, lo := bits.Mul64(n, stride)
		to, carry := bits.Add64(at, lo, 0)
		return to, hi == 0 && carry == 0
	}
	for r := range uint64(s.Rows) {
		for c := range uint64(s.Count) {
			// Forwards first, whichever axis that is: on the way back no offset is beside 64 bits that the
			// piece itself is not.
			first, n, then, m := s.Stride, c, s.Outer, r
			if int64(first) < 0 {
				first, n, then, m = then, m, first, n
			}
			at, in := step(off, first, n)
			if !in {
				return nil, false
			}
			if at, in = step(at, then, m); !in {
				return nil, false
			}
			all = append(all, at)
		}
	}
	return all, true
}

// Inside, which does not look at the pieces, agrees with a look at each of them, at the edges
// of the region and of 64 bits, too.
func TestStridesInside(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	edges := []uint64{0, 1, 16, 4096, 1 << 31, 1 << 32, 1 << 62, 1<<63 - 1, 1 << 63, 1<<63 + 1,
		math.MaxUint64 - 4096, math.MaxUint64 - 1, math.MaxUint64}
	near := func() uint64 {
		if rng.IntN(2) == 0 {
			return rng.Uint64N(1 << 14)
		}
		return edges[rng.IntN(len(edges))] + uint64(rng.IntN(5)) - 2
	}
	stride := func() uint64 {
		switch rng.IntN(4) {
		case 0:
			return -rng.Uint64N(1 << 10)
		case 1:
			return rng.Uint64N(1 << 10)
		}
		return near()
	}
	in, crossed := 0, 0
	for range 300_000 {
		s := Strides{Stride: stride(), Outer: stride(), Count: uint32(1 + rng.IntN(9)),
			Rows: uint32(1 + rng.IntN(5))}
		off, n, size := near(), 1+rng.Uint64N(64), near()
		if rng.IntN(8) == 0 {
			n = near()
		}
		// With an axis each way a sum may leave 64 bits and come back, which no region goes with: every
		// piece has to be looked at.
		all, want := s.pieces(off)
		for _, at := range all {
			want = want && at <= size && n <= size-at
		}
		if got := s.Inside(off, n, size); got != want {
			t.Fatalf("%+v of %d bytes from %d on inside a region of %d: %v, want %v", s, n, off,
				size, got, want)
		}
		if want {
			in++
			if int64(s.Stride) < 0 != (int64(s.Outer) < 0) && s.Count > 1 && s.Rows > 1 {
				crossed++
			}
		}
	}
	if in < 1000 || crossed < 200 {
		t.Fatalf("only %d runs were inside, %d of them with an axis each way", in, crossed)
	}
	for _, s := range []Strides{{Stride: 1 << 40, Count: math.MaxUint32, Rows: 1},
		{Stride: 16, Outer: 1 << 63, Count: 2, Rows: math.MaxUint32},
		{Stride: 1 << 62, Outer: 1 << 62, Count: 2, Rows: 4}} {
		if s.Inside(0, 1, MaxRegionBytes) {
			t.Errorf("%+v is inside a region", s)
		}
	}
}

// A run of runs as a law sees it: which blocks it names.
func explode(first Block, s Strides) (all []Block) {
	var o Offsets
	for o.Start(first.Off, &s); ; {
		all = append(all, Block{first.Region, o.Off, first.Len})
		if !o.Next(&s) {
			return all
		}
	}
}

// runsOf takes a list apart.
func runsOf(blocks []Block) (all []Strides) {
	for len(blocks) > 0 {
		s := Leading(blocks)
		all = append(all, s)
		blocks = blocks[s.Pieces():]
	}
	return all
}

// The runs of a list name the blocks of the list in their order, whatever it is, and take no more
// cells than the blocks.
func TestLeadingNamesTheBlocks(t *testing.T) {
	regions := []*Region{{size: 1 << 40}, {size: 1 << 40}}
	rng := rand.New(rand.NewPCG(3, 4))
	for range 20_000 {
		var list []Block
		for range 1 + rng.IntN(5) {
			b := Block{regions[rng.IntN(2)], rng.Uint64N(256), uint64(1 + rng.IntN(2))}
			s := Strides{Stride: rng.Uint64N(8) - 4, Outer: rng.Uint64N(32) - 16,
				Count: uint32(1 + rng.IntN(5)), Rows: uint32(1 + rng.IntN(5))}
			list = append(list, explode(b, s)...)
		}
		list = list[rng.IntN(len(list)):]
		var got []Block
		cells := 0
		for _, s := range runsOf(list) {
			if s.Count == 1 && s != Single || s.Count == 2 && s.Rows == 1 || s.Rows == 1 && s.Outer != 0 {
				t.Fatalf("a run of %+v", s)
			}
			cells += 1 + min(int(s.Count)-1, 1) + min(int(s.Rows)-1, 1)
			got = append(got, explode(list[len(got)], s)...)
		}
		if !slices.Equal(got, list) {
			t.Fatalf("runs name other blocks than the list has:\n%v\n%v", got, list)
		}
		if cells > len(list) {
			t.Fatalf("runs take %d cells, of %d blocks", cells, len(list))
		}
	}
}

// Joined pieces are the same bytes in the same order, and none in a row touches the next.
func TestJoinedNamesTheSameBytes(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	joined := 0
	for range 100_000 {
		n := 1 + rng.Uint64N(4)
		s := Strides{Stride: rng.Uint64N(6), Count: uint32(1 + rng.IntN(4)),
			Rows: uint32(1 + rng.IntN(4))}
		if s.Count == 1 {
			s = Single
		} else if s.Rows > 1 {
			s.Outer = rng.Uint64N(20)
		}
		bytesOf := func(s Strides, n uint64) (all []uint64) {
			first := Block{Off: 64, Len: n}
			for _, b := range explode(first, s) {
				for k := range n {
					all = append(all, b.Off+k)
				}
			}
			return all
		}
		j, m := s.Joined(n)
		if !slices.Equal(bytesOf(j, m), bytesOf(s, n)) {
			t.Fatalf("%+v of %d bytes: %+v of %d are others", s, n, j, m)
		}
		if j.Count > 1 && j.Stride == m || j.Pieces() > s.Pieces() {
			t.Fatalf("%+v of %d bytes: %+v of %d still touch, or are more", s, n, j, m)
		}
		if j.Pieces() < s.Pieces() {
			joined++
		}
	}
	if joined < 1000 {
		t.Fatalf("only %d runs had pieces that touch", joined)
	}
}

// page is a list of blocks in rows of rows, outer by outer.
func page(r *Region, off, length uint64, n [3]int, stride [3]uint64) (all []Block) {
	for i := range n[0] {
		for j := range n[1] {
			for k := range n[2] {
				all = append(all, Block{r, off + uint64(i)*stride[0] + uint64(j)*stride[1] +
					uint64(k)*stride[2], length})
			}
		}
	}
	return all
}

// The parts of a slice in the pages of Llama-3.1-8B, in the expected number of runs, also where the
// slice begins and ends within a row.
func TestLeadingFindsRows(t *testing.T) {
	r := &Region{size: 1 << 40}
	crosswise := page(r, 1<<20, 512, [3]int{1, 16, 8}, [3]uint64{0, 512, 8192})
	apart := page(r, 1<<20, 2048, [3]int{1, 2, 16}, [3]uint64{0, 1 << 30, 4096})
	pairs := page(r, 1<<20, 4096, [3]int{1, 64, 2}, [3]uint64{0, 8192, 1 << 30})
	for name, c := range map[string]struct {
		list []Block
		want []Strides
	}{
		"heads for tokens": {crosswise, []Strides{{8192, 512, 8, 16}}},
		"its end":          {crosswise[5:], []Strides{{8192, 0, 3, 1}, {8192, 512, 8, 15}}},
		"its start":        {crosswise[:8*7+2], []Strides{{8192, 512, 8, 7}, Single, Single}},
		"its middle": {crosswise[2 : 8*3+5], []Strides{{8192, 0, 6, 1}, {8192, 512, 8, 2},
			{8192, 0, 5, 1}}},
		"less than a row": {crosswise[1:3], []Strides{Single, Single}},
		"two pages": {slices.Concat(crosswise, page(r, 1<<33, 512, [3]int{1, 16, 8},
			[3]uint64{0, 512, 8192})), []Strides{{8192, 512, 8, 16}, {8192, 512, 8, 16}}},
		"two planes": {apart, []Strides{{4096, 1 << 30, 16, 2}}},
		"backwards": {reversed(crosswise), []Strides{{math.MaxUint64 - 8191,
			math.MaxUint64 - 511, 8, 16}}},
		"pairs":             {pairs, []Strides{{1 << 30, 8192, 2, 64}}},
		"a pair cut":        {pairs[1:], []Strides{{math.MaxUint64 - 1<<30 + 8193, 8192, 2, 63}, Single}},
		"two pairs":         {pairs[:4], []Strides{{1 << 30, 8192, 2, 2}}},
		"one pair":          {pairs[:2], []Strides{Single, Single}},
		"a pair and a half": {pairs[:3], []Strides{Single, Single, Single}},
	} {
		if got := runsOf(c.list); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	other := slices.Clone(crosswise)
	for i := range other[64:] {
		other[64+i].Region = &Region{size: 1 << 40}
	}
	if got := runsOf(other); len(got) == 0 || got[0] != (Strides{8192, 512, 8, 8}) {
		t.Errorf("rows of two regions: %v", got)
	}
}

func reversed(list []Block) []Block {
	list = slices.Clone(list)
	slices.Reverse(list)
	return list
}

func TestLeadingAllocatesNothing(t *testing.T) {
	list := page(&Region{size: 1 << 40}, 0, 512, [3]int{2, 16, 8}, [3]uint64{1 << 30, 512, 8192})
	if n := testing.AllocsPerRun(100, func() {
		for rest := list; len(rest) > 0; {
			s := Leading(rest)
			rest = rest[s.Pieces():]
		}
	}); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

// BenchmarkLeading is what it takes to find the runs of a slice of 1 MiB.
func BenchmarkLeading(b *testing.B) {
	r := &Region{size: 1 << 40}
	var far [16]int
	for i := range far {
		far[i] = i * i * 7 % 31
	}
	pages := func(length uint64, n [2]int, stride [2]uint64) (all []Block) {
		for _, i := range far {
			all = append(all, page(r, uint64(i)<<16, length, [3]int{1, n[0], n[1]}, [3]uint64{0, stride[0],
				stride[1]})...)
		}
		return all
	}
	for _, c := range []struct {
		name string
		list []Block
	}{
		{"alike", pages(64<<10, [2]int{1, 1}, [2]uint64{})},
		{"half the heads", pages(2048, [2]int{2, 16}, [2]uint64{32 << 10, 2048 * 2})},
		{"crosswise", pages(512, [2]int{16, 8}, [2]uint64{512, 8192})},
		{"scattered", pages(64<<10/32, [2]int{32, 1}, [2]uint64{1234567 << 10})},
	} {
		b.Run(c.name, func(b *testing.B) {
			runs := 0
			for b.Loop() {
				runs = 0
				for rest := c.list; len(rest) > 0; runs++ {
					s := Leading(rest)
					rest = rest[s.Pieces():]
				}
			}
			b.ReportMetric(float64(runs), "runs")
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(c.list)), "ns/piece")
		})
	}
}
