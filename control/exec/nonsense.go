// SPDX-License-Identifier: Apache-2.0

package exec

import (
	"errors"
	"fmt"

	"github.com/kvspray/kvspray/transfer"
)

// Nonsense is what may be wrong with the words of a peer so that no honest one says them. Each is told once of each peer and counted every time.
type Nonsense uint8

// What is wrong, by the field that is.
const (
	BadOther       Nonsense = iota
	BadKey                  // of a transfer
	BadLease                // an id
	BadGeneration           // of a grant
	BadFingerprint          // of a grant's layout
	BadParts                // how many a grant has
	BadTeam                 // of receivers
	BadRank                 // of a part, or one that is bound twice
	BadGeometry             // of a part
	BadSlot                 // of a part
	BadShare                // of a part
	BadRanks                // of an engine
	BadRails                // how many a peer has
	BadTier                 // of a rail
	BadCredit               // for a rail
	BadAddress              // of control lanes
	BadAnswer               // to a question that somebody else was asked
	numNonsense
)

var nonsenseNames = [numNonsense]string{"other", "key", "lease", "generation", "fingerprint", "parts", "team", "rank", "geometry", "slot", "share",
	"ranks", "rails", "tier", "credit", "address", "answer"}

// String is the label of metrics.
func (n Nonsense) String() string { return nonsenseNames[n] }

// toldOf are those of which a peer was told.
type toldOf uint32

// nonsense is an error of a frame that says what is wrong with it.
type nonsense struct {
	what Nonsense
	err  error
}

func (n *nonsense) Error() string { return n.err.Error() }

func (n *nonsense) Unwrap() error { return n.err }

// wrong makes an error of what a peer said.
func wrong(what Nonsense, format string, args ...any) error {
	return &nonsense{what, fmt.Errorf(format, args...)}
}

// kindOf is what err says is wrong.
func kindOf(err error) Nonsense {
	var n *nonsense
	if errors.As(err, &n) {
		return n.what
	}
	return BadOther
}

// hears counts one piece of nonsense of a peer, and reports whether it is the first of its kind: only that is told, so that no peer fills a log.
func (ps *peers) violates(p *peer, what Nonsense) (first bool) {
	ps.counts[what]++
	first = p.told&(1<<what) == 0
	p.told |= 1 << what
	return first
}

// Hears counts nonsense of a peer that somebody else found, and reports whether it is to be told.
func (ps *peers) report(boot transfer.Boot, what Nonsense) (first bool) {
	if p := ps.byBoot[boot]; p != nil {
		return ps.violates(p, what)
	}
	ps.counts[what]++
	return false // it is gone
}

// complain tells of what a peer said that cannot be, the first time; what it said is left out, and nothing else is harmed.
func (ps *peers) complain(p *peer, what Nonsense, format string, args ...any) {
	if ps.violates(p, what) {
		a := ps.emit(Complain)
		a.Peer, a.Text = p.boot, fmt.Sprintf(format, args...)
	}
}

// Nonsense is how often peers said what no honest one says, by what was wrong.
func (ps *peers) violations() (counts map[string]uint64) {
	counts = make(map[string]uint64, numNonsense)
	for what, n := range ps.counts {
		counts[Nonsense(what).String()] = n
	}
	return counts
}
