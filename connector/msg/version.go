package msg

import "fmt"

// Version is a protocol version, packed as major<<16 | minor.
type Version uint32

// MakeVersion packs a version.
func MakeVersion(major, minor uint16) Version { return Version(major)<<16 | Version(minor) }

// Major is the part that a reader must support.
func (v Version) Major() uint16 { return uint16(v >> 16) }

// Minor versions only add.
func (v Version) Minor() uint16 { return uint16(v) }

func (v Version) String() string { return fmt.Sprintf("%d.%d", v.Major(), v.Minor()) }

// The versions that this code supports.
var (
	VersionMin = MakeVersion(1, 0)
	VersionMax = MakeVersion(1, 0)
)

// Negotiate picks the highest version that both sides support. The releases are for the error.
func Negotiate(minV, maxV Version, shim, sidecar string) (Version, error) {
	if minV > maxV {
		return 0, &Error{Message: "HELLO", Field: "min", Problem: fmt.Sprintf("%s is above max %s",
			minV, maxV)}
	}
	v := min(maxV, VersionMax)
	if v < max(minV, VersionMin) {
		return 0, &Error{Message: "HELLO", Field: "max",
			Problem: fmt.Sprintf("the engine's kvspray package (%s) supports protocol %s to %s, the "+
				"sidecar (%s) %s to %s", release(shim), minV, maxV, release(sidecar), VersionMin, VersionMax),
			Remedy: remedy(minV > VersionMax)}
	}
	return v, nil
}

func release(r string) string {
	if r == "" {
		return "of an unknown release"
	}
	return fmt.Sprintf("release %.64q", r)
}

func remedy(oldSidecar bool) string {
	if oldSidecar {
		return "upgrade the sidecar to the package's release, and restart it"
	}
	return "upgrade the package in the engine's environment to the sidecar's release, and restart " +
		"the engine"
}
