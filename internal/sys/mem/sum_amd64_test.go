package mem

import (
	"bytes"
	"hash/crc32"
	"math/rand/v2"
	"testing"
)

// sumWays are the loops of this processor, and Copy and sum apart.
func sumWays() map[string]func(crc uint32, dst, src []byte) uint32 {
	ways := map[string]func(crc uint32, dst, src []byte) uint32{
		"CopyCRC32C": CopyCRC32C,
		"buffer":     copySumThrough,
		"CRC32C": func(crc uint32, dst, src []byte) uint32 {
			Copy(dst, src)
			return CRC32C(crc, src)
		},
	}
	for name, step := range map[string]int{"folding": foldStep, "narrow": narrowStep} {
		if step == foldStep && folding || step == narrowStep && narrow {
			ways[name] = func(crc uint32, dst, src []byte) uint32 {
				return copySumBy(step, crc, dst, src)
			}
		}
	}
	return ways
}

func randomBytes(n int) []byte {
	rng := rand.New(rand.NewPCG(3, 4))
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(rng.Uint32())
	}
	return p
}

// compareSum copies n bytes between two offsets, and compares content, sum and what is beside it.
func compareSum(t *testing.T, name string, way func(uint32, []byte, []byte) uint32, crc uint32,
	to, dst, src []byte) {
	t.Helper()
	for i := range to {
		to[i] = 0xa5
	}
	want, got := crc32.Update(crc, castagnoli, src), way(crc, dst, src)
	if got != want {
		t.Fatalf("%s: sum of %d bytes after %08x: %08x, want %08x", name, len(src), crc, got, want)
	}
	if !bytes.Equal(dst[:len(src)], src) {
		t.Fatalf("%s: %d bytes: content differs", name, len(src))
	}
	if n := bytes.Count(to, []byte{0xa5}) - bytes.Count(src, []byte{0xa5}); n != len(to)-len(src) {
		t.Fatalf("%s: %d bytes: a byte beside them changed", name, len(src))
	}
}

// Every length, and every alignment of both sides, has the content and the sum of two passes.
func TestCopySumLengths(t *testing.T) {
	src, to := randomBytes(20<<10), make([]byte, 20<<10)
	for name, way := range sumWays() {
		for n := range streamMin + 5*foldStep {
			s, d := n*7%64, n*13%64
			compareSum(t, name, way, uint32(n)*0x9e3779b9, to[:d+n+64], to[d:d+n], src[s:s+n])
		}
		for s := range 64 {
			for d := range 64 {
				n := 4000 + s*d%600
				compareSum(t, name, way, 0, to[:d+n+64], to[d:d+n], src[s:s+n])
			}
		}
	}
}

// Pieces longer than those without a point where the scheduler can stop join, too.
func TestCopySumLong(t *testing.T) {
	src, to := randomBytes(3*copyPiece), make([]byte, 3*copyPiece+200)
	for name, way := range sumWays() {
		for _, n := range []int{copyPiece - 1, copyPiece, copyPiece + 1, 2 * copyPiece,
			len(src)} {
			for _, d := range []int{0, 1, 63} {
				compareSum(t, name, way, 1, to, to[d:d+n], src[:n])
			}
		}
	}
}

// One changed bit anywhere gives another sum.
func TestSumFindsChange(t *testing.T) {
	src, dst := randomBytes(streamMin+5*foldStep+100), make([]byte, streamMin+5*foldStep+100)
	for name, way := range sumWays() {
		right := way(0, dst, src)
		for i := range src {
			src[i] ^= 1 << (i & 7)
			if way(0, dst, src) == right {
				t.Fatalf("%s: a change of byte %d of %d is not found", name, i, len(src))
			}
			src[i] ^= 1 << (i & 7)
		}
	}
}

// The sum is that of what was stored where the source changes meanwhile: the copy itself changes
// the part of its source that it has not read.
func TestCopySumReadsOnce(t *testing.T) {
	for name, way := range sumWays() {
		if name == "CRC32C" { // two passes
			continue
		}
		for _, shift := range []int{8, 64, 1000, 2048, 4096} {
			p := randomBytes(100 << 10)
			src, dst := p[:len(p)-shift], p[shift:]
			if got, want := way(0, dst, src), crc32.Checksum(dst, castagnoli); got != want {
				t.Errorf("%s, shifted by %d: sum %08x, the content's is %08x", name, shift, got, want)
			}
		}
	}
}

func FuzzCopySum(f *testing.F) {
	f.Add([]byte("a page"), uint32(0), uint8(0), uint8(0), uint16(0))
	f.Add(randomBytes(300), uint32(7), uint8(1), uint8(63), uint16(40))
	f.Fuzz(func(t *testing.T, seed []byte, crc uint32, s, d uint8, repeat uint16) {
		src := bytes.Repeat(seed, 1+int(repeat)%(1+(256<<10)/(1+len(seed))))
		src = src[min(int(s), len(src)):]
		to := make([]byte, int(d)+len(src)+64)
		for name, way := range sumWays() {
			compareSum(t, name, way, crc, to, to[d:][:len(src)], src)
		}
	})
}
