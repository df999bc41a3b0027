package segments

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/sidecar/internal/local"
	"github.com/kvspray/kvspray/sidecar/internal/plans"
)

// Bytes and system calls of a batch with a file.
const (
	directAlign = 4096    // of offsets, lengths and memory for O_DIRECT
	directBytes = 1 << 20 // of a call with O_DIRECT; smaller ones are faster through the page cache
	callBytes   = 4 << 20 // of one system call
	fileCalls   = 4       // at the same time
)

// fileID names a file, whatever its path.
type fileID struct{ dev, ino uint64 }

// file is what a segment of a file has open. Peers never touch it: their bytes go through the
// staging memory, and this process reads the file before the lease, or writes it after the fence.
type file struct {
	id     fileID
	plain  *os.File
	direct *os.File // with O_DIRECT; nil: the file system has none
}

// openRoot opens segments.root; "": no files.
func openRoot(path string) (*os.File, error) {
	if path == "" {
		return nil, nil
	}
	root, err := os.OpenFile(path, unix.O_DIRECTORY|unix.O_PATH, 0)
	if err != nil {
		return nil, fmt.Errorf("segments.root %w; make the directory", err)
	}
	return root, nil
}

// openFile opens a file below the root for a segment, and sets the segment's length.
func (s *Segments) openFile(x *connector.Segment) (*file, error) {
	refuse := func(problem, remedy string) (*file, error) {
		return nil, &msg.Error{Message: "SEGMENT", Field: "path",
			Problem: fmt.Sprintf("%q %s", x.Path, problem), Remedy: remedy}
	}
	if s.root == nil {
		return refuse("is a file, and this sidecar has no directory for files", "set segments.root")
	}
	flags := unix.O_RDONLY
	for _, g := range x.Grants {
		if g.Write {
			flags = unix.O_RDWR
		}
	}
	// O_NONBLOCK: a FIFO without a writer would block.
	fd, err := unix.Openat2(int(s.root.Fd()), x.Path, &unix.OpenHow{
		Flags: uint64(flags | unix.O_CLOEXEC | unix.O_NONBLOCK | unix.O_NOCTTY),
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS |
			unix.RESOLVE_NO_MAGICLINKS})
	switch {
	case errors.Is(err, unix.EXDEV):
		return refuse("leaves segments.root", "name a file below it, by a relative path")
	case errors.Is(err, unix.ELOOP):
		return refuse("has a symbolic link", "name the file itself, or register the link's target")
	case err != nil:
		return refuse("is not opened: "+err.Error(),
			"name a file below segments.root that the sidecar's user may open")
	}
	f := &file{plain: os.NewFile(uintptr(fd), "segment")}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		_ = f.Close()
		return refuse("is no regular file", "name one")
	}
	f.id = fileID{st.Dev, st.Ino}
	size := uint64(st.Size)
	if x.Len == 0 && x.Off < size {
		x.Len = size - x.Off
	}
	if x.Len == 0 || x.Off > size || x.Len > size-x.Off {
		_ = f.Close()
		return nil, &msg.Error{Message: "SEGMENT", Field: "bytes", Problem: fmt.Sprintf("%d bytes from "+
			"%d on are outside of a file of %d", x.Len, x.Off, size),
			Remedy: "name a range of the file, which has its size before it is registered"}
	}
	// By the descriptor, so that it is the same file.
	direct, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), flags|unix.O_DIRECT, 0)
	if err == nil {
		f.direct = direct
	}
	return f, nil
}

// Close implements io.Closer.
func (f *file) Close() error {
	err := f.plain.Close()
	if f.direct != nil {
		err = errors.Join(err, f.direct.Close())
	}
	return err
}

// covers refuses runs behind the end of the file, which was longer when it was registered.
func (f *file) covers(runs []plans.Run) error {
	st, err := f.plain.Stat()
	if err != nil {
		return fileError("stat", err)
	}
	size := uint64(st.Size())
	for i := range runs {
		r := &runs[i]
		if end, ok := last(r.Off, r.Len, r.Stride, r.Count); !ok || end > size {
			return entryError(i, "remote", fmt.Sprintf("ends at byte %d of the file, which has shrunk to %d",
				end, size), "let the owner register the file again")
		}
	}
	return nil
}

// fileError is an error of the file system without the path, which is not for peers.
func fileError(what string, err error) error {
	var at *os.PathError
	if errors.As(err, &at) {
		err = at.Err
	}
	return fmt.Errorf("the file of the segment: %s: %w", what, err)
}

// call is one system call: n bytes of a file at off, and at `at` in the staging memory.
type call struct {
	off, at, n uint64
	direct     bool
}

// stage places runs of a file in staging memory of `total` bytes. Runs that are aligned in the file
// are aligned there, for O_DIRECT.
func (f *file) stage(runs []plans.Run) (staged []plans.Run, calls []call, total uint64, err error) {
	staged = make([]plans.Run, len(runs))
	for i := range runs {
		r := &runs[i]
		direct := f.direct != nil && (r.Off|r.Len)%directAlign == 0 &&
			(r.Count == 1 || r.Stride%directAlign == 0)
		if direct {
			total = (total + directAlign - 1) / directAlign * directAlign
		}
		high, n := bits.Mul64(r.Len, uint64(r.Count))
		if high != 0 || n > maxStaged || total+n > maxStaged {
			return nil, nil, 0, refused("entries", fmt.Sprintf("more than %d bytes up to entry %d",
				maxStaged, i), "split the batch: this is the limit of one with a file")
		}
		staged[i] = plans.Run{Off: total, Len: r.Len, Stride: r.Len, Count: r.Count}
		for k := range uint64(r.Count) {
			calls = addCalls(calls, call{r.Off + k*r.Stride, total + k*r.Len, r.Len, direct})
		}
		total += n
	}
	for i := range calls {
		calls[i].direct = calls[i].direct && calls[i].n >= directBytes
	}
	return staged, calls, total, nil
}

// addCalls joins a call with the last one, or splits it.
func addCalls(all []call, c call) []call {
	if len(all) > 0 {
		l := &all[len(all)-1]
		if l.direct == c.direct && l.off+l.n == c.off && l.at+l.n == c.at && l.n+c.n <= callBytes {
			l.n += c.n
			return all
		}
	}
	for c.n > callBytes {
		all = append(all, call{c.off, c.at, callBytes, c.direct})
		c.off, c.at, c.n = c.off+callBytes, c.at+callBytes, c.n-callBytes
	}
	return append(all, c)
}

// do performs calls with the staging memory, some at a time, until ctx ends. After an error any
// part of them may have happened, and none happens later.
func (f *file) do(ctx context.Context, calls []call, memory []byte, write bool) error {
	var next atomic.Int64
	var failed atomic.Pointer[error]
	work := func() {
		for failed.Load() == nil {
			i := int(next.Add(1)) - 1
			if i >= len(calls) {
				return
			}
			err := context.Cause(ctx)
			if err == nil {
				err = f.one(&calls[i], memory, write)
			}
			if err != nil {
				failed.CompareAndSwap(nil, &err)
			}
		}
	}
	var wg sync.WaitGroup
	for range min(fileCalls, len(calls)) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

func (f *file) one(c *call, memory []byte, write bool) error {
	what, move := "read", (*os.File).ReadAt
	if write {
		what, move = "write", (*os.File).WriteAt
	}
	p := memory[c.at : c.at+c.n]
	n, err := 0, error(unix.EINVAL)
	if c.direct {
		n, err = move(f.direct, p, int64(c.off))
	}
	if errors.Is(err, unix.EINVAL) { // also where a disk needs more than directAlign
		n, err = move(f.plain, p, int64(c.off))
	}
	switch {
	case errors.Is(err, io.EOF):
		return fmt.Errorf("the file of the segment has shrunk to %d bytes", c.off+uint64(n))
	case err != nil:
		return fileError(what, err)
	}
	return nil
}

// durable returns once what was written is on the disk.
func (f *file) durable() error {
	rc, err := f.plain.SyscallConn()
	if err != nil {
		return fileError("fdatasync", err)
	}
	var opErr error
	if err := errors.Join(rc.Control(func(fd uintptr) { opErr = unix.Fdatasync(int(fd)) }),
		opErr); err != nil {
		return fileError("fdatasync", err)
	}
	return nil
}

// lendFile is lend for a segment of a file: the lease is one on staging memory.
func (s *Segments) lendFile(r *remote, runs []plans.Run) (end ended, err error) {
	f := r.seg.file
	staged, calls, total, err := f.stage(runs)
	if err != nil {
		return refusal(err), nil
	}
	if err := f.covers(runs); err != nil {
		return refusal(err), nil
	}
	room, err := s.staging.take(r.ctx, total, r.id.from, r.m.Wait)
	if err != nil {
		return refusal(err), nil
	}
	memory := s.staging.place(room, staged)
	if !r.m.Write {
		if err := f.do(r.ctx, calls, memory, false); err != nil {
			s.staging.give(room)
			return refusal(err), nil
		}
	}
	if end, err = s.lend(r, staged); err != nil {
		return end, err // the room is that of a lease that is perhaps not fenced
	}
	defer s.staging.give(room)
	if !r.m.Write {
		return end, nil
	}
	end.arrived = nil // in the staging memory
	if end.Status != engines.StatusOK {
		return end, nil
	}
	if err := f.covers(runs); err != nil { // a write would make it longer again
		return refusal(err), nil
	}
	err = f.do(r.ctx, calls, memory, true)
	if err == nil && r.m.Durable {
		err = f.durable()
	}
	if err != nil {
		end.Status, end.Reason, end.Bytes = local.Status(err), err.Error(), 0
	}
	return end, nil
}
