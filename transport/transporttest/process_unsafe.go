package transporttest

import (
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/mem"
)

// ThroughProc gives a space the same bytes through /proc/self/mem, as of an engine without memfds.
func (m *Memory) ThroughProc(tb testing.TB) {
	tb.Helper()
	fd, err := unix.Open("/proc/self/mem", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		tb.Fatal(err)
	}
	r, err := mem.OpenProcess(mem.NewID(), fd, uint64(uintptr(unsafe.Pointer(&m.bytes[0]))),
		uint64(len(m.bytes)))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(r.Release)
	m.Replace(r)
}
