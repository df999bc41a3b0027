// Package removal keeps a node's list of removals of namespaces in the whole cluster.
//
// A removal has a stamp, and of two removals of one namespace the one with the higher stamp is the
// later one. A node learns of a removal, removes its pages of the namespace, and has then applied
// the removal. Pages that it stores afterwards are later, and this removal does not remove them.
// So the applied stamp is the namespace's generation at this node: all its pages are of that
// generation or a later one.
//
// A stamp is the remover's time in nanoseconds, raised above all stamps that the remover has of the
// namespace. Times decide what is forgotten, and in which order; nothing else depends on clocks.
//
// Invariants: applied <= known, and neither falls while the entry lives. A List has at most Max
// entries, and one goes only when it is applied. It does not lock, does no I/O and starts no
// goroutine.
package removal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"time"

	"github.com/kvspray/kvspray/store/page"
)

// Bounds.
const (
	// Max is how many namespaces a List has.
	Max = 1024
	// Keep is how long a removal is remembered.
	Keep = 30 * 24 * time.Hour
	// MaxAhead is how far a stamp may lie in the future: beyond it, the sender's clock is wrong.
	MaxAhead = 10 * time.Minute
)

// spread is what a stamp is raised by at most: two removers that raise the same one differ.
const spread = 1 << 20

// Removal is one removal of a namespace.
type Removal struct {
	Space page.ID
	Stamp uint64
}

type entry struct{ known, applied uint64 }

// List is one node's list of removals.
type List struct{ entries map[page.ID]entry }

// NewList returns a list without removals.
func NewList() *List { return &List{entries: map[page.ID]entry{}} }

// Known is the latest removal of a namespace; 0: none.
func (l *List) Known(id page.ID) uint64 { return l.entries[id].known }

// Applied is the latest removal of a namespace that was applied; 0: none.
func (l *List) Applied(id page.ID) uint64 { return l.entries[id].applied }

// Len is how many namespaces the list has.
func (l *List) Len() int { return len(l.entries) }

// Removals that a List does not take.
var (
	ErrAhead = fmt.Errorf("the removal's time is more than %v ahead of this node's clock; set the "+
		"clocks of both nodes", MaxAhead)
	ErrFull = fmt.Errorf("this node keeps removals of %d namespaces, its limit, and can give up "+
		"none: no earlier one is done; try again later", Max)
)

// ErrObjects: memory and disk of a store have removed a namespace, and its object tier has failed.
var ErrObjects = errors.New("the object store has not removed the namespace")

// Learn takes a removal, and reports whether it is new. One that is too old to be remembered is
// not. A full list forgets the earliest one that is applied for it.
func (l *List) Learn(r Removal, now time.Time) (isNew bool, err error) {
	at := stampAt(now)
	l.Forget(now)
	e, ok := l.entries[r.Space]
	switch {
	case r.Stamp <= e.known:
		return false, nil
	case r.Stamp > max(at+uint64(MaxAhead), e.known+1+spread): // Next may have raised a known one
		return false, ErrAhead
	case r.Stamp+uint64(Keep) < at:
		return false, nil
	case !ok && len(l.entries) == Max && !l.drop(r.Stamp):
		return false, ErrFull
	}
	e.known = r.Stamp
	l.entries[r.Space] = e
	return true, nil
}

// Full reports whether another namespace takes the place of one that the list has.
func (l *List) Full(now time.Time) bool {
	l.Forget(now)
	return len(l.entries) == Max
}

// Next is a stamp for a removal now, later than all that the node has of the namespace.
func (l *List) Next(id page.ID, now time.Time) uint64 {
	before := l.entries[id].known
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
	next := &List{maps.Clone(l.entries)}
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

// Forget drops what is older than Keep. One that is not applied stays.
func (l *List) Forget(now time.Time) {
	at := stampAt(now)
	maps.DeleteFunc(l.entries, func(_ page.ID, e entry) bool {
		return e.known+uint64(Keep) < at && e.applied == e.known
	})
}

// drop forgets the earliest removal that is applied, if it is earlier than a stamp.
func (l *List) drop(stamp uint64) bool {
	var oldest page.ID
	lowest := stamp
	for id, e := range l.entries {
		if e.applied == e.known && e.known < lowest {
			oldest, lowest = id, e.known
		}
	}
	if lowest == stamp {
		return false
	}
	delete(l.entries, oldest)
	return true
}

// Of the encoding: a head, and a part for each entry. All numbers are little-endian.
const (
	magic      = "KVSPRMV\x01"
	headBytes  = 16
	entryBytes = 48
	// MaxBytes bounds an encoded list.
	MaxBytes = headBytes + Max*entryBytes
)

// Encode returns the list as bytes for Parse.
func (l *List) Encode() []byte {
	le := binary.LittleEndian
	b := make([]byte, 0, headBytes+len(l.entries)*entryBytes)
	b = append(b, magic...)
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
	if n := le.Uint64(b[8:]); n > Max || uint64(len(b)) != headBytes+n*entryBytes {
		return nil, errForm
	}
	for p := b[headBytes:]; len(p) > 0; p = p[entryBytes:] {
		e := entry{le.Uint64(p[32:]), le.Uint64(p[40:])}
		if e.applied > e.known {
			return nil, errForm
		}
		l.entries[page.ID(p)] = e
	}
	return l, nil
}
