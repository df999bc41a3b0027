// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"encoding/binary"
	"fmt"

	"github.com/kvspray/kvspray/store/offheap"
	"github.com/kvspray/kvspray/store/page"
)

// removal means that pages of a namespace in segments of lives before this one were removed.
type removal struct {
	id     page.ID
	before uint64
}

// ledger is what a removal rests on, whatever happens to the segments. It holds the removals, and a
// bound of the lives that were given to segments.
//
// A removal wins over everything that is found in the segments, because
//   - each table has the number of the life that it was written in, and a page counts only if its
//     namespace was not removed after that life began;
//   - no life's number is given twice, whatever the headers of segments look like: each start takes
//     numbers from a bound on that the ledger had, and the bound is durable before one is used;
//   - a removal is forgotten only when no segment can hold an earlier life. A segment whose header
//     cannot be read can hold any.
//
// Both copies are durable before a removal returns and before a start uses a life, so damage to one
// of them loses nothing. The copy that is older, or not whole, is written first.
type ledger struct {
	first  uint64    // life: those of this start follow it
	limit  uint64    // life: those of this start are below
	copies [2]uint64 // the generation of each copy that is known to be durable; 0: none
	last   uint64    // generation that was written, or begun
}

// livesPerStart is how many lives one start may give to segments. 2^40 segments of the smallest
// size are 72 petabytes, and there can be 2^24 starts.
const livesPerStart = 1 << 40

// Of the ledger on the first device.
const (
	maxRemovals  = 1024
	removalBytes = 40
	ledgerBytes  = (headerBytes + maxRemovals*removalBytes + block - 1) / block * block
)

func ledgerPlace(copy int) int64 { return ledgerAt + int64(copy)*(ledgerBytes+block) }

func encodeLedger(b []byte, store storeID, generation, limit uint64, removed []removal) {
	le := binary.LittleEndian
	copy(b, magicLedger)
	copy(b[16:], store[:])
	le.PutUint64(b[32:], generation)
	le.PutUint32(b[40:], uint32(len(removed)))
	le.PutUint64(b[48:], limit)
	for i, r := range removed {
		p := b[headerBytes+i*removalBytes:]
		copy(p, r.id[:])
		le.PutUint64(p[32:], r.before)
	}
	seal(b[:ledgerBytes])
}

// parseLedger returns generation 0 where there is no whole ledger of the store.
func parseLedger(b []byte, store storeID) (generation, limit uint64, removed []removal) {
	le := binary.LittleEndian
	if len(b) < ledgerBytes || !sealed(b[:ledgerBytes], magicLedger) ||
		storeID(b[16:32]) != store || le.Uint32(b[40:]) > maxRemovals {
		return 0, 0, nil
	}
	for i := range int(le.Uint32(b[40:])) {
		p := b[headerBytes+i*removalBytes:]
		removed = append(removed, removal{page.ID(p[:32]), le.Uint64(p[32:])})
	}
	return le.Uint64(b[32:]), le.Uint64(b[48:]), removed
}

// readLedger reads the newer copy, and makes lives for this start durable in both.
func (t *Tier) readLedger() error {
	newest, err := t.loadLedger()
	if err != nil {
		return err
	}
	g, l := &t.ledger, t.logs[0]
	if g.first > 1<<64-1-livesPerStart {
		return fmt.Errorf("store.disk path %s: its record of removals is %w", l.path, errDamaged)
	}
	g.limit, g.last = g.first+livesPerStart, newest
	return t.writeLedger()
}

// loadLedger reads the newer copy, and returns its generation.
func (t *Tier) loadLedger() (newest uint64, err error) {
	buf, err := offheap.New[byte](ledgerBytes)
	if err != nil {
		return 0, err
	}
	defer buf.Free()
	g, l := &t.ledger, t.logs[0]
	for i := range g.copies {
		if l.file.ReadAt(buf.Elems(), ledgerPlace(i)) != nil {
			t.stats.Damaged++
			continue // the other copy has all that a removal was acknowledged for
		}
		generation, limit, removed := parseLedger(buf.Elems(), t.id)
		g.copies[i] = generation
		if generation <= newest {
			continue
		}
		newest, g.first = generation, limit
		clear(t.removed)
		for _, r := range removed {
			t.removed[r.id] = r.before
		}
	}
	if newest == 0 {
		if err := t.checkUnused(); err != nil {
			return 0, fmt.Errorf("store.disk path %s: %w", l.path, err)
		}
		g.first = unknownLife + 1
	}
	return newest, nil
}

// checkUnused returns an error if any segment was used: then there was a ledger, and without it
// removed pages would come back.
func (t *Tier) checkUnused() error {
	for _, l := range t.logs {
		for i := range uint32(len(l.segments)) {
			if l.life(i) > unknownLife {
				return fmt.Errorf("both copies of its record of removals are %w; name another "+
					"path, or empty it yourself: its pages are lost", errDamaged)
			}
		}
	}
	return nil
}

// writeLedger makes the removals and the bound of lives durable. It is called at the start, and by
// the one removal that holds all logs.
func (t *Tier) writeLedger() error {
	buf, err := offheap.New[byte](ledgerBytes)
	if err != nil {
		return err
	}
	defer buf.Free()
	t.mu.Lock()
	removed := make([]removal, 0, len(t.removed))
	for id, before := range t.removed {
		removed = append(removed, removal{id, before})
	}
	t.mu.Unlock()
	g, l := &t.ledger, t.logs[0]
	g.last++
	encodeLedger(buf.Elems(), t.id, g.last, g.limit, removed)
	order := [2]int{0, 1}
	if g.copies[0] > g.copies[1] {
		order = [2]int{1, 0}
	}
	for _, i := range order {
		g.copies[i] = 0 // until it is durable it may be anything
		err := l.file.WriteAt([][]byte{buf.Elems()}, ledgerPlace(i))
		if err == nil {
			err = l.file.Sync()
		}
		if err != nil {
			return fmt.Errorf("store.disk path %s: record of removals: %w", l.path, err)
		}
		g.copies[i] = g.last
	}
	return nil
}
