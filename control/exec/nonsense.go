// SPDX-License-Identifier: Apache-2.0

package exec

import (
	"errors"
	"fmt"

	"github.com/kvspray/kvspray/transfer"
)

// Violation is the field of a peer's frame that is invalid: no correct peer sends it. The log has
// each kind once for each peer; metrics count all.
type Violation uint8

// What is wrong, by the field that is.
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
	BadTier                  // of a rail
	BadCredit                // for a rail
	BadAddress               // of control lanes
	BadAnswer                // to a query that went to another peer
	numViolations
)

var violationNames = [numViolations]string{"other", "key", "lease", "generation", "fingerprint",
	"parts", "team", "rank", "geometry", "slot", "share",
	"ranks", "rails", "tier", "credit", "address", "answer"}

// String is the label of metrics.
func (n Violation) String() string { return violationNames[n] }

// reportedSet is the set of violations of one peer that were logged.
type reportedSet uint32

// violation is the error of an invalid frame.
type violation struct {
	what Violation
	err  error
}

func (n *violation) Error() string { return n.err.Error() }

func (n *violation) Unwrap() error { return n.err }

// wrong returns the error of an invalid field.
func wrong(what Violation, format string, args ...any) error {
	return &violation{what, fmt.Errorf(format, args...)}
}

// kindOf is the invalid field of err.
func kindOf(err error) Violation {
	var n *violation
	if errors.As(err, &n) {
		return n.what
	}
	return BadOther
}

// violates counts a violation, and reports whether it is the first of its kind from this peer.
// Only that one is logged: no peer can fill the log.
func (ps *peers) violates(p *peer, what Violation) (first bool) {
	ps.counts[what]++
	first = p.reported&(1<<what) == 0
	p.reported |= 1 << what
	return first
}

// report counts a violation that another package found.
func (ps *peers) report(boot transfer.Boot, what Violation) (first bool) {
	if p := ps.byBoot[boot]; p != nil {
		return ps.violates(p, what)
	}
	ps.counts[what]++
	return false // it is gone
}

// logViolation counts and logs an invalid field. The rest of the frame is used.
func (ps *peers) logViolation(p *peer, what Violation, format string, args ...any) {
	if ps.violates(p, what) {
		a := ps.emit(LogViolation)
		a.Peer, a.Text = p.boot, fmt.Sprintf(format, args...)
	}
}

// violations counts all violations by the invalid field.
func (ps *peers) violations() (counts map[string]uint64) {
	counts = make(map[string]uint64, numViolations)
	for what, n := range ps.counts {
		counts[Violation(what).String()] = n
	}
	return counts
}
