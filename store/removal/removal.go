// SPDX-License-Identifier: Apache-2.0

// Package removal is what a node knows of the removals of namespaces in the whole cluster.
//
// A removal has a stamp, and of two removals of one namespace the one with the higher stamp is the
// later one. A node knows a removal, then removes its pages of the namespace, and then has applied
// it. What it stores afterwards is later than the removal, and is not removed by it again. So the
// applied stamp is the namespace's generation at this node: all its pages are of that generation or
// a later one.
//
// A stamp is the remover's time in nanoseconds, raised above all that it knows. The time orders
// removals of which one is forgotten when the other is made; nothing else depends on clocks.
//
// Invariants: applied <= known, and neither falls while the entry lives. A List has at most Max
// entries; the lowest stamps go first, and stamps up to the highest that went are not taken again,
// since they may have been applied. It does not lock, does no I/O and starts no goroutine.
package removal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"time"

	"github.com/kvspray/kvspray/store/page"
)

// Bounds.
const (
	// Max is how many namespaces a List has.
	Max = 1024
	// Keep is how long a removal is remembered. A node that was away for longer may have missed some.
	Keep = 30 * 24 * time.Hour
	// MaxAhead is how far a stamp may lie in the future: beyond it, the sender's clock is wrong.
	MaxAhead = 24 * time.Hour
)

// spread is what a stamp is raised by at most: two removers that raise the same one differ.
const spread = 1 << 20

// Removal is one removal of a namespace.
type Removal struct {
	Space page.ID
	Stamp uint64
}

type entry struct{ known, applied uint64 }

// List is what one node knows.
type List struct {
	entries map[page.ID]entry
	floor   uint64 // stamps up to this one are not taken
	seen    uint64 // when the node was among others last, which have sent it all removals; 0: never
}

// NewList returns a list without removals.
func NewList() *List { return &List{entries: map[page.ID]entry{}} }

// Known is the latest removal of a namespace; 0: none.
func (l *List) Known(id page.ID) uint64 { return l.entries[id].known }

// Applied is the latest removal of a namespace that was applied; 0: none.
func (l *List) Applied(id page.ID) uint64 { return l.entries[id].applied }

// Floor is a stamp below which the list may have forgotten removals.
func (l *List) Floor() uint64 { return l.floor }

// See notes that the node is among others, as Missed needs it.
func (l *List) See(now time.Time) { l.seen = stampAt(now) }

// Missed reports whether the node may have missed a removal that others have forgotten since: it
// was away for longer than Keep, or another one's list had no room. floor is the other one's.
func (l *List) Missed(floor uint64, now time.Time) bool {
	return l.seen != 0 && (l.seen < floor || l.seen+uint64(Keep) < stampAt(now))
}

// Len is how many namespaces the list has.
func (l *List) Len() int { return len(l.entries) }

// ErrAhead is a stamp of a clock that is wrong.
var ErrAhead = fmt.Errorf("the removal's time is more than %v ahead of this node's clock; set the "+
	"clocks of both nodes", MaxAhead)

// Learn takes a removal, and reports whether it is new. One that is too old to be remembered is
// not.
func (l *List) Learn(r Removal, now time.Time) (isNew bool, err error) {
	at := stampAt(now)
	l.forget(at)
	switch {
	case r.Stamp > at+uint64(MaxAhead):
		return false, ErrAhead
	case r.Stamp <= l.entries[r.Space].known, r.Stamp <= l.floor,
		r.Stamp+uint64(Keep) < at:
		return false, nil
	}
	e := l.entries[r.Space]
	e.known = r.Stamp
	l.entries[r.Space] = e
	l.bound()
	return l.entries[r.Space].known == r.Stamp, nil
}

// Next is a stamp for a removal now, later than all that the node knows of the namespace.
func (l *List) Next(id page.ID, now time.Time) uint64 {
	before := max(l.entries[id].known, l.floor)
	if at := stampAt(now); at > before {
		return at
	}
	return before + 1 + rand.Uint64N(spread)
}

// Apply notes that the pages of a namespace were removed after the removal was known.
func (l *List) Apply(r Removal) {
	e, ok := l.entries[r.Space]
	if ok && r.Stamp <= e.known {
		e.applied = max(e.applied, r.Stamp)
		l.entries[r.Space] = e
	}
}

// After is the encoded list as it is once these removals are applied.
func (l *List) After(applied []Removal) []byte {
	next := &List{entries: maps.Clone(l.entries), floor: l.floor, seen: l.seen}
	for _, r := range applied {
		next.Apply(r)
	}
	return next.Encode()
}

// Pending are the removals that are not applied yet.
func (l *List) Pending() (out []Removal) {
	for id, e := range l.entries {
		if e.applied < e.known {
			out = append(out, Removal{id, e.known})
		}
	}
	return out
}

// All are the removals that are known.
func (l *List) All() []Removal {
	out := make([]Removal, 0, len(l.entries))
	for id, e := range l.entries {
		out = append(out, Removal{id, e.known})
	}
	return out
}

func stampAt(t time.Time) uint64 { return uint64(max(0, t.UnixNano())) }

// forget drops what is older than Keep. One that is not applied stays.
func (l *List) forget(now uint64) {
	maps.DeleteFunc(l.entries, func(_ page.ID, e entry) bool {
		return e.known+uint64(Keep) < now && e.applied == e.known
	})
}

// bound drops the removals with the lowest stamps, those that are applied before others.
func (l *List) bound() {
	for len(l.entries) > Max {
		var oldest page.ID
		least, applied := uint64(math.MaxUint64), false
		for id, e := range l.entries {
			done := e.applied == e.known
			if done && !applied || done == applied && e.known < least {
				oldest, least, applied = id, e.known, done
			}
		}
		delete(l.entries, oldest)
		l.floor = max(l.floor, least)
	}
}

// Of the encoding: a head, and a part for each entry. All numbers are little-endian.
const (
	magic      = "KVSPRMV\x01"
	headBytes  = 32
	entryBytes = 48
	// MaxBytes bounds an encoded list.
	MaxBytes = headBytes + Max*entryBytes
)

// Encode returns the list as bytes for Parse.
func (l *List) Encode() []byte {
	le := binary.LittleEndian
	b := make([]byte, 0, headBytes+len(l.entries)*entryBytes)
	b = append(b, magic...)
	b = le.AppendUint64(b, l.floor)
	b = le.AppendUint64(b, l.seen)
	b = le.AppendUint64(b, uint64(len(l.entries)))
	for id, e := range l.entries {
		b = append(b, id[:]...)
		b = le.AppendUint64(b, e.known)
		b = le.AppendUint64(b, e.applied)
	}
	return b
}

var errForm = errors.New("removals: not a list of this release")

// Parse is the reverse of Encode. Nothing is a list without removals.
func Parse(b []byte) (*List, error) {
	l := NewList()
	if len(b) == 0 {
		return l, nil
	}
	le := binary.LittleEndian
	if len(b) < headBytes || string(b[:8]) != magic {
		return nil, errForm
	}
	if n := le.Uint64(b[24:]); n > Max || uint64(len(b)) != headBytes+n*entryBytes {
		return nil, errForm
	}
	l.floor, l.seen = le.Uint64(b[8:]), le.Uint64(b[16:])
	for p := b[headBytes:]; len(p) > 0; p = p[entryBytes:] {
		e := entry{le.Uint64(p[32:]), le.Uint64(p[40:])}
		if e.applied > e.known {
			return nil, errForm
		}
		l.entries[page.ID(p)] = e
	}
	return l, nil
}
