package kernels

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/testutil"
)

// TestSource runs the source of the kernels on the host. What it is compiled to is checked on GPUs
// (test/gpu); that the compiled code is of this source, by make generate.
func TestSource(t *testing.T) {
	gxx, err := exec.LookPath("g++")
	if err != nil {
		testutil.Skip(t, "g++", "g++ is not installed: "+err.Error())
	}
	exe := filepath.Join(t.TempDir(), "host")
	if out, err := exec.CommandContext(t.Context(), gxx, "-O2", "-fno-strict-aliasing", "-Wall",
		"-Wno-unknown-pragmas", "-o", exe, filepath.Join("testdata", "host.cc")).CombinedOutput(); err !=
		nil {
		t.Fatalf("%v\n%s", err, out)
	}
	out, err := exec.CommandContext(t.Context(), exe).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Log(strings.TrimSpace(string(out)))
}
