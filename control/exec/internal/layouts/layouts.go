// Package layouts has the questions for layouts of peers. A peer that does not answer is asked
// again until the match timeout; the leases and grants that wait for an answer are listed at their
// tables.
package layouts

import (
	"bytes"
	"errors"
	"slices"
	"time"

	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
	"github.com/kvspray/kvspray/transfer"
)

// Instant is a point in time: the duration since the owner's start.
type Instant = timer.Instant

// Bounds of the questions.
const (
	maxAsked = 1024                   // layouts asked for at a time
	Retry    = 200 * time.Millisecond // between two questions to a peer that does not answer
)

// ErrNoAnswer is wrapped by the error of an answer if the peer did not answer: the layout may still
// exist.
var ErrNoAnswer = errors.New("no answer")

// Name names a layout of a peer.
type Name struct {
	Boot     transfer.Boot
	Geometry [32]byte
}

// Table has the layouts that peers were asked for.
type Table struct {
	*core.Core
	describe func(Name)
	asked    map[Name]*asking
}

// asking is the question for one layout.
type asking struct {
	end   Instant // of asking a peer that does not answer
	retry *timer.Timer
}

// New returns an empty table, which calls describe to ask for a layout.
func New(c *core.Core, describe func(Name)) *Table {
	return &Table{Core: c, describe: describe, asked: map[Name]*asking{}}
}

// Ask asks for a layout. It returns false if too many layouts are asked for already.
func (t *Table) Ask(now Instant, name Name) bool {
	if t.asked[name] != nil {
		return true
	}
	if len(t.asked) >= maxAsked {
		return false
	}
	t.asked[name] = &asking{end: now + t.Cfg.MatchTimeout,
		retry: timer.New(func(Instant) { t.describe(name) })}
	t.describe(name)
	return true
}

// Asked reports whether a layout is asked for.
func (t *Table) Asked(name Name) bool { return t.asked[name] != nil }

// Again asks once more in a while. It returns false if the peer had its time.
func (t *Table) Again(now Instant, name Name) bool {
	q := t.asked[name]
	if q == nil || now >= q.end {
		return false
	}
	t.Agenda.Arm(q.retry, now+Retry)
	return true
}

// Done ends the question for a layout. It returns false if there is none.
func (t *Table) Done(name Name) bool {
	q := t.asked[name]
	if q == nil {
		return false
	}
	delete(t.asked, name)
	t.Agenda.Disarm(q.retry)
	return true
}

// Of returns what a peer is asked for, in order.
func (t *Table) Of(boot transfer.Boot) []Name {
	var all []Name
	for name := range t.asked {
		if name.Boot == boot {
			all = append(all, name)
		}
	}
	slices.SortFunc(all, func(a, b Name) int { return bytes.Compare(a.Geometry[:], b.Geometry[:]) })
	return all
}

// Len counts the layouts asked for.
func (t *Table) Len() int { return len(t.asked) }
