package railsbench

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/ui/usage"
)

// A named program precedes the one beside this program, which precedes the one in PATH.
func TestFindSidecar(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program := func(dir string, mode os.FileMode) string {
		path := filepath.Join(dir, sidecarProgram)
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	empty, other := t.TempDir(), t.TempDir()
	check := func(named, want string) {
		t.Helper()
		if got, err := FindSidecar(named); err != nil || got != want {
			t.Errorf("%q: %q, %v; want %q", named, got, err, want)
		}
	}
	refused := func(named string, want ...string) {
		t.Helper()
		_, err := FindSidecar(named)
		if !usage.Is(err) {
			t.Fatalf("%q: %v is no usage error", named, err)
		}
		for _, w := range append(want, "--sidecar") {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%q: %v: want %q in it", named, err, w)
			}
		}
	}
	t.Setenv("PATH", empty)
	refused("", "no program kvspray beside "+self, "none in PATH", "'make build'")
	inPath := program(other, 0o755)
	t.Setenv("PATH", empty+":"+other)
	check("", inPath)
	beside := program(filepath.Dir(self), 0o755)
	t.Cleanup(func() { _ = os.Remove(beside) })
	check("", beside)
	named := program(t.TempDir(), 0o755)
	check(named, named)
	refused(filepath.Join(empty, "x"), "no such file", "name the kvspray program")
	refused(program(t.TempDir(), 0o644), "permission denied")
}
