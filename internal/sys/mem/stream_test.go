package mem

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// Any length at any alignment of either side equals copy, by each routine, and no byte beside it
// changes.
func TestCopyAlignments(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	src := make([]byte, 300<<10)
	for i := range src {
		src[i] = byte(rng.Uint32())
	}
	for i := range 2000 {
		n := rng.IntN(9 << 10)
		if rng.IntN(20) == 0 {
			n = rng.IntN(256 << 10)
		}
		s, d := rng.IntN(100), rng.IntN(100)
		dst := bytes.Repeat([]byte{0xa5}, d+n+100)
		by := "Copy"
		if r := routine(i % (int(routines) + 1)); r < routines {
			by = r.String()
			moveBy(r, dst[d:d+n], src[s:s+n])
		} else if got := Copy(dst[d:d+n], src[s:s+n]); got != n {
			t.Fatalf("Copy of %d bytes: %d", n, got)
		}
		if !bytes.Equal(dst[d:d+n], src[s:s+n]) {
			t.Fatalf("%s: %d bytes, source at %d, destination at %d: content differs", by, n, s, d)
		}
		for i, c := range dst {
			if (i < d || i >= d+n) && c != 0xa5 {
				t.Fatalf("%s: %d bytes, source at %d, destination at %d: byte %d beside it changed", by,
					n, s, d, i-d)
			}
		}
	}
}

// Prefetch takes any slice, changes no byte, and allocates nothing.
func TestPrefetch(t *testing.T) {
	p := bytes.Repeat([]byte{0xa5}, 300<<10)
	allocs := testing.AllocsPerRun(10, func() {
		for _, n := range []int{0, 1, 63, 64, 65, 4096, len(p) - 64} {
			for off := range 3 {
				Prefetch(p[off*31 : off*31+n : off*31+n])
			}
		}
		Prefetch(nil)
	})
	if allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
	if bytes.Count(p, []byte{0xa5}) != len(p) {
		t.Error("a byte changed")
	}
}

// Scattered blocks between two large regions by each routine and by Copy as ChooseCopies has it, in
// turns, so that whatever else the machine does meets them alike. "of the best" is what Copy
// reaches of the best routine: 0.95 and more is right.
func BenchmarkCopyScattered(b *testing.B) {
	const region, turn = 256 << 20, 64 << 20
	memory := func(name string) []byte { // as engines share it
		r, err := NewAnonymous(name, region, Populate())
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(r.Release)
		p, ok := r.Bytes()
		if !ok {
			b.Fatal("no bytes")
		}
		Fill(p, 1)
		return p
	}
	src, dst := memory("source"), memory("destination")
	for _, c := range ChooseCopies() {
		b.Logf("chosen for %s", c)
	}
	for _, block := range []int{4 << 10, 16 << 10, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("%dKiB", block>>10), func(b *testing.B) {
			from, to := rand.Perm(region/block), rand.Perm(region/block)
			at := 0
			var took [routines + 1][]float64 // ns of each turn; the last is Copy
			for b.Loop() {
				for r := range took {
					if r := routine(r); r < routines && !usable(r) {
						continue
					}
					began := time.Now()
					for range turn / block {
						s, d := from[at%len(from)]*block, to[at%len(to)]*block
						at++
						if r := routine(r); r < routines {
							for p := 0; p < block; p += copyPiece { // as Copy does it
								end := min(p+copyPiece, block)
								moveBy(r, dst[d+p:d+end], src[s+p:s+end])
							}
						} else {
							Copy(dst[d:d+block], src[s:s+block])
						}
					}
					took[r] = append(took[r], float64(time.Since(began)))
				}
			}
			best := 0.0
			for r, all := range took {
				if len(all) == 0 {
					continue
				}
				slices.Sort(all)
				rate := turn / all[len(all)/2]
				if r := routine(r); r < routines {
					best = max(best, rate)
					b.ReportMetric(rate, strings.ReplaceAll(r.String(), " ", "-")+"-GB/s")
				} else {
					b.ReportMetric(rate, "Copy-GB/s")
					b.ReportMetric(rate/best, "of-the-best")
				}
			}
		})
	}
}

// The fastest routine is chosen, streaming stores where none is clearly faster, and never one that
// this processor lacks.
func TestChoose(t *testing.T) {
	for _, c := range []struct {
		rates [routines]float64
		want  routine
	}{
		{[routines]float64{5, 7, 6}, ordinary},
		{[routines]float64{5, 6, 7}, repeated},
		{[routines]float64{6.8, 7, 7.1}, streaming},
		{[routines]float64{7, 5, 6}, streaming},
		{[routines]float64{0, 5, 0}, ordinary},
		{[routines]float64{0, 5, 6}, repeated},
	} {
		if got := choose(c.rates); got != c.want {
			t.Errorf("%v: %s, want %s", c.rates, got, c.want)
		}
	}
	for _, c := range ChooseCopies() {
		if !usable(c.chosen) || c.rates[ordinary] == 0 || routineFor(c.Size) != c.chosen {
			t.Errorf("%s; in use: %s", c, routineFor(c.Size))
		}
		t.Log(c)
	}
	if small, large := routineFor(100), routineFor(copyPiece); small != routineFor(classSizes[0]) ||
		large != routineFor(classSizes[len(classSizes)-1]) {
		t.Errorf("pieces of 100 bytes: %s, of %d: %s", small, copyPiece, large)
	}
}
