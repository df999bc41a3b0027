// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"maps"

	"github.com/kvspray/kvspray/store/page"
)

// RemoveOwner forgets all pages of an owner, durably: after it returned, none of them comes back,
// whatever happens to the disk's segments. After an error they may come back with the next start.
func (t *Tier) RemoveOwner(id uint16) error {
	for _, l := range t.logs { // in one order; only a removal holds two
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.at >= 0 {
			l.close() // what is written later is in a later life
		}
	}
	t.mu.Lock()
	o := t.owners[id]
	o.removals++
	t.pages.RemoveOwner(id)
	t.removed[o.id] = t.seq + 1
	t.mu.Unlock()
	if err := t.forget(); err != nil {
		return err
	}
	return t.writeLedger()
}

// forget drops the removals that no segment needs any more. Where the ledger has no room for the
// others, it empties the segments of the oldest lives. The caller holds all logs.
func (t *Tier) forget() error {
	for {
		t.mu.Lock()
		oldest := t.seq + 1
		var l *log
		var seg uint32
		for _, of := range t.logs {
			for i := range of.segments {
				if s := &of.segments[i]; s.seq != neverUsed && s.seq < oldest {
					oldest, l, seg = s.seq, of, uint32(i)
				}
			}
		}
		maps.DeleteFunc(t.removed, func(_ page.ID, before uint64) bool { return before <= oldest })
		fits := len(t.removed) <= maxRemovals
		t.mu.Unlock()
		if fits {
			return nil
		}
		if err := l.renew(seg); err != nil {
			return err
		}
	}
}

// renew moves the pages of a segment, and gives it a new life without any.
func (l *log) renew(seg uint32) error {
	t := l.t
	look := func() (seq uint64, isFull bool) {
		t.mu.Lock()
		defer t.mu.Unlock()
		return l.segments[seg].seq, l.segments[seg].state == full
	}
	seq, isFull := look()
	if isFull {
		if err := l.makeFree(); err != nil {
			return err
		}
		var now uint64
		if now, isFull = look(); now != seq {
			return nil // making room has used it
		}
	}
	if isFull {
		if err := l.empty(seg, seq, false); err != nil {
			return err
		}
	}
	return l.newLife(seg)
}
