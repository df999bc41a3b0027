//go:build amd64

package mem

import (
	"hash/crc32"
	"unsafe"

	"golang.org/x/sys/cpu"
)

// These are in sum_amd64.s. A register is the complement of a sum.

//go:noescape
func foldSum(crc uint32, k *[4]uint64, p *byte, n uintptr) uint32

//go:noescape
func foldCopy(crc uint32, k *[4]uint64, dst, src *byte, n uintptr) uint32

//go:noescape
func thirdsCopy(crc uint32, k *[2]uint64, dst, src *byte, n uintptr) uint32

//go:noescape
func wordsCopy(crc uint32, dst, src *byte, n uintptr) uint32

// Bytes that a loop takes at a time.
const (
	foldStep   = 256
	third      = 1024
	thirdsStep = 3 * third
)

var (
	// Skylake has no wide multiplication, Zen before its fourth generation no AVX-512.
	folding = cpu.X86.HasAVX512F && cpu.X86.HasAVX512VPCLMULQDQ && cpu.X86.HasSSE42
	thirds  = cpu.X86.HasPCLMULQDQ && cpu.X86.HasSSE42

	// Factors that move the low and the high half of 16 bytes by a step, and by the 64 bytes of one
	// register. Their product with 64 bits counts one bit too few.
	foldFactors = [4]uint64{power(8*foldStep+63) << 32, power(8*foldStep-1) << 32,
		power(8*64+63) << 32, power(8*64-1) << 32}
	// Factors that move the sums of the first two thirds to the end of the last one. CRC32Q moves
	// their products by 32 bits.
	thirdsFactors = [2]uint64{power(8*2*third - 33), power(8*third - 33)}
)

// power is x^n modulo the polynomial of CRC-32C, the highest power in the lowest bit.
func power(n int) uint64 {
	p := uint32(1 << 31)
	for range n {
		p = p>>1 ^ -(p&1)&crc32.Castagnoli
	}
	return uint64(p)
}

// sum continues a sum. Folding takes 64 bytes a cycle, the crc32 instruction 8.
func sum(crc uint32, p []byte) uint32 {
	if body := len(p) &^ (foldStep - 1); folding && body > 0 {
		crc = ^foldSum(^crc, &foldFactors, &p[0], uintptr(body))
		p = p[body:]
	}
	return crc32.Update(crc, castagnoli, p)
}

func copySum(crc uint32, dst, src []byte) uint32 {
	switch {
	case folding:
		return copySumBy(foldStep, crc, dst, src)
	case thirds:
		return copySumBy(thirdsStep, crc, dst, src)
	}
	return copySumThrough(crc, dst, src)
}

// copySumBy copies by the loop with a step.
func copySumBy(step int, crc uint32, dst, src []byte) uint32 {
	n := len(src)
	to, from := unsafe.SliceData(dst[:n]), unsafe.SliceData(src)
	crc = ^crc
	if n >= streamMin {
		head := -uintptr(unsafe.Pointer(to)) & 63
		crc = wordsCopy(crc, to, from, head)
		dst, src = dst[head:], src[head:]
		to, from = &dst[0], &src[0]
		body := uintptr(len(src) - len(src)%step)
		switch {
		case body == 0:
		case step == foldStep:
			crc = foldCopy(crc, &foldFactors, to, from, body)
		default:
			crc = thirdsCopy(crc, &thirdsFactors, to, from, body)
		}
		dst, src = dst[body:], src[body:]
		to, from, n = unsafe.SliceData(dst), unsafe.SliceData(src), len(src)
	}
	return ^wordsCopy(crc, to, from, uintptr(n))
}
