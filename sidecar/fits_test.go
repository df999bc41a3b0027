package sidecar

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/config"
)

// A store that this process may not have the memory for is refused before anything is taken: the
// limit of the process's cgroup counts, and so does what the sidecar itself needs.
func TestStoreFitsTheHost(t *testing.T) {
	root := t.TempDir()
	for name, text := range map[string]string{
		"proc/meminfo":                        "MemAvailable: 33554432 kB\n", // 32 GiB
		"proc/self/cgroup":                    "0::/kv.service\n",
		"proc/self/mountinfo":                 "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
		"sys/fs/cgroup/kv.service/memory.max": "1073741824\n",
	} {
		at := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := fits(512<<20, root); err != nil {
		t.Error(err)
	}
	if err := fits(4<<40, t.TempDir()); err != nil {
		t.Errorf("the limits are not known: %v", err)
	}
	for _, size := range []config.Size{1 << 30, 2 << 30} { // all of it, and more
		err := fits(size, root)
		for _, want := range []string{"store.memory", size.String(),
			"1024 MiB of /sys/fs/cgroup/kv.service", "lower it to 882 MiB"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v: %v lacks %q", size, err, want)
			}
		}
	}
}
