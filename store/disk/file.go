package disk

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// File is what a device is read and written through. Offsets and lengths are multiples of 4 KiB,
// and buffers are aligned to that. Calls block: reads and writes at the same time come from as many
// goroutines. A file that queues in the kernel (io_uring) can stand behind the same interface.
type File interface {
	// ReadAt fills p, or returns an error.
	ReadAt(p []byte, off int64) error
	// WriteAt writes all of bufs one after another, or returns an error.
	WriteAt(bufs [][]byte, off int64) error
	// Sync returns once everything that was written is durable. After an error nothing is certain
	// of it.
	Sync() error
	Close() error
}

// fileName is what the store calls its file in a directory.
const fileName = "pages.kvspray"

// maxVectors is IOV_MAX of Linux.
const maxVectors = 1024

type osFile struct {
	f      *os.File
	direct bool
}

// openFile opens a path that is a directory, a file, a block device, or nothing yet, and locks it.
// It returns its size; 0: it is new.
func openFile(path string) (f *osFile, size int64, err error) {
	return openLocked(path, os.O_RDWR|os.O_CREATE, unix.LOCK_EX)
}

// openLocked is openFile with other flags and another lock.
func openLocked(path string, flags, lock int) (f *osFile, size int64, err error) {
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		path = filepath.Join(path, fileName)
	}
	flags |= unix.O_CLOEXEC
	direct := true
	h, err := os.OpenFile(path, flags|unix.O_DIRECT, 0o600)
	if errors.Is(err, unix.EINVAL) { // tmpfs before Linux 6.5, and some network file systems
		direct = false
		h, err = os.OpenFile(path, flags, 0o600)
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil, 0, fmt.Errorf("%w; make the directory first", err)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("%w; give this user a path that it can write to", err)
	}
	defer func() {
		if err != nil {
			_ = h.Close()
		}
	}()
	if err := unix.Flock(int(h.Fd()), lock|unix.LOCK_NB); err != nil {
		return nil, 0,
			fmt.Errorf("another process has the store open (%w); give each sidecar a path of "+
				"its own", err)
	}
	if size, err = h.Seek(0, io.SeekEnd); err != nil {
		return nil, 0, err
	}
	return &osFile{h, direct}, size, nil
}

// grow makes a new file as long as it will ever be, so that the disk cannot be full later. It
// returns how long it is then. A device has the size that it has.
func (o *osFile) grow(size, have int64) (int64, error) {
	st, err := o.f.Stat()
	if err != nil {
		return 0, err
	}
	if !st.Mode().IsRegular() {
		return have, nil
	}
	if err := unix.Fallocate(int(o.f.Fd()), 0, 0, size); err != nil {
		_ = o.f.Truncate(0)
		return 0, fmt.Errorf("allocate %d bytes: %w; lower size, or free space", size, err)
	}
	dir, err := os.Open(filepath.Dir(o.f.Name()))
	if err != nil {
		return 0, err
	}
	return size, errors.Join(o.f.Sync(), dir.Sync(), dir.Close())
}

func (o *osFile) ReadAt(p []byte, off int64) error {
	for len(p) > 0 {
		n, err := unix.Pread(int(o.f.Fd()), p, off)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return os.NewSyscallError("pread", err)
		case n == 0:
			return io.ErrUnexpectedEOF
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

func (o *osFile) WriteAt(bufs [][]byte, off int64) error {
	for len(bufs) > 0 {
		n, err := unix.Pwritev(int(o.f.Fd()), bufs[:min(len(bufs), maxVectors)], off)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return os.NewSyscallError("pwritev", err)
		}
		off += int64(n)
		rest := bufs
		for n > 0 && n >= len(rest[0]) {
			n -= len(rest[0])
			rest = rest[1:]
		}
		if n > 0 {
			rest = append([][]byte{rest[0][n:]}, rest[1:]...)
		}
		bufs = rest
	}
	return nil
}

func (o *osFile) Sync() error {
	return os.NewSyscallError("fdatasync", unix.Fdatasync(int(o.f.Fd())))
}

func (o *osFile) Close() error { return o.f.Close() }
