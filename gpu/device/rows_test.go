package device

import (
	"math/rand/v2"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// TestPairs: every piece is moved once, in rows that copy engines accept, and few pieces stay
// single wherever blocks are.
func TestPairs(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 3))
	for _, c := range []struct {
		name  string
		n     int
		size  uint64
		space uint64 // of the GPU, over which the pieces lie
		alone int    // maximum of pieces outside of rows
	}{{"one", 1, 16 << 10, 1 << 30, 1}, {"two", 2, 16 << 10, 1 << 30, 2}, {"a slice", 64, 16 << 10,
		1 << 30, 24}, {"a slot of small pieces", 4096, 2 << 10, 1 << 30, 256},
		{"a large cache", 4096, 2 << 10, 8 << 30, 256}, {"large ones", 32, pairBelow, 1 << 30, 32}} {
		t.Run(c.name, func(t *testing.T) {
			var dst, src []cuda.Ptr
			var n []uint64
			for i, at := range rng.Perm(int(c.space / c.size))[:c.n] {
				dst, src = append(dst, 1<<40+cuda.Ptr(uint64(at)*c.size)),
					append(src, 1<<20+cuda.Ptr(uint64(i)*c.size))
				n = append(n, c.size)
			}
			rows, alone := pairs(nil, nil, dst, src, n)
			got := map[[2]uint64]int{}
			for _, r := range rows {
				if r.Height != 2 || r.Width != c.size || min(r.DstPitch, r.SrcPitch) < r.Width ||
					max(r.DstPitch, r.SrcPitch) > cuda.MaxPitch {
					t.Fatalf("rows %+v", r)
				}
				for k := range r.Height {
					got[[2]uint64{r.Dst + k*r.DstPitch, r.Src + k*r.SrcPitch}]++
				}
			}
			for _, i := range alone {
				got[[2]uint64{uint64(dst[i]), uint64(src[i])}]++
			}
			for i := range dst {
				if got[[2]uint64{uint64(dst[i]), uint64(src[i])}] != 1 {
					t.Fatalf("piece %d is moved %d times", i, got[[2]uint64{uint64(dst[i]), uint64(src[i])}])
				}
			}
			if len(got) != c.n || len(alone) > c.alone {
				t.Errorf("%d of %d moved, %d of them alone (at most %d)", len(got), c.n, len(alone), c.alone)
			}
			t.Logf("%d alone of %d", len(alone), c.n)
		})
	}
}

func BenchmarkPairs(b *testing.B) {
	var dst, src []cuda.Ptr
	var n []uint64
	for i, at := range rand.New(rand.NewPCG(3, 3)).Perm(1 << 16)[:64] {
		dst, src, n = append(dst, 1<<40+cuda.Ptr(at)<<14), append(src, 1<<20+cuda.Ptr(i)<<14),
			append(n, 16<<10)
	}
	var rows []cuda.Rows
	var alone []int
	for b.Loop() {
		rows, alone = pairs(rows[:0], alone[:0], dst, src, n)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/64, "ns/block")
}
