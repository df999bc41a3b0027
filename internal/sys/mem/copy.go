package mem

import (
	"hash/crc32"
	"sync"
)

// copyPiece bounds what runs without a point where the scheduler can stop the goroutine. memmove
// and the checksum's assembly cannot be preempted: a tight loop over them has held the garbage
// collector for seconds. 128 KiB take 10 to 40 us, and the call itself costs nothing beside them.
const copyPiece = 128 << 10

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Copy copies min(len(dst), len(src)) bytes in bounded pieces and returns how many. Every bulk copy
// goes through it.
func Copy(dst, src []byte) int {
	n := min(len(dst), len(src))
	for off := 0; off < n; off += copyPiece {
		end := min(off+copyPiece, n)
		piece(dst[off:end], src[off:end])
	}
	return n
}

// piece is a call, and a call that is not a leaf: its prologue is where a waiting collector stops
// the goroutine.
//
//go:noinline
func piece(dst, src []byte) { move(dst, src) }

// Prefetch asks the processor to bring p into its second-level cache while the caller goes on. It
// is for scattered memory that a system call copies next: the kernel's copy (rep movsb) waits for
// DRAM at the start of each block, a run of prefetches has many lines under way at once. [measured,
// 2 EPYC cores, scattered 16 KiB over one loopback connection, 40 pairs in turns] with it 3.12 GB/s
// and 0.47 CPU s/GB, without 2.83 and 0.51; no difference from 64 KiB on.
func Prefetch(p []byte) {
	for len(p) > 0 {
		n := min(len(p), copyPiece)
		prefetchPiece(p[:n])
		p = p[n:]
	}
}

//go:noinline
func prefetchPiece(p []byte) { prefetch(p) }

// Fill sets every byte of p to c in bounded pieces.
func Fill(p []byte, c byte) {
	for len(p) > 0 {
		n := min(len(p), copyPiece)
		fillPiece(p[:n], c)
		p = p[n:]
	}
}

//go:noinline
func fillPiece(p []byte, c byte) {
	p[0] = c
	for n := 1; n < len(p); n *= 2 {
		copy(p[n:], p[:n])
	}
}

// CRC32C continues the CRC-32C sum crc over p in bounded pieces. Start with 0.
func CRC32C(crc uint32, p []byte) uint32 {
	for len(p) > copyPiece {
		crc = crcPiece(crc, p[:copyPiece])
		p = p[copyPiece:]
	}
	return crcPiece(crc, p)
}

//go:noinline
func crcPiece(crc uint32, p []byte) uint32 { return sum(crc, p) }

// CopyCRC32C copies len(src) bytes and computes their CRC32C in one pass. It reads each byte of src
// once, so the sum is that of the bytes in dst, even if src changes meanwhile.
func CopyCRC32C(crc uint32, dst, src []byte) uint32 {
	dst = dst[:len(src)]
	for len(src) > copyPiece {
		crc = crcCopyPiece(crc, dst[:copyPiece], src[:copyPiece])
		dst, src = dst[copyPiece:], src[copyPiece:]
	}
	return crcCopyPiece(crc, dst, src)
}

//go:noinline
func crcCopyPiece(crc uint32, dst, src []byte) uint32 { return copySum(crc, dst, src) }

// throughs are buffers of copySumThrough, which fit into the first-level cache.
var throughs = sync.Pool{New: func() any { return new([8 << 10]byte) }}

// copySumThrough is copySum for processors without an assembly loop.
func copySumThrough(crc uint32, dst, src []byte) uint32 {
	b := throughs.Get().(*[8 << 10]byte)
	defer throughs.Put(b)
	for len(src) > 0 {
		n := copy(b[:], src)
		crc = sum(crc, b[:n])
		move(dst, b[:n])
		dst, src = dst[n:], src[n:]
	}
	return crc
}
