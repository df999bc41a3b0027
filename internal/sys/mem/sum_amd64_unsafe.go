//go:build amd64

package mem

import (
	"hash/crc32"
	"unsafe"

	"golang.org/x/sys/cpu"
)

// These functions are in sum_amd64.s. Their crc is the CRC register, the complement of a sum.

//go:noescape
func foldSum(crc uint32, k *[4]uint64, p *byte, n uintptr) uint32

//go:noescape
func foldCopy(crc uint32, k *[4]uint64, dst, src *byte, n uintptr) uint32

//go:noescape
func narrowCopy(crc uint32, k *[4]uint64, dst, src *byte, n uintptr) uint32

//go:noescape
func wordsCopy(crc uint32, dst, src *byte, n uintptr) uint32

// Bytes of one iteration of a loop, and of one of its vector registers.
const (
	foldStep   = 256
	foldWide   = 64
	narrowStep = 128
	narrowWide = 16
)

var (
	// Intel processors since Ice Lake and AMD processors since Zen 4 have these.
	folding = cpu.X86.HasAVX512F && cpu.X86.HasAVX512VPCLMULQDQ && cpu.X86.HasSSE42
	narrow  = cpu.X86.HasAVX && cpu.X86.HasPCLMULQDQ && cpu.X86.HasSSE42

	foldFactors   = factors(foldStep, foldWide)
	narrowFactors = factors(narrowStep, narrowWide)
)

// factors are the powers of x that move the low and the high half of 16 bytes by a step, and by one
// vector register. The exponents compensate the carry-less product, which has 127 bits, not 128.
func factors(step, wide int) [4]uint64 {
	return [4]uint64{power(8*step+63) << 32, power(8*step-1) << 32, power(8*wide+63) << 32,
		power(8*wide-1) << 32}
}

// power is x^n modulo the polynomial of CRC-32C, with the highest power in the lowest bit.
func power(n int) uint64 {
	p := uint32(1 << 31)
	for range n {
		p = p>>1 ^ -(p&1)&crc32.Castagnoli
	}
	return uint64(p)
}

// sum continues a sum. Folding processes 64 bytes in a cycle, the crc32 instruction 8.
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
	case narrow:
		return copySumBy(narrowStep, crc, dst, src)
	}
	return copySumThrough(crc, dst, src)
}

// copySumBy copies with the loop whose step is given.
func copySumBy(step int, crc uint32, dst, src []byte) uint32 {
	n := len(src)
	to, from := unsafe.SliceData(dst[:n]), unsafe.SliceData(src)
	crc = ^crc
	if n >= streamMin {
		head := -uintptr(unsafe.Pointer(to)) & 63
		crc = wordsCopy(crc, to, from, head)
		dst, src = dst[head:], src[head:]
		to, from = &dst[0], &src[0]
		body := uintptr(len(src) &^ (step - 1)) // not 0
		if step == foldStep {
			crc = foldCopy(crc, &foldFactors, to, from, body)
		} else {
			crc = narrowCopy(crc, &narrowFactors, to, from, body)
		}
		dst, src = dst[body:], src[body:]
		to, from, n = unsafe.SliceData(dst), unsafe.SliceData(src), len(src)
	}
	return ^wordsCopy(crc, to, from, uintptr(n))
}
