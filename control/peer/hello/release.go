// SPDX-License-Identifier: Apache-2.0

package hello

import (
	"errors"
	"fmt"

	"github.com/kvspray/kvspray/internal/wire"
)

// Sidecars of two releases work together in every rolling upgrade. Hello has the control protocol
// versions of both. If they have none in common, both refuse, with one line that names the sidecar
// to upgrade. Within a version, a feature announces that a sidecar understands an addition, which a
// peer may then send.

// Protocol is the range of control versions of this build. 1.0 had no digests of plans: it cannot
// refuse a plan that orders bytes differently.
var Protocol = wire.Versions{Min: wire.V(1, 1), Max: wire.V(1, 1)}

// Oldest is the first version. A caller that does not know the release of the other side offers all
// versions from there on, so that a sidecar of any age answers with its own.
var Oldest = wire.V(1, 0)

// FeatureFragments announces that a sidecar accepts messages as fragments.
const FeatureFragments = "fragments"

// Features are those of this build.
var Features = []string{FeatureFragments}

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
