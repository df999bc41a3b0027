package disk

import (
	"github.com/kvspray/kvspray/store/catalog"
	"github.com/kvspray/kvspray/store/page"
)

// Remove removes all pages of a namespace, durably: after it returned nil, none of them is found
// again, also if the index lacked it, and whatever happens to the disk's segments. After an error
// the next start may find them again. If the ledger has no era of the namespace, Remove does no
// I/O.
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

// Forget drops all pages of an owner. The next start finds them again, unless DropOwner follows.
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

// empty drops all pages of an owner, and ends one count of its emptying. Until then nothing is
// written for the owner, so all its pages are of one era.
func (t *Tier) empty(n uint16) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for r := (catalog.Removing{}); !t.pages.RemoveSome(n, &r); {
		t.mu.Unlock()
		t.mu.Lock()
	}
	t.owners[n].emptying--
}

// endEraLocked ends the era of a namespace: from the next write of the ledger on, none of its pages
// counts.
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

// roomForEraLocked removes a namespace from a full ledger: one without an owner. There is one,
// because each owner has a number, and the owner that needs room has no era.
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
