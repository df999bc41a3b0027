package gputest

import (
	"testing"

	"golang.org/x/sys/unix"
)

// The library's own thread (pybind/src/work.c), in a process of its own and on a driver without a GPU, against this package: the memory
// between the two, and who may touch what when, in C on one side and in Go on the other. The GPU's memory is a file that both map.
const SharedBytes = 256 << 20

// share puts what is allocated from now on into a file, whose bytes stand for the addresses from the next one on.
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
