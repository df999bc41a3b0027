package limits

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

const gib = 1 << 30

// host makes the files of a machine.
func host(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		at := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// pybind/tests/test_limits.py has the same cases.
func TestMemoryIsReadWhereItIsLimited(t *testing.T) {
	text, err := os.ReadFile("../../../testdata/limits.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name  string
		Files map[string]string
		Free  uint64
		File  string // that has the limit; empty: the host's memory binds
	}
	if err := json.Unmarshal(text, &cases); err != nil || len(cases) == 0 {
		t.Fatalf("%d cases: %v", len(cases), err)
	}
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			m, err := ReadMemory(host(t, c.Files))
			if err != nil {
				t.Fatal(err)
			}
			free, binds := m.Free()
			file := ""
			if binds != nil {
				file = binds.File
			}
			if free != c.Free || file != c.File {
				t.Errorf("%d bytes are free by %q, want %d by %q: %+v", free, file, c.Free, c.File, m)
			}
		})
	}
}

func TestMeminfo(t *testing.T) {
	for _, bad := range []string{"", "MemTotal: 1 kB\n", "MemAvailable: x kB\n", "MemAvailable:\n",
		"MemAvailable: -1 kB\n", "MemAvailable: 99999999999999999 kB\n"} {
		if m, err := ReadMemory(host(t, map[string]string{"proc/meminfo": bad})); err == nil {
			t.Errorf("%q: %+v", bad, m)
		}
	}
	if _, err := ReadMemory(""); err != nil {
		t.Errorf("this host: %v", err)
	}
}

// A pool as large as the limit has no room: the process needs memory for itself.
func TestPoolNeedsRoomForItsProcess(t *testing.T) {
	m := &Memory{Host: 64 * gib, Limits: []Limit{{File: "f/memory.max", Bytes: 4 * gib}}}
	if f := m.Fits(4 * gib); f == nil || !strings.Contains(f.Why, "4288 MiB are needed, and 4096 MiB "+
		"are left of the 4096 MiB of f/memory.max") || !strings.Contains(f.Remedy, "lower it to 3906 MiB"+
		", or raise that limit") {
		t.Errorf("%+v", f)
	}
	if f := m.Fits(3906 << 20); f != nil {
		t.Errorf("the size of the remedy does not fit: %+v", f)
	}
	if f := m.Fits(3907 << 20); f == nil {
		t.Error("the remedy's size is not the largest one")
	}
	m.Limits = nil
	if f := m.Fits(64 * gib); f == nil || !strings.Contains(f.Why, "this host has 65536 MiB "+
		"available") || !strings.Contains(f.Remedy, "or end what uses the memory") {
		t.Errorf("%+v", f)
	}
	m.Host = overheadBytes
	if f := m.Fits(1); f == nil || strings.Contains(f.Remedy, "lower it") {
		t.Errorf("%+v", f)
	}
}

func TestEachErrorHasItsOwnRemedy(t *testing.T) {
	for errno, want := range map[error]string{unix.ENOMEM: "memory limit", unix.EMFILE: "ulimit -n",
		unix.ENFILE: "fs.file-max", unix.ENOSPC: "--shm-size", unix.EPERM: "seccomp",
		unix.EAGAIN: "ulimit -l"} {
		err := Remedy(fmt.Errorf("operation: %w", errno))
		if !errors.Is(err, errno) || !strings.Contains(err.Error(), want) ||
			!strings.Contains(Advice(err, ""), want) {
			t.Errorf("%v: want %q", err, want)
		}
	}
	other := errors.New("other")
	if Remedy(other) != other || Advice(other, "x") != "x" {
		t.Error("an error without a limit got a remedy")
	}
}

func TestLimitsOfThisProcess(t *testing.T) {
	if n, err := Descriptors(); err != nil || n < 16 {
		t.Errorf("descriptors: %d, %v", n, err)
	}
	if _, err := Memlock(); err != nil {
		t.Error(err)
	}
}

func FuzzDirectories(f *testing.F) {
	f.Add("0::/a/b\n4:memory:/x\n", "31 23 0:28 /a /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"+
		"35 31 0:32 /.. /cg/memory rw - cgroup cgroup rw,memory\n")
	f.Fuzz(func(t *testing.T, own, mounts string) {
		for _, d := range cgroupDirs(own, mounts) {
			if strings.Contains("/"+d.path+"/", "/../") {
				t.Errorf("%q leads out of its mount", d.path)
			}
		}
	})
}
