package doctor

import (
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// countersOf is a file with one entry point and two outcomes.
func countersOf(pid, taken, missed uint64) []byte {
	le := binary.LittleEndian
	b := []byte(countersMagic)
	for _, n := range []uint32{uint32(pid), 1, 2, 32} {
		b = le.AppendUint32(b, n)
	}
	for _, n := range []uint64{0, 0, taken, taken << 20, missed, missed << 20} {
		b = le.AppendUint64(b, n)
	}
	for _, name := range []string{"cuMemcpyHtoDAsync_v2", bySidecar, noSidecar} {
		b = append(b, name+strings.Repeat("\x00", 32-len(name))...)
	}
	return b
}

// A process shows its own counters through /proc, and not those of its parent.
func TestPreloads(t *testing.T) {
	put := func(b []byte) *os.File {
		fd, err := unix.MemfdCreate("kvspray-preload", unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), "counters")
		t.Cleanup(func() { _ = f.Close() })
		if _, err := f.Write(b); err != nil {
			t.Fatal(err)
		}
		return f
	}
	own := func() (found []Result) {
		for _, r := range preloads(context.Background(), &Host{}) {
			if strings.HasPrefix(r.Name, "preload "+filepath.Base(self(t))+" ") {
				found = append(found, r)
			}
		}
		return found
	}
	pid := uint64(os.Getpid())
	put(countersOf(pid+1, 1, 0))
	if got := own(); len(got) != 0 {
		t.Errorf("counters of another process: %+v", got)
	}
	f := put(countersOf(pid, 3, 2))
	got := own()
	const want = "cuMemcpyHtoDAsync_v2: 3 copied by the sidecar, 2 no sidecar"
	if len(got) != 1 || got[0].State != OK || got[0].Detail != want {
		t.Errorf("%+v, want %q", got, want)
	}
	_ = f.Close()
	put(countersOf(pid, 0, 2))
	if got := own(); len(got) != 1 || got[0].State != Warn {
		t.Errorf("without a sidecar: %+v", got)
	}
}

func self(t *testing.T) string {
	dir, err := os.Readlink("/proc/self")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func FuzzCounters(f *testing.F) {
	f.Add(countersOf(1, 2, 3))
	f.Add(countersOf(1, 2, 3)[:countersHead+3])
	f.Add([]byte(countersMagic + strings.Repeat("\xff", 80)))
	f.Fuzz(func(t *testing.T, b []byte) {
		if p, err := parseCounters(b); err == nil {
			_ = p.String()
		}
	})
}
