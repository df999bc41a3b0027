package mem

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
)

// Any length at any alignment of either side equals copy, and no byte beside it changes.
func TestCopyAlignments(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	src := make([]byte, 300<<10)
	for i := range src {
		src[i] = byte(rng.Uint32())
	}
	for range 2000 {
		n := rng.IntN(9 << 10)
		if rng.IntN(20) == 0 {
			n = rng.IntN(256 << 10)
		}
		s, d := rng.IntN(100), rng.IntN(100)
		dst := bytes.Repeat([]byte{0xa5}, d+n+100)
		if got := Copy(dst[d:d+n], src[s:s+n]); got != n {
			t.Fatalf("Copy of %d bytes: %d", n, got)
		}
		if !bytes.Equal(dst[d:d+n], src[s:s+n]) {
			t.Fatalf("%d bytes, source at %d, destination at %d: content differs", n, s, d)
		}
		for i, c := range dst {
			if (i < d || i >= d+n) && c != 0xa5 {
				t.Fatalf("%d bytes, source at %d, destination at %d: byte %d beside it changed", n, s, d, i-d)
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

// Scattered blocks between two large regions: Copy against the runtime's copy.
func BenchmarkCopyScattered(b *testing.B) {
	const region = 256 << 20
	src, dst := make([]byte, region), make([]byte, region)
	for i := 0; i < region; i += 4096 {
		src[i], dst[i] = 1, 1
	}
	for _, block := range []int{4 << 10, 16 << 10, 64 << 10, 1 << 20} {
		from, to := rand.Perm(region/block), rand.Perm(region/block)
		for name, f := range map[string]func(d, s []byte){"Copy": func(d, s []byte) { Copy(d, s) }, "copy": func(d, s []byte) { copy(d, s) }} {
			b.Run(fmt.Sprintf("%s/%dKiB", name, block>>10), func(b *testing.B) {
				b.SetBytes(int64(block))
				for i := range b.N {
					s, d := from[i%len(from)]*block, to[i%len(to)]*block
					f(dst[d:d+block], src[s:s+block])
				}
			})
		}
	}
}
