//go:build amd64

package mem

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// streamAVX2 is in stream_amd64.s: n is a multiple of 256, dst is aligned to 32.
//
//go:noescape
func streamAVX2(dst, src *byte, n uintptr)

// repMove is in stream_amd64.s.
//
//go:noescape
func repMove(dst, src *byte, n uintptr)

// streamMin is where anything but the runtime's copy begins to pay. The destination of a transfer
// is not in this core's cache and will be read by another, and an ordinary store first fetches the
// line that it is about to overwrite. [measured, Xeon, scattered 16 KiB, GB/s on 1 and 4 threads]
// streaming stores 6.8 and 29.9, the runtime's copy 4.9 and 23.2, C memcpy 7.4 and 25.4. Other
// processors differ: ChooseCopies.
const streamMin = 2 << 10

func usable(r routine) bool {
	switch r {
	case streaming:
		return cpu.X86.HasAVX2
	case repeated:
		return cpu.X86.HasERMS
	default:
		return true
	}
}

// move is copy for pieces that are not read soon.
func move(dst, src []byte) { moveBy(routineFor(min(len(dst), len(src))), dst, src) }

func moveBy(r routine, dst, src []byte) {
	n := min(len(dst), len(src))
	if n < streamMin || r == ordinary || !usable(r) {
		copy(dst, src)
		return
	}
	if r == repeated {
		repMove(&dst[0], &src[0], uintptr(n))
		return
	}
	head := int(-uintptr(unsafe.Pointer(&dst[0])) & 31)
	copy(dst[:head], src[:head])
	body := (n - head) &^ 255
	streamAVX2(&dst[head], &src[head], uintptr(body))
	copy(dst[head+body:n], src[head+body:n])
}

// prefetchLines is in stream_amd64.s.
//
//go:noescape
func prefetchLines(p *byte, n uintptr)

func prefetch(p []byte) { prefetchLines(unsafe.SliceData(p), uintptr(len(p))) }

// flushLines is in stream_amd64.s.
//
//go:noescape
func flushLines(p *byte, n uintptr)

// flush takes p out of all caches.
func flush(p []byte) { flushLines(unsafe.SliceData(p), uintptr(len(p))) }
