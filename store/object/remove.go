package object

import (
	"context"
	"fmt"

	"github.com/kvspray/kvspray/store/catalog"
	"github.com/kvspray/kvspray/store/page"
)

// Remove forgets all pages of a namespace, durably: after it returned nil, none of them comes back,
// whatever happens to the objects. After an error they may come back when their objects are found,
// unless this process writes its ledger before. The objects are deleted in the background. A
// namespace without an owner has no objects, or they are not found yet. Where the object store has
// no era of it there is nothing to do, and no request.
func (t *Tier) Remove(ctx context.Context, id page.ID) error {
	t.mu.Lock()
	if t.state == opening {
		defer t.mu.Unlock()
		if len(t.pending) < maxSpaces {
			t.pending[id] = true
		}
		return fmt.Errorf("store.object: namespace %s: remove: %w", id, ErrAway)
	}
	t.endEraLocked(id)
	change := max(t.ledger.ended[id], t.ledger.endedToo)
	if o := t.owners[id]; o != nil {
		if o.builder != nil {
			t.sealLocked(o.builder)
		}
		t.emptyLocked(o)
	}
	stopped, problem := t.state == stopped, t.problem
	t.mu.Unlock()
	if stopped {
		return problem
	}
	return t.writeEras(ctx, change)
}

// Has reports whether a namespace may have pages here, found or not.
func (t *Tier) Has(id page.ID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, ok := t.ledger.eras[id]
	return ok || t.state == opening
}

// emptyLocked drops all pages of an owner, and releases mu meanwhile. Until it returns the owner
// takes no page, so all its pages are of one era.
func (t *Tier) emptyLocked(o *Owner) {
	o.emptying++
	for r := (catalog.Removing{}); !t.pages.RemoveSome(o.number, &r); {
		t.mu.Unlock()
		t.mu.Lock()
	}
	o.emptying--
}

// endEraLocked ends the era of a namespace: from the next write of the ledger on, none of its
// objects counts.
func (t *Tier) endEraLocked(id page.ID) {
	if _, ok := t.ledger.eras[id]; ok {
		delete(t.ledger.eras, id)
		t.ledger.changes++
		if len(t.ledger.ended) == maxSpaces {
			t.ledger.endedToo = t.ledger.changes - 1
			clear(t.ledger.ended)
		}
		if t.ledger.ended == nil {
			t.ledger.ended = map[page.ID]uint64{}
		}
		t.ledger.ended[id] = t.ledger.changes
	}
}

// eraLocked is the era of what an owner takes now, a new one if it has none; false: it takes
// nothing.
func (t *Tier) eraLocked(o *Owner) (e era, ok bool) {
	if o.emptying > 0 {
		return era{}, false
	}
	if e, ok = t.ledger.eras[o.id]; !ok {
		t.roomForEraLocked()
		t.ledger.changes++
		e = era{page.NewEra(), t.ledger.changes}
		t.ledger.eras[o.id] = e
	}
	return e, true
}

// roomForEraLocked removes a namespace without an owner from a full ledger. There is one, because
// the owner that needs room has no era.
func (t *Tier) roomForEraLocked() {
	if len(t.ledger.eras) < maxSpaces {
		return
	}
	for id := range t.ledger.eras {
		if t.owners[id] == nil {
			t.endEraLocked(id)
			return
		}
	}
}

// byEra returns the namespaces.
func (l *ledger) byEra() map[page.Era]page.ID {
	out := make(map[page.Era]page.ID, len(l.eras))
	for id, e := range l.eras {
		out[e.era] = id
	}
	return out
}
