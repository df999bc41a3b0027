package mem

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/testutil"
)

func memfd(t *testing.T, size int64, seals int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	if seals != 0 {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			t.Fatal(err)
		}
	}
	return fd
}

func TestMapMemfdRefuses(t *testing.T) {
	good := unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	for _, c := range []struct {
		name  string
		size  int64
		seals int
		ask   uint64
		want  string
	}{
		{"no seals", 8192, 0, 8192, "not sealed"},
		{"shrink only", 8192, unix.F_SEAL_SHRINK, 8192, "not sealed"},
		{"grow only", 8192, unix.F_SEAL_GROW, 8192, "not sealed"},
		{"write sealed", 8192, good | unix.F_SEAL_WRITE, 8192, "sealed against writing"},
		{"too small", 8192, good, 8193, "has 8192 bytes"},
		{"zero", 8192, good, 0, "size 0"},
		{"oversized", 8192, good, MaxRegionBytes + 1, "size"},
		{"negative as unsigned", 8192, good, math.MaxUint64, "size"},
	} {
		t.Run(c.name, func(t *testing.T) {
			fd := memfd(t, c.size, c.seals)
			defer func() {
				if err := unix.Close(fd); err != nil {
					t.Errorf("the descriptor did not stay ours: %v", err)
				}
			}()
			if _, err := MapMemfd(NewID(), fd, c.ask); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q in it", err, c.want)
			}
		})
	}
	f, err := os.CreateTemp(t.TempDir(), "plain")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if err := f.Truncate(4096); err != nil {
		t.Fatal(err)
	}
	if _, err := MapMemfd(NewID(), int(f.Fd()), 4096); err == nil {
		t.Error("a plain file was mapped")
	}
	if _, err := MapMemfd(NewID(), -1, 4096); err == nil {
		t.Error("no descriptor was mapped")
	}
	p, _, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := MapMemfd(NewID(), int(p.Fd()), 4096); err == nil {
		t.Error("a pipe was mapped")
	}
}

// TestHugePool: an access to a hole of such a memfd is a SIGBUS while its pool is empty, and its
// owner can punch holes whatever its seals are.
func TestHugePool(t *testing.T) {
	for _, seals := range []int{0, unix.F_SEAL_WRITE} {
		fd, err := unix.MemfdCreate("huge", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_HUGETLB)
		if err != nil {
			testutil.Skip(t, "hugetlb", "memfd_create(MFD_HUGETLB): "+err.Error())
		}
		defer func() { _ = unix.Close(fd) }()
		if err := unix.Ftruncate(fd, hugePage); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS,
			unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|seals); err != nil {
			t.Fatal(err)
		}
		var opts []Option
		if seals != 0 {
			opts = append(opts, ReadOnly())
		}
		if _, err := MapMemfd(NewID(), fd, hugePage, opts...); !errors.Is(err, ErrHugePool) {
			t.Errorf("seals %#x: a memfd of huge pages: %v", seals, err)
		}
	}
}

func TestMapMemfd(t *testing.T) {
	fd := memfd(t, 3*4096+100, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
	id := NewID()
	r, err := MapMemfd(id, fd, 3*4096+50, Populate())
	if err != nil {
		t.Fatal(err)
	}
	if r.ID() != id || r.Kind() != KindMemfd || r.Size() != 3*4096+50 || r.FD() != fd {
		t.Errorf("id %s kind %s size %d fd %d", r.ID(), r.Kind(), r.Size(), r.FD())
	}
	if _, err := unix.Pwrite(fd, []byte("seen"), 4096); err != nil {
		t.Fatal(err)
	}
	b, ok := r.Bytes()
	if !ok || len(b) != 3*4096+50 || string(b[4096:4100]) != "seen" {
		t.Error("the mapping is not the file")
	}
	if r.ID() == NewID() {
		t.Error("ids repeat")
	}
	r.Release()
	if err := unix.Close(fd); err == nil {
		t.Error("the descriptor outlived the region")
	}
}

// A process that is to end while it takes memory does not take the rest.
func TestPopulateStops(t *testing.T) {
	stop := make(chan struct{})
	close(stop)
	r, err := NewAnonymous("stopped", 8*hugePage, PopulateUntil(stop))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	var st unix.Stat_t
	if err := unix.Fstat(r.FD(), &st); err != nil || st.Blocks != 0 {
		t.Errorf("%d bytes are allocated: %v", st.Blocks*512, err)
	}
	b, _ := r.Bytes()
	b[len(b)-1] = 1 // it is usable all the same
}

// Two mappings of one memfd, the engine's and ours, are of huge pages where the kernel can make
// them, whatever sysfs reports.
func TestHugePages(t *testing.T) {
	const size = 3*hugePage + 12345
	r, err := NewAnonymous("huge", size, Populate())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	var st unix.Stat_t
	if err := unix.Fstat(r.FD(), &st); err != nil || st.Blocks*512 < size {
		t.Fatalf("%d bytes are allocated of %d: %v", st.Blocks*512, size, err)
	}
	fd, err := unix.Dup(r.FD())
	if err != nil {
		t.Fatal(err)
	}
	ours, err := MapMemfd(NewID(), fd, size, PopulatePresent())
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Release()
	for _, m := range []*Region{r, ours} {
		b, _ := m.Bytes()
		if at := uintptr(unsafe.Pointer(&b[0])); at%hugePage != 0 || len(b) != size {
			t.Fatalf("%d bytes are mapped at %#x", len(b), at)
		}
		b[0], b[size-1] = 1, 2
		if kib := hugeMapped(t, b); kib == 0 {
			testutil.Skip(t, "hugepages", "the kernel makes no huge pages of shared memory now")
		} else if kib != 3*hugePage>>10 {
			t.Errorf("%d KiB of %d are mapped as huge pages", kib, size>>10)
		}
	}
}

// hugeMapped is how many KiB of the mapping at b are huge pages.
func hugeMapped(t *testing.T, b []byte) (kib int) {
	t.Helper()
	all, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	_, mine, ok := strings.Cut("\n"+string(all), fmt.Sprintf("\n%x-", uintptr(unsafe.Pointer(&b[0]))))
	_, mine, found := strings.Cut(mine, "ShmemPmdMapped:")
	if !ok || !found {
		t.Fatalf("no mapping at %p", &b[0])
	}
	if _, err := fmt.Sscanf(mine, "%d kB", &kib); err != nil {
		t.Fatal(err)
	}
	return kib
}

func TestBounds(t *testing.T) {
	r, err := NewAnonymous("bounds", 10000)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	p := make([]byte, 100)
	for _, off := range []uint64{9901, 10000, 10001, math.MaxUint64, math.MaxUint64 - 50} {
		if err := r.ReadAt(p, off); !errors.Is(err, ErrBounds) {
			t.Errorf("read at %d: %v", off, err)
		}
		if err := r.WriteAt(p, off); !errors.Is(err, ErrBounds) {
			t.Errorf("write at %d: %v", off, err)
		}
		if _, ok := (Block{r, off, 100}).Bytes(); ok {
			t.Errorf("block at %d has bytes", off)
		}
	}
	if err := r.Check(1, math.MaxUint64); !errors.Is(err, ErrBounds) {
		t.Errorf("length overflow: %v", err)
	}
	if err := r.ReadAt(p, 9900); err != nil {
		t.Error(err)
	}
	if b, ok := (Block{r, 9900, 100}).Bytes(); !ok || len(b) != 100 || cap(b) != 100 {
		t.Error("a block that fits has no bytes, or reaches past its end")
	}
}

// own is memory of this process, reached through its own /proc/self/mem.
func own(t *testing.T, n int) (*Region, []byte) {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	fd, err := unix.Open("/proc/self/mem", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	r, err := OpenProcess(NewID(), fd, uint64(uintptr(unsafe.Pointer(&b[0]))), uint64(n))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Release)
	return r, b
}

func TestProcess(t *testing.T) {
	r, b := own(t, 1<<20)
	if _, ok := r.Bytes(); ok || r.Kind() != KindProcess || r.Base() == 0 {
		t.Error("process memory claims to be mapped")
	}
	want := make([]byte, 400_000)
	for i := range want {
		want[i] = byte(rand.Uint32())
	}
	if err := r.WriteAt(want, 1234); err != nil || !bytes.Equal(b[1234:][:len(want)], want) {
		t.Fatalf("written bytes differ: %v", err)
	}
	got := make([]byte, len(want))
	if err := r.ReadAt(got, 1234); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("read bytes differ: %v", err)
	}
	if err := r.ReadAt(got, 1<<20-10); !errors.Is(err, ErrBounds) {
		t.Errorf("past the end: %v", err)
	}
}

func TestProcessRefuses(t *testing.T) {
	open := func(path string, flags int) int {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Close(fd) })
		return fd
	}
	rw := open("/proc/self/mem", unix.O_RDWR)
	for _, c := range []struct {
		name       string
		fd         int
		base, size uint64
	}{
		{"not procfs", open("/dev/zero", unix.O_RDWR), 4096, 4096},
		{"read only", open("/proc/self/mem", unix.O_RDONLY), 4096, 4096},
		{"unmapped", rw, 4096, 4096},
		{"null", rw, 0, 4096},
		{"wraps", rw, math.MaxInt64 - 10, 4096},
		{"kernel", rw, math.MaxUint64 - 8192, 4096},
		{"empty", rw, 4096, 0},
	} {
		if r, err := OpenProcess(NewID(), c.fd, c.base, c.size); err == nil {
			r.Release()
			t.Errorf("%s: accepted", c.name)
		}
	}
}

// The memory of a process that has exited is an error, never that of another process.
func TestProcessGone(t *testing.T) {
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	dir := "/proc/" + strconv.Itoa(cmd.Process.Pid)
	fd, err := unix.Open(dir+"/mem", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		_ = in.Close()
		_ = cmd.Wait()
		testutil.Skip(t, "ptrace", fmt.Sprintf("the memory of a child cannot be opened here: %v", err))
	}
	var base uint64
	deadline := time.Now().Add(time.Minute)
	for base == 0 { // until exec has mapped a stack
		maps, _ := os.ReadFile(dir + "/maps")
		for _, l := range strings.Split(string(maps), "\n") {
			if strings.HasSuffix(l, "[stack]") {
				base = parseHex(strings.SplitN(l, "-", 2)[0])
			}
		}
		if time.Now().After(deadline) {
			t.Fatal("the child has no stack")
		}
		runtime.Gosched()
	}
	r, err := OpenProcess(NewID(), fd, base, 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	_ = in.Close()
	_ = cmd.Wait()
	p := make([]byte, 64)
	if err := r.ReadAt(p, 0); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("read of a dead process: %v", err)
	}
	if err := r.WriteAt(p, 0); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("write to a dead process: %v", err)
	}
}

func parseHex(s string) (v uint64) {
	for _, c := range s {
		v = v<<4 | uint64(strings.IndexRune("0123456789abcdef", c))
	}
	return v
}

func TestReferences(t *testing.T) {
	r, err := NewAnonymous("refs", 4096)
	if err != nil {
		t.Fatal(err)
	}
	if !r.Acquire() {
		t.Fatal("acquire")
	}
	r.Release()
	b, ok := r.Bytes()
	if !ok {
		t.Fatal("gone with a reference left")
	}
	b[0] = 1
	r.Release()
	if r.Acquire() {
		t.Error("a freed region came back")
	}
	defer func() {
		if recover() == nil {
			t.Error("one release too many went unnoticed")
		}
	}()
	r.Release()
}

func TestCopyAndFill(t *testing.T) {
	for _, n := range []int{0, 1, 7, copyPiece - 1, copyPiece, copyPiece + 1, 3*copyPiece + 5} {
		src, dst := make([]byte, n), make([]byte, n+3)
		for i := range src {
			src[i] = byte(rand.Uint32())
		}
		if got := Copy(dst, src); got != n || !bytes.Equal(dst[:n], src) || dst[n] != 0 {
			t.Errorf("copy of %d: %d", n, got)
		}
		Fill(dst, 0x77)
		if bytes.Count(dst, []byte{0x77}) != len(dst) {
			t.Errorf("fill of %d", n)
		}
		if CRC32C(CRC32C(0, src[:n/3]), src[n/3:]) != CRC32C(0, src) {
			t.Errorf("sum of %d depends on its pieces", n)
		}
	}
	if CRC32C(0, []byte("123456789")) != 0xe3069283 {
		t.Error("not CRC-32C")
	}
}

// Bulk loops must let the collector in; the same loop written over copy() held it for seconds.
func TestMeasureCollectorDelayOfCopies(t *testing.T) {
	testutil.Measures(t)
	r, err := NewAnonymous("gc", 256<<20, Populate())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	b, _ := r.Bytes()
	half := len(b) / 2
	for _, c := range []struct {
		name string
		loop func()
	}{
		{"Copy", func() { Copy(b[:half], b[half:]) }},
		{"Fill", func() { Fill(b, 1) }},
		{"CRC32C", func() { CRC32C(0, b) }},
		{"WriteAt", func() { _ = r.WriteAt(b[:half], uint64(half)) }},
	} {
		t.Log(c.name)
		testutil.LetsCollectorInWhile(t, c.loop)
	}
}

func BenchmarkCopy(b *testing.B) {
	r, err := NewAnonymous("bench", 64<<20, Populate())
	if err != nil {
		b.Fatal(err)
	}
	defer r.Release()
	p, _ := r.Bytes()
	b.SetBytes(32 << 20)
	for b.Loop() {
		Copy(p[:32<<20], p[32<<20:])
	}
}
