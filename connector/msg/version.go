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

// Negotiate picks the highest version that both sides support.
func Negotiate(minV, maxV Version) (Version, error) {
	if minV > maxV {
		return 0, &Error{Message: "HELLO", Field: "min", Problem: fmt.Sprintf("%s is above max %s",
			minV, maxV)}
	}
	v := min(maxV, VersionMax)
	if v < max(minV, VersionMin) {
		return 0, &Error{Message: "HELLO", Field: "max",
			Problem: fmt.Sprintf("the shim supports %s to %s, the sidecar %s to %s", minV, maxV, VersionMin,
				VersionMax),
			Remedy: "upgrade the older of the two"}
	}
	return v, nil
}
