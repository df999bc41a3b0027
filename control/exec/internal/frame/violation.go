package frame

import (
	"errors"
	"fmt"
)

// Violation is the field of a peer's frame that is invalid: no correct peer sends it. The log has
// each kind once for each peer; metrics count all.
type Violation uint8

// The violations, by the field that is wrong.
const (
	BadOther       Violation = iota
	BadKey                   // of a transfer
	BadLease                 // an id
	BadGeneration            // of a grant
	BadFingerprint           // of a grant's layout
	BadParts                 // how many a grant has
	BadTeam                  // of receivers
	BadRank                  // of a part, or one that is bound twice
	BadGeometry              // of a part
	BadSlot                  // of a part
	BadShare                 // of a part
	BadRanks                 // of an engine
	BadRails                 // how many a peer has
	BadDistance              // of a rail
	BadCredit                // for a rail
	BadAddress               // of control lanes
	BadAnswer                // to a query that went to another peer
	BadPages                 // a message about pages of the store
	BadSegments              // a message about segments
	NumViolations
)

var violationNames = [NumViolations]string{"other", "key", "lease", "generation", "fingerprint",
	"parts", "team", "rank", "geometry", "slot", "share",
	"ranks", "rails", "distance", "credit", "address", "answer",
	"pages", "segments"}

// String is the label of metrics.
func (n Violation) String() string { return violationNames[n] }

// Reported is the set of violations of one peer that were logged.
type Reported uint32

// First adds a violation to the set. It reports whether it is the first of its kind.
func (r *Reported) First(what Violation) bool {
	first := *r&(1<<what) == 0
	*r |= 1 << what
	return first
}

// Counts are numbers of violations by the invalid field.
type Counts [NumViolations]uint64

// ByLabel returns the numbers by label.
func (c *Counts) ByLabel() map[string]uint64 {
	counts := make(map[string]uint64, NumViolations)
	for what, n := range c {
		counts[Violation(what).String()] = n
	}
	return counts
}

// violation is the error of an invalid frame.
type violation struct {
	what Violation
	err  error
}

func (n *violation) Error() string { return n.err.Error() }

func (n *violation) Unwrap() error { return n.err }

// Wrong returns the error of an invalid field.
func Wrong(what Violation, format string, args ...any) error {
	return &violation{what, fmt.Errorf(format, args...)}
}

// KindOf is the invalid field of err.
func KindOf(err error) Violation {
	var n *violation
	if errors.As(err, &n) {
		return n.what
	}
	return BadOther
}
