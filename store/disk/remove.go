// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"github.com/kvspray/kvspray/store/catalog"
	"github.com/kvspray/kvspray/store/page"
)

// Remove forgets all pages of a namespace, durably: after it returned nil, none of them comes back,
// whatever the index had of them, and whatever happens to the disk's segments. After an error they
// may come back with the next start. Where the ledger has no era of the namespace there is nothing
// to do, and no I/O.
func (t *Tier) Remove(id page.ID) error {
	t.mu.Lock()
	_, has := t.ledger.eras[id]
	t.removes = t.removes || has
	t.endEraLocked(id)
	change := t.ledger.changes
	n, ok := t.ids[id]
	if ok {
		t.owners[n].emptying++
	}
	t.mu.Unlock()
	if ok {
		t.empty(n)
	}
	return t.writeEras(change)
}

// Forget gives up all pages of an owner. They are found again by the next start, unless DropOwner
// follows.
func (t *Tier) Forget(n uint16) {
	t.mu.Lock()
	o := t.owners[n]
	if o != nil {
		o.emptying++
	}
	t.mu.Unlock()
	if o != nil {
		t.empty(n)
	}
}

// empty forgets what an owner has, and ends one count of its emptying. Until then nothing is
// written for it: all its pages are of one era.
func (t *Tier) empty(n uint16) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for r := (catalog.Removing{}); !t.pages.RemoveSome(n, &r); {
		t.mu.Unlock()
		t.mu.Lock()
	}
	t.owners[n].emptying--
}

// endEraLocked has no page of a namespace count any more, from the next write of the ledger on.
func (t *Tier) endEraLocked(id page.ID) {
	if e, ok := t.ledger.eras[id]; ok {
		delete(t.ledger.eras, id)
		delete(t.ledger.count, e.era)
		t.ledger.changes++
	}
}

// spaceLocked is what an owner's pages have in their tables; false: it takes no pages now.
func (t *Tier) spaceLocked(o *owner) (s space, ok bool) {
	e, ok := t.ledger.eras[o.id]
	return space{e.era, o.pageBytes}, ok && o.emptying == 0
}

// isNowLocked reports whether pages of a space count.
func (t *Tier) isNowLocked(o *owner, s space) bool {
	now, ok := t.spaceLocked(o)
	return ok && now == s
}

// enterEra returns what an owner's next pages have in their tables, once the ledger has it.
func (t *Tier) enterEra(n uint16, wanted func() bool) (*owner, space, error) {
	t.mu.Lock()
	o := t.owners[n]
	if o.emptying > 0 || wanted != nil && !wanted() {
		t.mu.Unlock()
		return o, space{}, ErrRemoved
	}
	e, ok := t.ledger.eras[o.id]
	if !ok {
		t.roomForEraLocked()
		t.ledger.changes++
		e = era{page.NewEra(), t.ledger.changes}
		t.ledger.eras[o.id], t.ledger.count[e.era] = e, true
	}
	s, _ := t.spaceLocked(o)
	durable := e.since <= t.ledger.durable
	t.mu.Unlock()
	if durable {
		return o, s, nil
	}
	return o, s, t.writeEras(e.since)
}

// roomForEraLocked has a full ledger give up a namespace whose pages this start has not found.
// There is one: each owner has a number, and the one that needs room has no era.
func (t *Tier) roomForEraLocked() {
	if len(t.ledger.eras) < maxSpaces {
		return
	}
	for id := range t.ledger.eras {
		if _, ok := t.ids[id]; !ok {
			t.endEraLocked(id)
			return
		}
	}
}
