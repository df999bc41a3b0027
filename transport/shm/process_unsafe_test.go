package shm

import (
	"os"
	"syscall"
	"testing"
	"unsafe"

	"github.com/kvspray/kvspray/internal/sys/mem"
)

// processRegion is memory of this process reached through /proc, as an engine without memfds would
// lend it.
func processRegion(t *testing.T) *mem.Region {
	p, err := syscall.Mmap(-1, 0, 1<<20, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Munmap(p) })
	f, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := syscall.Dup(int(f.Fd()))
	_ = f.Close()
	if err != nil {
		t.Fatal(err)
	}
	r, err := mem.OpenProcess(mem.NewID(), fd, uint64(uintptr(unsafe.Pointer(&p[0]))), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Release)
	return r
}
