// Package mem owns the memory that engines lend to the sidecar: mapped memfds, memory
// of a GPU behind its Device and, where nothing can be shared, another process's memory behind an
// open /proc/PID/mem descriptor.
//
// Invariants: a Region's id is random and never reused; its bytes stay mapped while any reference
// is held; a memfd is mapped only after its seals and its file system prove that no access can
// fault, whatever its owner does to it; copies go through Copy, whose bounded pieces let the
// garbage collector stop the goroutine in between. The package starts no goroutine.
package mem

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/invariants"
	"github.com/kvspray/kvspray/internal/sys/limits"
)

// MaxRegionBytes bounds one region: 64 TiB. A larger size is a corrupt message, not a cache.
const MaxRegionBytes = 64 << 40

// maxAddress bounds process regions: file offsets are signed.
const maxAddress = 1<<63 - 1

// needSeals keep the size of a memfd: its mapping can then not fault for lack of a file behind it.
const needSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW

// Errors that callers distinguish.
var (
	ErrUnsealed = errors.New("memfd is not sealed against shrinking and growing")
	ErrHugePool = errors.New("memfd is not on tmpfs: its pages come from a pool that can be empty")
	ErrReadOnly = errors.New("region is another's, and mapped for reading only")
	ErrBounds   = errors.New("out of the region's bounds")
	ErrFreed    = errors.New("region is freed")
)

// ID names a region across the node. Random, never reused.
type ID [16]byte

func (id ID) String() string { return hex.EncodeToString(id[:]) }

// NewID returns a random id.
func NewID() ID {
	var id ID
	_, _ = rand.Read(id[:]) // never fails: crypto/rand aborts the process instead
	return id
}

// Kind is how the bytes of a region are reached.
type Kind uint8

// The kinds of a region, best first.
const (
	KindMemfd Kind = iota + 1 // a sealed memfd that the engine allocated its cache in; mapped
	// another process's memory through its own /proc/self/mem descriptor; syscalls only.
	KindProcess
	KindDevice // memory of a GPU, through its Device only
	KindLent   // a buffer of a Device; mapped
)

func (k Kind) String() string {
	switch k {
	case KindMemfd:
		return "memfd"
	case KindProcess:
		return "process"
	case KindDevice:
		return "device"
	case KindLent:
		return "lent"
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Block is a contiguous piece of a region: what a transport reads or writes.
type Block struct {
	Region *Region
	Off    uint64 // bytes from the start of the region
	Len    uint64 // bytes
}

// Bytes returns the block's memory if its region is mapped. The caller holds a reference, or a
// guard that outlives it.
func (b Block) Bytes() ([]byte, bool) {
	p, ok := b.Region.Bytes()
	if !ok || b.Region.check(b.Off, b.Len) != nil {
		return nil, false
	}
	return p[b.Off : b.Off+b.Len : b.Off+b.Len], true
}

// Region is one range of lent memory. Methods are safe for concurrent use while a reference is
// held.
type Region struct {
	id     ID
	kind   Kind
	size   uint64
	base   uint64 // KindProcess: address in the owner; KindDevice: for the Device
	offset uint64 // of a mapped one, in its file
	file   *File  // nil: none
	bytes  []byte // nil where nothing is mapped
	reads  bool   // and they may be read only
	refs   atomic.Int64

	// KindDevice only.
	device Device
	handle []byte
	free   func() // also KindLent
}

type options struct {
	populate bool
	stop     <-chan struct{} // ends populating
	present  bool
	reads    bool
}

// Option changes how a region is mapped.
type Option func(*options)

// Populate allocates all pages at once, so that the first transfer does not pay for it; in huge
// pages where the kernel has them.
func Populate() Option { return PopulateUntil(nil) }

// PopulateUntil is Populate, which ends early once stop is closed: the pages that are left are
// allocated when they are used.
func PopulateUntil(stop <-chan struct{}) Option {
	return func(o *options) { o.populate, o.stop = true, stop }
}

// PopulatePresent maps all pages at once if the file has them all already, as an engine's own has:
// a transfer pays for no page fault then. A file with holes is mapped as it is, or the code that
// announces a huge empty one would take all the memory.
func PopulatePresent() Option { return func(o *options) { o.present = true } }

// ReadOnly maps memory that only its owner may write: WriteAt refuses, and a store through Bytes is
// a fault.
func ReadOnly() Option { return func(o *options) { o.reads = true } }

// MapMemfd maps the first size bytes of a sealed memfd, as File.Map does. On success the region
// owns fd; on an error it stays the caller's.
func MapMemfd(id ID, fd int, size uint64, opts ...Option) (*Region, error) {
	return owned(fd, func(f *File) (*Region, error) { return f.Map(id, 0, size, opts...) })
}

// owned makes a region that alone has fd.
func owned(fd int, of func(*File) (*Region, error)) (*Region, error) {
	f := NewFile(fd)
	r, err := of(f)
	if err != nil {
		return nil, err
	}
	f.Release()
	return r, nil
}

// Map maps size bytes of a sealed memfd from offset on, shared and writable unless ReadOnly is
// given. The memfd must carry F_SEAL_SHRINK and F_SEAL_GROW, and lie on tmpfs: a truncation, or a
// hole in memory of a pool, would otherwise kill this process with SIGBUS.
func (f *File) Map(id ID, offset, size uint64, opts ...Option) (*Region, error) {
	fd := f.fd
	var o options
	for _, f := range opts {
		f(&o)
	}
	if size == 0 || size > MaxRegionBytes {
		return nil, fmt.Errorf("mem: map region %s: size %d: must be 1 to %d bytes", id, size,
			uint64(MaxRegionBytes))
	}
	if page := uint64(unix.Getpagesize()); offset%page != 0 || offset > MaxRegionBytes {
		return nil, fmt.Errorf("mem: map region %s: offset %d: must be a multiple of %d, at most %d", id,
			offset, page, uint64(MaxRegionBytes))
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("mem: map region %s: fstat descriptor %d: %w", id, fd, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, fmt.Errorf("mem: map region %s: descriptor %d has mode %#o: not a memfd; pass one "+
			"made by memfd_create", id, fd, st.Mode)
	}
	// No seal forbids its owner to punch holes. On tmpfs the kernel fills them again with zeros; on
	// hugetlbfs an access to a hole is a SIGBUS while the pool of huge pages is empty.
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return nil, fmt.Errorf("mem: map region %s: fstatfs descriptor %d: %w", id, fd, err)
	}
	if fs.Type != unix.TMPFS_MAGIC {
		return nil, fmt.Errorf("mem: map region %s: %w (file system %#x); create it without "+
			"MFD_HUGETLB, or pass the memory as a region of kind process", id, ErrHugePool, fs.Type)
	}
	if st.Size < 0 || uint64(st.Size) < offset+size {
		return nil, fmt.Errorf("mem: map region %s: memfd has %d bytes, %d were announced: announce "+
			"what was allocated", id, st.Size, offset+size)
	}
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("mem: map region %s: seals of descriptor %d: %w; create it with "+
			"memfd_create(MFD_ALLOW_SEALING)", id, fd, err)
	}
	if seals&needSeals != needSeals {
		return nil, fmt.Errorf("mem: map region %s: %w (seals %#x); add F_SEAL_SHRINK|F_SEAL_GROW "+
			"before passing it on", id, ErrUnsealed, seals)
	}
	if !o.reads && seals&(unix.F_SEAL_WRITE|unix.F_SEAL_FUTURE_WRITE) != 0 {
		return nil, fmt.Errorf("mem: map region %s: sealed against writing (seals %#x); received "+
			"blocks could not land in it", id, seals)
	}
	flags, prot := unix.MAP_SHARED, unix.PROT_READ|unix.PROT_WRITE
	if o.reads {
		prot = unix.PROT_READ
	}
	if o.present && uint64(st.Blocks)*512 >= uint64(st.Size) {
		flags |= unix.MAP_POPULATE
	}
	b, err := mapShared(fd, offset, size, prot, flags)
	if err != nil {
		return nil, fmt.Errorf("mem: map region %s: mmap %d bytes: %w", id, size, limits.Remedy(err))
	}
	if o.populate {
		populate(b, o.stop)
	}
	return f.hold(&Region{id: id, kind: KindMemfd, size: size, offset: offset, bytes: b,
		reads: o.reads}), nil
}

// OpenProcess makes a region of size bytes at address base of the process whose /proc/self/mem it
// opened itself and passed as fd: that descriptor stays bound to that memory, whatever becomes of
// the pid. Reached by preadv and pwritev only. On success the region owns fd.
func OpenProcess(id ID, fd int, base, size uint64) (*Region, error) {
	return owned(fd, func(f *File) (*Region, error) { return f.Process(id, base, size) })
}

// Process is OpenProcess for a descriptor that several regions share.
func (f *File) Process(id ID, base, size uint64) (*Region, error) {
	fd := f.fd
	if size == 0 || size > MaxRegionBytes || base == 0 || base > maxAddress-size {
		return nil, fmt.Errorf("mem: process region %s: base %#x, size %d: not a range of user memory",
			id, base, size)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return nil, fmt.Errorf("mem: process region %s: fstatfs descriptor %d: %w", id, fd, err)
	}
	if fs.Type != unix.PROC_SUPER_MAGIC {
		return nil, fmt.Errorf("mem: process region %s: descriptor %d is not on procfs; open "+
			"/proc/self/mem read-write and pass that", id, fd)
	}
	fl, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return nil, fmt.Errorf("mem: process region %s: flags of descriptor %d: %w", id, fd, err)
	}
	if fl&unix.O_ACCMODE != unix.O_RDWR {
		return nil, fmt.Errorf("mem: process region %s: descriptor %d is not open for reading and "+
			"writing; open it O_RDWR", id, fd)
	}
	r := f.hold(&Region{id: id, kind: KindProcess, size: size, base: base})
	var probe [1]byte
	for _, off := range []uint64{0, size - 1} {
		if err := r.ReadAt(probe[:], off); err != nil {
			r.Release()
			return nil, fmt.Errorf("mem: process region %s: cannot read address %#x: %w", id, base+off, err)
		}
	}
	return r, nil
}

// NewAnonymous makes a sealed memfd of size bytes and maps it: memory of our own, for tests and
// benchmarks, that can be passed on like an engine's.
func NewAnonymous(name string, size uint64, opts ...Option) (*Region, error) {
	if size == 0 || size > MaxRegionBytes {
		return nil, fmt.Errorf("mem: new region %q: size %d: must be 1 to %d bytes", name, size,
			uint64(MaxRegionBytes))
	}
	fd, err := unix.MemfdCreate("kvspray-"+name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("mem: new region %q: memfd_create: %w", name, limits.Remedy(err))
	}
	fail := func(op string, err error) (*Region, error) {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("mem: new region %q: %s: %w", name, op, limits.Remedy(err))
	}
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return fail("ftruncate", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS,
		unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return fail("seal", err)
	}
	r, err := MapMemfd(NewID(), fd, size, opts...)
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return r, nil
}

// ID names the region.
func (r *Region) ID() ID { return r.id }

// Kind reports how its bytes are reached.
func (r *Region) Kind() Kind { return r.kind }

// Size is its length in bytes.
func (r *Region) Size() uint64 { return r.size }

// Base is the address in the owner's process (KindProcess) or for the Device (KindDevice); 0 for
// mapped memory.
func (r *Region) Base() uint64 { return r.base }

// FD is the descriptor behind the region, for passing on; -1 where there is none. It stays the
// region's.
func (r *Region) FD() int {
	if r.file == nil {
		return -1
	}
	return r.file.fd
}

// Offset is where mapped memory begins in the file of FD.
func (r *Region) Offset() uint64 { return r.offset }

// ReadOnly reports whether the memory is another's, to be read only.
func (r *Region) ReadOnly() bool { return r.reads }

// Present reports whether all of a memfd's pages have been allocated, so that to lock them takes no
// memory that was not taken before.
func (r *Region) Present() bool {
	var st unix.Stat_t
	return r.bytes != nil && unix.Fstat(r.FD(), &st) == nil && st.Blocks >= 0 &&
		uint64(st.Blocks)*512 >= uint64(st.Size)
}

// Bytes returns the mapped memory; false where there is none and ReadAt and WriteAt are the only
// way. The slice is dead once the last reference is released.
func (r *Region) Bytes() ([]byte, bool) {
	if invariants.Enabled && r.refs.Load() <= 0 {
		panic("mem: Bytes of freed region " + r.id.String())
	}
	return r.bytes, r.bytes != nil
}

// Check reports ErrBounds unless [off, off+n) lies inside. Safe against overflow.
func (r *Region) Check(off, n uint64) error { return r.check(off, n) }

func (r *Region) check(off, n uint64) error {
	if off > r.size || n > r.size-off {
		return fmt.Errorf("mem: region %s: offset %d, length %d of %d bytes: %w", r.id, off, n,
			r.size, ErrBounds)
	}
	return nil
}

// ReadAt fills p from offset off, all of it or an error.
func (r *Region) ReadAt(p []byte, off uint64) error {
	if err := r.check(off, uint64(len(p))); err != nil {
		return err
	}
	if b, ok := r.Bytes(); ok {
		Copy(p, b[off:])
		return nil
	}
	if r.device != nil {
		return r.device.Gather(p, []Block{{r, off, uint64(len(p))}})
	}
	for len(p) > 0 {
		n, err := unix.Pread(r.file.fd, p[:min(len(p), copyPiece)], int64(r.base+off))
		if n, err = r.progress("read", n, err); err != nil {
			return err
		}
		p, off = p[n:], off+uint64(n)
	}
	return nil
}

// WriteAt stores p at offset off, all of it or an error; after an error a part may have been
// written.
func (r *Region) WriteAt(p []byte, off uint64) error {
	if err := r.check(off, uint64(len(p))); err != nil {
		return err
	}
	if r.reads {
		return fmt.Errorf("mem: write to region %s: %w", r.id, ErrReadOnly)
	}
	if b, ok := r.Bytes(); ok {
		Copy(b[off:off+uint64(len(p))], p)
		return nil
	}
	if r.device != nil {
		return r.device.Scatter([]Block{{r, off, uint64(len(p))}}, p)
	}
	for len(p) > 0 {
		n, err := unix.Pwrite(r.file.fd, p[:min(len(p), copyPiece)], int64(r.base+off))
		if n, err = r.progress("write", n, err); err != nil {
			return err
		}
		p, off = p[n:], off+uint64(n)
	}
	return nil
}

// progress turns what a call on /proc/PID/mem returned into an error where it made none.
func (r *Region) progress(op string, n int, err error) (int, error) {
	switch {
	case err == unix.EINTR:
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("mem: %s region %s: %w", op, r.id, err)
	case n == 0:
		// The kernel reports it once the address space is gone.
		return 0, fmt.Errorf("mem: %s region %s: its process has exited: %w", op, r.id,
			io.ErrUnexpectedEOF)
	}
	return n, nil
}

// Acquire takes one more reference; false if the region is freed already.
func (r *Region) Acquire() bool {
	for {
		n := r.refs.Load()
		if n <= 0 {
			return false
		}
		if r.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// Release gives a reference back. The last one unmaps the memory and closes the descriptor; under
// the build tag `invariants` the addresses stay reserved and unreadable instead, so that a late
// access faults where it happens.
func (r *Region) Release() {
	switch n := r.refs.Add(-1); {
	case n > 0:
		return
	case n < 0:
		panic("mem: region " + r.id.String() + " released too often")
	}
	if r.bytes != nil && r.kind != KindLent {
		if invariants.Enabled {
			_ = unix.Mprotect(r.bytes, unix.PROT_NONE)
		} else {
			unmap(r.bytes)
		}
	}
	if r.free != nil {
		r.free()
	}
	if r.file != nil {
		r.file.Release()
	}
}
