package sidecar

import (
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/mem"
)

// folded is a region of this process that maps the same memory several times in a row, and that
// memory.
func folded(t *testing.T, size, times uintptr) (*mem.Region, []byte) {
	t.Helper()
	file, err := mem.NewAnonymous("folded", uint64(size))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(file.Release)
	base, err := unix.MmapPtr(-1, 0, nil, size*times, unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.MunmapPtr(base, size*times) })
	for i := range times {
		if _, err := unix.MmapPtr(file.FD(), 0, unsafe.Add(base, i*size), size,
			unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
			t.Fatal(err)
		}
	}
	fd, err := unix.Open("/proc/self/mem", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	r, err := mem.OpenProcess(mem.NewID(), fd, uint64(uintptr(base)), uint64(size*times))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Release)
	b, _ := file.Bytes()
	return r, b
}
