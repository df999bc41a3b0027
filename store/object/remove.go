// SPDX-License-Identifier: Apache-2.0

package object

import (
	"context"
	"fmt"

	"github.com/kvspray/kvspray/store/page"
)

// Remove forgets all pages of an owner, durably: after it returned nil, none of them comes back,
// whatever happens to the objects. After an error they may come back when their objects are found,
// unless this process writes its ledger before. The objects are deleted in the background.
func (o *Owner) Remove(ctx context.Context) error { return o.t.RemoveSpace(ctx, o.id) }

// RemoveSpace is Remove for a namespace that may have no owner: one whose objects are not found
// yet, or that has none.
func (t *Tier) RemoveSpace(ctx context.Context, id page.ID) error {
	t.book.Lock()
	defer t.book.Unlock()
	t.mu.Lock()
	o := t.owners[id]
	if o == nil && t.state == ready {
		t.mu.Unlock()
		return nil
	}
	before := uint64(everyLife)
	if t.state != opening {
		before = t.nextLifeLocked()
	}
	t.ledger.removed[id] = before
	if o != nil {
		t.pages.RemoveOwner(o.number)
		if b := o.builder; b != nil {
			t.sealLocked(b)
		}
	}
	err := t.forgetRemovalsLocked()
	if err != nil { // it is the one too many: the ledger was within the bound before
		delete(t.ledger.removed, id)
	}
	switch {
	case t.state == opening:
		err = fmt.Errorf("store.object: namespace %s: remove: %w", id, ErrAway)
	case t.state == stopped:
		err = t.problem
	}
	t.mu.Unlock()
	if err != nil {
		return err
	}
	return t.writeLedger(ctx, t.c.Timeouts.Small, Condition{Tag: t.tag})
}

// forgetRemovalsLocked makes room in a full ledger. A removal can go when no object is known that
// it is about, and all of earlier starts are known.
func (t *Tier) forgetRemovalsLocked() error {
	if len(t.ledger.removed) <= maxRemovals {
		return nil
	}
	needed := map[page.ID]bool{}
	for _, x := range t.objects {
		if x != nil && t.removedLocked(x.owner.id, x.life) {
			needed[x.owner.id] = true
		}
	}
	if t.state == ready {
		// The latest ones stay: a request of a process that was killed can still be on its way.
		for len(t.ledger.removed) > maxRemovals {
			var oldest page.ID
			least := uint64(everyLife)
			for id, before := range t.ledger.removed {
				if !needed[id] && before < least {
					oldest, least = id, before
				}
			}
			if least == everyLife {
				break
			}
			delete(t.ledger.removed, oldest)
		}
	}
	if len(t.ledger.removed) > maxRemovals {
		return fmt.Errorf("store.object: %d namespaces were removed whose objects are not deleted "+
			"yet; try again later, and see whether the credentials may delete objects", maxRemovals)
	}
	return nil
}
