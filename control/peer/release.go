// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/kvspray/kvspray/internal/wire"
)

// Sidecars of two releases work together in every rolling upgrade. Hello has the control protocol
// versions of both. If they have none in common, both refuse, with one line that names the sidecar
// to upgrade. Within a version, a feature announces that a sidecar understands an addition, which a
// peer may then send.

// Protocol is the range of control versions of this build. 1.0 had no digests of plans: it cannot
// refuse a plan that orders bytes differently.
var Protocol = wire.Versions{Min: wire.V(1, 1), Max: wire.V(1, 1)}

// oldest is the first version. A caller that does not know the release of the other side offers all
// versions from there on, so that a sidecar of any age answers with its own.
var oldest = wire.V(1, 0)

// FeatureFragments: frames longer than MaxFrame come as several Fragments.
const FeatureFragments = "fragments"

// Features are those of this build.
var Features = []string{FeatureFragments}

// ErrRelease is wrapped if the peer's release is incompatible.
var ErrRelease = errors.New("incompatible releases")

// build is a sidecar's release as its Hello reports it.
type build struct {
	release  string // empty before 1.1
	features []string
}

// has reports whether the peer understands a feature.
func (p *Peer) has(feature string) bool { return slices.Contains(p.Features, feature) }

// choose returns the version to use with the sidecar at an address, or an error that names the
// sidecar to upgrade.
func (m *Mesh) choose(theirs wire.Versions, address, release string) (wire.Version, error) {
	ours := m.opt.Versions
	ver, err := wire.Choose(ours, theirs)
	if err == nil {
		return ver, nil
	}
	if theirs.Min > theirs.Max {
		return 0, fmt.Errorf("control protocol of the sidecar at %s: %w", address, err)
	}
	here, older := m.Endpoint(), address
	if theirs.Min > ours.Max {
		older = here
	}
	return 0, fmt.Errorf("control protocol %s at %s (kvspray %s), %s at %s (kvspray %s): "+
		"upgrade the sidecar at %s: %w",
		span(theirs), address, orUnknown(release), span(ours), here, orUnknown(m.opt.Version),
		older, ErrRelease)
}

func span(v wire.Versions) string {
	if v.Min == v.Max {
		return v.Min.String()
	}
	return v.String()
}

func orUnknown(release string) string {
	if release == "" {
		return "of an unknown release"
	}
	return release
}

// called checks the versions of a caller. The caller's texts are foreign, and the error is shown to
// people.
func (m *Mesh) called(ctx context.Context, theirs wire.Versions, endpoint,
	release string) (wire.Version, error) {
	if checkAddress(endpoint) != nil {
		endpoint = "the caller's address"
	}
	ver, err := m.choose(theirs, endpoint, checkedRelease(release))
	if err == nil {
		return ver, nil
	}
	m.opt.Refused()
	m.mu.Lock()
	first := !m.olderSaid[endpoint] && len(m.olderSaid) < MaxPeers
	if first {
		m.olderSaid[endpoint] = true
	}
	m.mu.Unlock()
	if first {
		m.log.Warn("hello refused; logged once per address", "err", err)
	}
	// Tests call without a server, and an answer without the mark is only less clear.
	_ = grpc.SetTrailer(ctx, metadata.Pairs(refuses, refusesRelease))
	return 0, status.Error(codes.Unimplemented, err.Error())
}

// checkedRelease is the printable part of a foreign text.
func checkedRelease(s string) string {
	if len(s) > MaxText {
		return ""
	}
	for _, r := range s {
		if r <= ' ' || r > '~' {
			return ""
		}
	}
	return s
}

// The trailer of a refused Hello names what the sidecar does not accept. The status alone does not:
// every gRPC server answers Unimplemented to calls that it does not serve.
const (
	refuses         = "kvspray-refuses"
	refusesRelease  = "release"
	refusesAcquaint = "acquaint"
)

// refusedUs is the error of a Hello that was refused.
func refusedUs(err error, trailer metadata.MD) error {
	s, ok := status.FromError(err)
	what := trailer.Get(refuses)
	switch {
	case !ok:
	case slices.Contains(what, refusesRelease):
		return fmt.Errorf("%s: %w", s.Message(), ErrRelease)
	case slices.Contains(what, refusesAcquaint):
		return fmt.Errorf("%s: %w", s.Message(), ErrAcquainted)
	case s.Code() == codes.Unimplemented && !strings.HasPrefix(s.Message(), "unknown "):
		// Releases before the trailer; gRPC's own answer begins with "unknown service" or "unknown
		// method".
		return fmt.Errorf("%s: %w", s.Message(), ErrRelease)
	case s.Code() == codes.Unimplemented:
		return fmt.Errorf("%w: a gRPC server of another kind answers: %w", ErrOther, err)
	}
	return err
}
