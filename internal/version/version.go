// Package version returns the version of this build and its compiler. No state besides the variable
// that the linker sets.
package version

import (
	"runtime"
	"runtime/debug"
)

// version is set by the linker (see the Makefile); a build without it uses the module's build
// information.
var version string

// String returns the version of this build: the tag it was built from, else the revision, else
// "devel".
func String() string {
	if version != "" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "devel"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return "devel-" + s.Value[:min(len(s.Value), 12)]
		}
	}
	return "devel"
}

// Go returns the compiler and the platform.
func Go() string { return runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH }
