package mem

import (
	"fmt"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/invariants"
)

// File is an open file that regions lie in: a memfd, or another process's memory. The last
// reference closes its descriptor. An engine has more regions than a process may have descriptors.
type File struct {
	fd   int
	refs atomic.Int64
}

// NewFile takes ownership of fd. The caller has the first reference.
func NewFile(fd int) *File {
	f := &File{fd: fd}
	f.refs.Store(1)
	return f
}

// FD is the descriptor. It stays the file's.
func (f *File) FD() int { return f.fd }

// Release gives a reference back.
func (f *File) Release() {
	if f.refs.Add(-1) > 0 {
		return
	}
	if err := unix.Close(f.fd); err != nil && invariants.Enabled {
		panic(os.NewSyscallError(fmt.Sprintf("mem: close of file descriptor %d", f.fd), err))
	}
}

// hold makes f the file of a new region, which has its first reference.
func (f *File) hold(r *Region) *Region {
	f.refs.Add(1)
	r.file = f
	r.refs.Store(1)
	return r
}
