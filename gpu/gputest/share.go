package gputest

import (
	"testing"

	"golang.org/x/sys/unix"
)

// SharedBytes is the size of the file that Share makes.
const SharedBytes = 256 << 20

// Share puts all later allocations into a file, which another process can map. The next address
// stands for its first byte.
func (m *Machine) Share(t testing.TB) (fd int) {
	fd = Must(unix.MemfdCreate("gpu", unix.MFD_CLOEXEC))(t)
	Must(0, unix.Ftruncate(fd, SharedBytes))(t)
	m.shared = Must(unix.Mmap(fd, 0, SharedBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED))(t)
	t.Cleanup(func() {
		Must(0, unix.Munmap(m.shared))(t)
		Must(0, unix.Close(fd))(t)
	})
	return fd
}
