// Package wire is the binary form of data on lanes: the opening of a lane with its proof, and the
// frames of data lanes. Fixed layout, little-endian, every length checked before use.
//
// A lane opens with Dial on one end and Accept on the other (open.go): both name their boots, agree
// on a version, and prove by HMAC-SHA256 over all messages that they hold the key of their mTLS
// session. The same opening serves tcp data lanes, control lanes and shared-memory lanes; their
// purpose distinguishes them.
//
// On a data lane (frame.go) each message starts with a Header of HeaderBytes. A data frame is
// header, payload, Trailer; a confirmation is a header followed by at most MaxConfirms-1 more
// entries. Both directions carry both.
//
// The package does no buffering, keeps no state between calls and starts no goroutine. Encoding and
// decoding of frames allocate nothing.
package wire

import (
	"errors"
	"fmt"
)

// Version is major<<16 | minor.
type Version uint32

// V makes a version.
func V(major, minor uint16) Version { return Version(major)<<16 | Version(minor) }

// Major is the part whose change breaks readers.
func (v Version) Major() uint16 { return uint16(v >> 16) }

// Minor is the part that only adds.
func (v Version) Minor() uint16 { return uint16(v) }

func (v Version) String() string { return fmt.Sprintf("%d.%d", v.Major(), v.Minor()) }

// Versions is the range of versions that one end supports, inclusive.
type Versions struct{ Min, Max Version }

func (v Versions) String() string { return v.Min.String() + " to " + v.Max.String() }

// Lanes is the range of lane versions that this build supports.
var Lanes = Versions{Min: V(1, 0), Max: V(1, 0)}

// Choose returns the highest version in both ranges, or ErrVersion with both ranges.
func Choose(ours, theirs Versions) (Version, error) {
	if theirs.Min > theirs.Max {
		return 0, fmt.Errorf("wire: the peer supports %s, an empty range: %w", theirs, ErrVersion)
	}
	v := min(ours.Max, theirs.Max)
	if v < ours.Min || v < theirs.Min {
		return 0, fmt.Errorf("wire: this side supports %s, the peer %s: %w; %s", ours, theirs, ErrVersion,
			upgrade(ours, theirs))
	}
	return v, nil
}

// upgrade is the remedy if two ranges have no common version.
func upgrade(ours, theirs Versions) string {
	if theirs.Min > ours.Max {
		return "upgrade this sidecar"
	}
	return "upgrade the peer"
}

// Errors that callers distinguish.
var (
	ErrVersion   = errors.New("no common version")
	ErrRefused   = errors.New("refused by the peer")
	ErrProof     = errors.New("the peer does not hold the key of this pair")
	ErrMalformed = errors.New("malformed")
)
