// SPDX-License-Identifier: Apache-2.0

package exec

import (
	"errors"
	"fmt"

	"github.com/kvspray/kvspray/transfer"
)

// Violation is what may be wrong with the words of a peer so that no honest one says them. Each is told once of each peer and counted every time.
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
	BadAnswer                // to a question that somebody else was asked
	numViolations
)

var violationNames = [numViolations]string{"other", "key", "lease", "generation", "fingerprint", "parts", "team", "rank", "geometry", "slot", "share",
	"ranks", "rails", "tier", "credit", "address", "answer"}

// String is the label of metrics.
func (n Violation) String() string { return violationNames[n] }

// reportedSet are those of which a peer was told.
type reportedSet uint32

// nonsense is an error of a frame that says what is wrong with it.
type violation struct {
	what Violation
	err  error
}

func (n *violation) Error() string { return n.err.Error() }

func (n *violation) Unwrap() error { return n.err }

// wrong makes an error of what a peer said.
func wrong(what Violation, format string, args ...any) error {
	return &violation{what, fmt.Errorf(format, args...)}
}

// kindOf is what err says is wrong.
func kindOf(err error) Violation {
	var n *violation
	if errors.As(err, &n) {
		return n.what
	}
	return BadOther
}

// hears counts one piece of nonsense of a peer, and reports whether it is the first of its kind: only that is told, so that no peer fills a log.
func (ps *peers) violates(p *peer, what Violation) (first bool) {
	ps.counts[what]++
	first = p.reported&(1<<what) == 0
	p.reported |= 1 << what
	return first
}

// ReportViolation counts nonsense of a peer that somebody else found, and reports whether it is to be told.
func (ps *peers) report(boot transfer.Boot, what Violation) (first bool) {
	if p := ps.byBoot[boot]; p != nil {
		return ps.violates(p, what)
	}
	ps.counts[what]++
	return false // it is gone
}

// complain tells of what a peer said that cannot be, the first time; what it said is left out, and nothing else is harmed.
func (ps *peers) logViolation(p *peer, what Violation, format string, args ...any) {
	if ps.violates(p, what) {
		a := ps.emit(LogViolation)
		a.Peer, a.Text = p.boot, fmt.Sprintf(format, args...)
	}
}

// Violation is how often peers said what no honest one says, by what was wrong.
func (ps *peers) violations() (counts map[string]uint64) {
	counts = make(map[string]uint64, numViolations)
	for what, n := range ps.counts {
		counts[Violation(what).String()] = n
	}
	return counts
}
