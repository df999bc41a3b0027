package board

import (
	"fmt"
	"sync/atomic"
	"unsafe"
)

// word64 returns the atomic word at off. The caller has checked that off is inside mem.
func word64(mem []byte, off uint64) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&mem[off : off+8][0]))
}

// word32 returns the atomic word at off. The caller has checked that off is inside mem.
func word32(mem []byte, off uint64) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&mem[off : off+4][0]))
}

// aligned refuses memory in which a 64-bit word at a multiple of 8 would not be aligned. Mappings
// and Go's own allocations of this size are always aligned; a sub-slice may not be.
func aligned(mem []byte) error {
	if len(mem) == 0 {
		return fmt.Errorf("board: no memory")
	}
	if uintptr(unsafe.Pointer(&mem[0]))%8 != 0 {
		return fmt.Errorf("board: memory starts at an address that is not a multiple of 8; pass a " +
			"whole mapping")
	}
	return nil
}
