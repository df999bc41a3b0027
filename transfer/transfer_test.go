package transfer

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

func genRange(t *rapid.T, n uint32) Range {
	return Range{First: rapid.Uint32Range(0, n+10).Draw(t, "first"),
		Count: rapid.OneOf(rapid.Uint32Range(0, 100), rapid.Just(^uint32(0))).Draw(t, "count")}
}

func in(r Range, c uint32) bool {
	return c >= r.First &&
		uint64(c) < uint64(r.First)+uint64(r.Count)
}

func runsOf(m []bool, want bool) []Range {
	var out []Range
	for c := 0; c < len(m); c++ {
		if m[c] != want {
			continue
		}
		first := c
		for c < len(m) && m[c] == want {
			c++
		}
		out = append(out, Range{First: uint32(first), Count: uint32(c - first)})
	}
	return out
}

func TestBitmapModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Uint32Range(0, 300).Draw(t, "n")
		b, m := NewBitmap(n), make([]bool, n)
		for range rapid.IntRange(0, 30).Draw(t, "ops") {
			r := genRange(t, n)
			var added uint32
			for c := range m {
				if in(r, uint32(c)) && !m[c] {
					m[c] = true
					added++
				}
			}
			if got := b.Set(r); got != added {
				t.Fatalf("Set(%+v) added %d, want %d", r, got, added)
			}
			if got, want := slices.Collect(b.Missing()), runsOf(m, false); !slices.Equal(got, want) {
				t.Fatalf("missing %v, want %v", got, want)
			}
			for c := range n + 2 {
				if b.Has(c) != (c < n && m[c]) {
					t.Fatalf("Has(%d) = %v", c, b.Has(c))
				}
			}
			if b.Full() != !slices.Contains(m, false) ||
				b.Count() != n-uint32(len(slices.DeleteFunc(slices.Clone(m), func(v bool) bool { return v }))) {
				t.Fatalf("full %v count %d of %v", b.Full(), b.Count(), m)
			}
		}
	})
}

// TestBitmapShares: each part's share is what counting its chunks one by one gives.
func TestBitmapShares(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		n, parts := rng.Uint32N(500), 1+rng.Uint32N(40)
		b := NewBitmap(n)
		for range rng.Uint32N(20) {
			b.Set(Range{First: rng.Uint32N(n + 1), Count: rng.Uint32N(60)})
		}
		got := make([]uint8, parts)
		b.Shares(got)
		for i := range parts {
			first, end, set := n*i/parts, n*(i+1)/parts, uint32(0)
			for c := first; c < end; c++ {
				if b.Has(c) {
					set++
				}
			}
			want := uint8(100)
			if end > first {
				want = uint8(100 * set / (end - first))
			}
			if got[i] != want {
				t.Fatalf("%d chunks, part %d of %d: %d%%, want %d%%", n, i, parts, got[i], want)
			}
		}
	}
}

// TestBitmapConcurrent: duplicates from many lanes never count twice, and exactly one Set fills the
// bitmap.
func TestBitmapConcurrent(t *testing.T) {
	const n = 5000
	b := NewBitmap(n)
	var wg sync.WaitGroup
	var total [8]uint32
	for g := range total {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 1))
			for _, c := range r.Perm(n) {
				total[g] += b.Set(Range{First: uint32(c), Count: uint32(r.IntN(9))})
				total[g] += b.Set(Range{First: uint32(c), Count: 1})
			}
		})
	}
	wg.Wait()
	var sum uint32
	for _, v := range total {
		sum += v
	}
	if sum != n || !b.Full() {
		t.Fatalf("%d chunks were added to a bitmap of %d, full %v", sum, n, b.Full())
	}
}

func TestRangeSetModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Uint32Range(0, 300).Draw(t, "n")
		s, m := NewRangeSet(n), make([]bool, n)
		for range rapid.IntRange(0, 30).Draw(t, "ops") {
			switch op := rapid.IntRange(0, 8).Draw(t, "op"); op {
			case 0, 1, 2, 3:
				r := genRange(t, n)
				put := op != 3
				var changed uint32
				for c := range m {
					if in(r, uint32(c)) && m[c] != put {
						m[c] = put
						changed++
					}
				}
				got := s.Remove
				if put {
					got = s.Add
				}
				if v := got(r); v != changed {
					t.Fatalf("op %d %+v changed %d, want %d", op, r, v, changed)
				}
			case 4:
				s.Clear()
				clear(m)
			default:
				limit := rapid.Uint32Range(0, 70).Draw(t, "limit")
				var want Range
				if runs := runsOf(m, true); len(runs) > 0 && limit > 0 {
					want = Range{First: runs[0].First, Count: min(limit, runs[0].Count)}
				}
				got := s.Take(limit)
				if got != want {
					t.Fatalf("Take(%d) = %+v, want %+v", limit, got, want)
				}
				for c := range got.Count {
					m[got.First+c] = false
				}
			}
			if got, want := slices.Collect(s.Ranges()), runsOf(m, true); !slices.Equal(got, want) {
				t.Fatalf("ranges %v, want %v", got, want)
			}
			var count uint32
			for c := range n {
				if s.Contains(c) != m[c] {
					t.Fatalf("Contains(%d) = %v", c, s.Contains(c))
				}
				if m[c] {
					count++
				}
			}
			if s.Count() != count {
				t.Fatalf("count %d, want %d", s.Count(), count)
			}
		}
	})
}

func TestSpaceModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		lens := rapid.SliceOfN(rapid.OneOf(rapid.Just(uint64(0)), rapid.Uint64Range(0, 5*ChunkBytes),
			rapid.Just(uint64(2*ChunkBytes))), 0, 12).Draw(t, "segments")
		s, err := NewSpace(lens)
		if err != nil {
			t.Fatal(err)
		}
		var seg []int
		var size []uint64
		var total uint64
		for i, n := range lens {
			r, b := s.Segment(i)
			if r.First != uint32(len(seg)) || b != n {
				t.Fatalf("segment %d is %+v, %d bytes; it starts at %d with %d", i, r, b, len(seg), n)
			}
			total += n
			for ; n > 0; n -= min(n, ChunkBytes) {
				seg, size = append(seg, i), append(size, min(n, ChunkBytes))
			}
		}
		if int(s.NumChunks()) != len(seg) || s.TotalBytes() != total || s.NumSegments() != len(lens) {
			t.Fatalf("%d chunks, %d bytes", s.NumChunks(), s.TotalBytes())
		}
		for c := range seg {
			if s.SegmentOf(uint32(c)) != seg[c] || s.ChunkBytes(uint32(c)) != size[c] {
				t.Fatalf("chunk %d: segment %d of %d bytes, want %d of %d", c, s.SegmentOf(uint32(c)),
					s.ChunkBytes(uint32(c)), seg[c], size[c])
			}
		}
		r := genRange(t, s.NumChunks())
		got, err := s.Bytes(r)
		if r.Count == 0 || uint64(r.First)+uint64(r.Count) > uint64(len(seg)) {
			if err == nil {
				t.Fatalf("Bytes(%+v) of %d chunks has no error", r, len(seg))
			}
			return
		}
		var want uint64
		for c := r.First; c < r.End(); c++ {
			want += size[c]
		}
		if err != nil || got != want {
			t.Fatalf("Bytes(%+v) = %d, %v, want %d", r, got, err, want)
		}
	})
}

func TestSpaceBounds(t *testing.T) {
	if s, err := NewSpace([]uint64{MaxSlotChunks * ChunkBytes}); err != nil ||
		s.NumChunks() != MaxSlotChunks {
		t.Fatal(err)
	}
	for _, lens := range [][]uint64{{MaxSlotChunks*ChunkBytes + 1}, {^uint64(0)},
		{^uint64(0), ^uint64(0)}, {MaxSlotChunks * ChunkBytes, 1}} {
		if _, err := NewSpace(lens); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%d chunks",
			MaxSlotChunks)) {
			t.Fatalf("%v: %v", lens, err)
		}
	}
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	s, b := NewRangeSet(MaxSlotChunks), NewBitmap(MaxSlotChunks)
	if n := testing.AllocsPerRun(100, func() {
		s.Add(Range{First: 10, Count: 100})
		r := s.Take(7)
		s.Add(r)
		b.Set(r)
		for range b.Missing() {
			break
		}
		s.Remove(Range{Count: MaxSlotChunks})
	}); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

func TestNames(t *testing.T) {
	for r := range Reason(NumReasons) {
		if r.String() == "" || r.String() == "unknown" {
			t.Errorf("reason %d has no name", r)
		}
	}
	for _, o := range []Outcome{Landed, NotLanded, Rejected, InDoubt} {
		if strings.Contains(o.String(), "(") {
			t.Errorf("outcome %d has no name", o)
		}
	}
}

func BenchmarkTakePutBack(b *testing.B) {
	s := NewRangeSet(MaxSlotChunks)
	s.Add(Range{Count: MaxSlotChunks})
	b.ReportAllocs()
	for b.Loop() {
		s.Add(s.Take(4))
	}
}
