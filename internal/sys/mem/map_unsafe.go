package mem

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hugePage is what x86-64 and arm64 with 4 KiB pages map by one page table entry of the second
// level. Scattered blocks of a cache of many GiB miss the TLB at every 4 KiB otherwise, and in a
// virtual machine each miss walks two page tables.
const hugePage = 2 << 20

// madvCollapse is MADV_COLLAPSE (linux/mman.h, Linux 6.1): huge pages now, also where shmem_enabled
// never reports it.
const madvCollapse = 25

// mapShared maps size bytes of fd, from offset on, where huge pages of the file can be mapped as
// such: at an address that has the same remainder by their size as the offset.
func mapShared(fd int, offset, size uint64, prot, flags int) ([]byte, error) {
	if size < hugePage {
		p, err := unix.MmapPtr(fd, int64(offset), nil, uintptr(size), prot, flags)
		if err != nil {
			return nil, err //nolint:wrapcheck // the caller names the region
		}
		return unsafe.Slice((*byte)(p), size), nil
	}
	span := uintptr(size) + hugePage
	p, err := unix.MmapPtr(-1, 0, nil, span, unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("reserve addresses: %w", err)
	}
	page := uintptr(unix.Getpagesize())
	head := (uintptr(offset) - uintptr(p)) & (hugePage - 1)
	tail := head + (uintptr(size)+page-1)&^(page-1)
	at, err := unix.MmapPtr(fd, int64(offset), unsafe.Add(p, head), uintptr(size), prot,
		flags|unix.MAP_FIXED)
	if err != nil {
		_ = unix.MunmapPtr(p, span) // it was never used
		return nil, err             //nolint:wrapcheck // the caller names the region
	}
	// The rest of the reservation costs nothing but addresses; it goes all the same.
	if head > 0 {
		_ = unix.MunmapPtr(p, head)
	}
	if tail < span {
		_ = unix.MunmapPtr(unsafe.Add(p, tail), span-tail)
	}
	return unsafe.Slice((*byte)(at), size), nil
}

func unmap(b []byte) {
	// fails for a range that is none
	_ = unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)))
}

// populate allocates and maps all pages of b, in huge ones where the kernel has them: one small
// page in each, of which the kernel then makes a whole one, is ten times faster than 512 faults.
// All of it is advice: what fails, or is left when stop is closed, is faulted in later.
func populate(b []byte, stop <-chan struct{}) {
	for len(b) > 0 {
		select {
		case <-stop:
			return
		default:
		}
		n := min(len(b), populatePiece)
		populatePart(b[:n])
		b = b[n:]
	}
}

const populatePiece = 256 << 20 // some tens of milliseconds; a multiple of hugePage

func populatePart(b []byte) {
	if len(b) >= hugePage {
		for off := 0; off+hugePage <= len(b); off += hugePage {
			_ = unix.Madvise(b[off:off+1], unix.MADV_POPULATE_WRITE)
		}
		_ = unix.Madvise(b[:len(b)&^(hugePage-1)], madvCollapse)
	}
	_ = unix.Madvise(b, unix.MADV_POPULATE_WRITE)
}
