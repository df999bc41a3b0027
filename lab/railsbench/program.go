package railsbench

import (
	"os"
	"os/exec"
	"path/filepath"

	"github.com/kvspray/kvspray/internal/ui/usage"
)

// SidecarFlag names the program that the sidecars run, SidecarUsage describes the flag.
const (
	SidecarFlag  = "sidecar"
	SidecarUsage = "the program that the sidecars run, also one of another release " +
		"(default: kvspray beside this program, else in PATH)"
)

// sidecarProgram is the name of the program that `make build` puts beside this one.
const sidecarProgram = "kvspray"

// FindSidecar returns the path of the sidecar's program: the one that the user named, else the one
// beside this program, else the one in PATH.
func FindSidecar(named string) (string, error) {
	if named != "" {
		path, err := exec.LookPath(named)
		if err != nil {
			return "", usage.Errorf("--%s: %w: name the kvspray program", SidecarFlag, err)
		}
		return filepath.Abs(path)
	}
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	if path, err := exec.LookPath(filepath.Join(filepath.Dir(self), sidecarProgram)); err == nil {
		return path, nil
	}
	if path, err := exec.LookPath(sidecarProgram); err == nil {
		return filepath.Abs(path)
	}
	return "", usage.Errorf("there is no program %s beside %s, and none in PATH: run 'make build', "+
		"which makes both, or name it with --%s", sidecarProgram, self, SidecarFlag)
}
