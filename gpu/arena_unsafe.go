package gpu

import (
	"unsafe"
)

// offsetIn is the offset of p in arena, if all of p is inside.
func offsetIn(arena, p []byte) (uintptr, bool) {
	if len(p) == 0 {
		return 0, false
	}
	base, at := uintptr(unsafe.Pointer(unsafe.SliceData(arena))),
		uintptr(unsafe.Pointer(unsafe.SliceData(p)))
	return at - base, at >= base && at-base+uintptr(len(p)) <= uintptr(len(arena))
}
