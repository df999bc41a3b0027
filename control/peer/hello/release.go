package hello

import (
	"errors"
	"fmt"

	"github.com/kvspray/kvspray/internal/wire"
)

// Sidecars of two releases work together in every rolling upgrade. Hello has the control protocol
// versions of both. If they have none in common, both refuse, with one line that names the sidecar
// to upgrade. Within a version, a feature announces what a sidecar accepts, and a peer may then
// send.

// Protocol is the range of control versions of this build.
var Protocol = wire.Versions{Min: wire.V(1, 0), Max: wire.V(1, 0)}

var (
	// ErrRelease is wrapped if the peer's release is incompatible.
	ErrRelease = errors.New("incompatible releases")
	// ErrOther is wrapped if a gRPC server of another kind answers.
	ErrOther = errors.New("not a sidecar")
	// ErrPreconnect is wrapped if a sidecar has no place for a peer that no request needs.
	ErrPreconnect = errors.New("no place for a peer that no request needs")
)

// Side is one of two sidecars that choose a version.
type Side struct {
	Versions wire.Versions
	Address  string
	Release  string // of its build, for display
}

// Choose returns the version that two sidecars use, or an error that names the one to upgrade.
func Choose(here, there Side) (wire.Version, error) {
	ver, err := wire.Choose(here.Versions, there.Versions)
	if err == nil {
		return ver, nil
	}
	if there.Versions.Min > there.Versions.Max {
		return 0, fmt.Errorf("control protocol of the sidecar at %s: %w", there.Address, err)
	}
	older := there.Address
	if there.Versions.Min > here.Versions.Max {
		older = here.Address
	}
	return 0, fmt.Errorf("control protocol %s, %s: upgrade the sidecar at %s: %w", there, here, older,
		ErrRelease)
}

func (s Side) String() string {
	versions, release := s.Versions.String(), s.Release
	if s.Versions.Min == s.Versions.Max {
		versions = s.Versions.Min.String()
	}
	if release == "" {
		release = "of an unknown release"
	}
	return fmt.Sprintf("%s at %s (kvspray %s)", versions, s.Address, release)
}

// Release is the text of a peer's release if it is printable, or empty.
func Release(s string) string {
	if len(s) > MaxText || !isPrintable(s) {
		return ""
	}
	return s
}
