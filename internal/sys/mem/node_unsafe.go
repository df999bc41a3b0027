package mem

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Of get_mempolicy (linux/mempolicy.h): the node on which the page of an address is.
const (
	mpolFNode = 1
	mpolFAddr = 2
)

// Node is the NUMA node on which the first page of the region is; -1 where that is unknown:
// memory of a device or of another address space, or a kernel without NUMA.
func (r *Region) Node() int {
	b, ok := r.Bytes()
	if !ok || len(b) == 0 {
		return -1
	}
	var node int32
	if _, _, e := unix.Syscall6(unix.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&node)), 0, 0,
		uintptr(unsafe.Pointer(&b[0])), mpolFNode|mpolFAddr, 0); e != 0 {
		return -1
	}
	return int(node)
}
