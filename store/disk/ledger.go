package disk

import (
	"encoding/binary"
	"fmt"
	"maps"
	"sync"

	"github.com/kvspray/kvspray/store/offheap"
	"github.com/kvspray/kvspray/store/page"
)

// era is that of a namespace.
type era struct {
	era   page.Era
	since uint64 // the change of the ledger that began it; 0: one of an earlier start
}

// ledger decides which pages count. It has the era of each namespace, and a bound of the lives that
// segments have got.
//
// A removal holds whatever the segments contain, because
//   - each table names eras and no namespaces, and a page counts only if the ledger has its era;
//   - an era is random, and never begins again;
//   - it is durable in the ledger before a page has it, so an era that the ledger lacks was
//     removed, replaced or lost. A removal needs no entry of its own.
//
// Lives distinguish the groups of a segment from those that it had before. No number is used twice,
// whatever the headers contain: each start takes numbers from the ledger's bound on, and makes a
// new bound durable before it uses one.
//
// Both copies are durable before a removal returns and before a start uses a life, so damage to one
// of them loses nothing. The copy that is older, or not whole, is written first.
type ledger struct {
	first uint64 // life: those of this start follow it
	limit uint64 // life: those of this start are below

	// io is held while the ledger is written, by calls that wait for it anyway. It is taken before
	// Tier.mu, and after log.mu by none.
	io     sync.Mutex
	copies [2]uint64 // the generation of each copy that is known to be durable; 0: none
	last   uint64    // generation that was written, or begun

	// guarded by Tier.mu
	eras    map[page.ID]era
	count   map[page.Era]bool // the same eras
	changes uint64            // of eras since the start
	durable uint64            // changes that both copies have
}

// byEra returns the namespaces.
func (g *ledger) byEra() map[page.Era]page.ID {
	out := make(map[page.Era]page.ID, len(g.eras))
	for id, e := range g.eras {
		out[e.era] = id
	}
	return out
}

// livesPerStart is how many lives one start may give to segments. 2^40 segments of the smallest
// size are 72 petabytes, and there can be 2^24 starts.
const livesPerStart = 1 << 40

// Of the ledger on the first device.
const (
	eraBytes    = 48
	ledgerBytes = (headerBytes + maxSpaces*eraBytes + block - 1) / block * block
)

func ledgerPlace(copy int) int64 { return ledgerAt + int64(copy)*(ledgerBytes+block) }

func encodeLedger(b []byte, store storeID, generation, limit uint64, eras map[page.ID]era) {
	le := binary.LittleEndian
	copy(b, magicLedger)
	copy(b[16:], store[:])
	le.PutUint64(b[32:], generation)
	le.PutUint32(b[40:], uint32(len(eras)))
	le.PutUint64(b[48:], limit)
	p := b[headerBytes:]
	for id, e := range eras {
		copy(p, id[:])
		copy(p[32:], e.era[:])
		p = p[eraBytes:]
	}
	seal(b[:ledgerBytes])
}

// parseLedger returns generation 0 where there is no whole ledger of the store.
func parseLedger(b []byte, store storeID) (generation, limit uint64, eras map[page.ID]era) {
	le := binary.LittleEndian
	eras = map[page.ID]era{}
	if len(b) < ledgerBytes || !sealed(b[:ledgerBytes], magicLedger) ||
		storeID(b[16:32]) != store || le.Uint32(b[40:]) > maxSpaces {
		return 0, 0, eras
	}
	for i := range int(le.Uint32(b[40:])) {
		p := b[headerBytes+i*eraBytes:]
		eras[page.ID(p[:32])] = era{era: page.Era(p[32:])}
	}
	return le.Uint64(b[32:]), le.Uint64(b[48:]), eras
}

// readLedger reads the newer copy, and makes lives for this start durable in both.
func (t *Tier) readLedger() error {
	newest, err := t.loadLedger()
	if err != nil {
		return err
	}
	g, l := &t.ledger, t.logs[0]
	if g.first > 1<<64-1-livesPerStart {
		return fmt.Errorf("store.disk path %s: its record of namespaces is %w", l.path, errDamaged)
	}
	g.limit, g.last = g.first+livesPerStart, newest
	g.count = map[page.Era]bool{}
	for _, e := range g.eras {
		g.count[e.era] = true
	}
	g.io.Lock()
	defer g.io.Unlock()
	return t.writeLedger(g.eras)
}

// loadLedger reads the newer copy, and returns its generation.
func (t *Tier) loadLedger() (newest uint64, err error) {
	buf, err := offheap.New[byte](ledgerBytes)
	if err != nil {
		return 0, err
	}
	defer buf.Free()
	g, l := &t.ledger, t.logs[0]
	g.eras = map[page.ID]era{}
	for i := range g.copies {
		if l.file.ReadAt(buf.Elems(), ledgerPlace(i)) != nil {
			t.stats.Damaged++
			continue // the other copy has all that was acknowledged
		}
		generation, limit, eras := parseLedger(buf.Elems(), t.id)
		g.copies[i] = generation
		if generation <= newest {
			continue
		}
		newest, g.first, g.eras = generation, limit, eras
	}
	if newest == 0 {
		if err := t.checkUnused(); err != nil {
			return 0, fmt.Errorf("store.disk path %s: %w", l.path, err)
		}
		g.first = unknownLife + 1
	}
	return newest, nil
}

// checkUnused returns an error if any segment was used: then there was a ledger, and without it no
// page counts, and lives would be given again.
func (t *Tier) checkUnused() error {
	for _, l := range t.logs {
		for i := range uint32(len(l.segments)) {
			if l.life(i) > unknownLife {
				return fmt.Errorf("both copies of its record of namespaces are %w; name another "+
					"path, or empty it yourself: its pages are lost", errDamaged)
			}
		}
	}
	return nil
}

// writeEras returns once both copies have these changes of eras. One write does for all callers
// that wait.
func (t *Tier) writeEras(changes uint64) error {
	g := &t.ledger
	g.io.Lock()
	defer g.io.Unlock()
	t.mu.Lock()
	if g.durable >= changes {
		t.mu.Unlock()
		return nil
	}
	eras, now := maps.Clone(g.eras), g.changes
	t.mu.Unlock()
	if err := t.writeLedger(eras); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	g.durable = now
	return nil
}

// writeLedger makes eras and the bound of lives durable. The caller holds ledger.io.
func (t *Tier) writeLedger(eras map[page.ID]era) error {
	buf, err := offheap.New[byte](ledgerBytes)
	if err != nil {
		return err
	}
	defer buf.Free()
	g, l := &t.ledger, t.logs[0]
	g.last++
	encodeLedger(buf.Elems(), t.id, g.last, g.limit, eras)
	order := [2]int{0, 1}
	if g.copies[0] > g.copies[1] {
		order = [2]int{1, 0}
	}
	for _, i := range order {
		g.copies[i] = 0 // until it is durable it may be anything
		if err := l.durably([][]byte{buf.Elems()}, ledgerPlace(i)); err != nil {
			return fmt.Errorf("store.disk path %s: record of namespaces: %w", l.path, err)
		}
		g.copies[i] = g.last
	}
	return nil
}
