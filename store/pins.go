package store

import (
	"fmt"
	"sync"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/catalog"
	"github.com/kvspray/kvspray/store/page"
)

// Pins keeps pages where they are.
type Pins struct {
	space  *Space
	kept   [Object + 1][]catalog.Pinned // by Tier
	once   sync.Once
	found  page.Bitmap
	bytes  [Object + 1]uint64
	blocks []mem.Block
}

// MaxPinned bounds the pages of one Pins.
const MaxPinned = page.MaxBatch

// Pin keeps those pages that are here from being given up until Release. Pages that are pinned
// leave less room for others: the caller bounds how many one engine has pinned.
func (sp *Space) Pin(keys []page.Key) (*Pins, error) {
	if err := checkKeys(len(keys)); err != nil {
		return nil, err
	}
	if err := sp.acquire(); err != nil {
		return nil, err
	}
	defer sp.release()
	p := &Pins{space: sp, found: page.NewBitmap(len(keys)), blocks: make([]mem.Block, len(keys))}
	for i := range keys {
		if err := p.add(i, &keys[i]); err != nil {
			p.releaseEntered()
			return nil, &RequestError{fmt.Sprintf("keys[%d]", i), err.Error(),
				"ask without pins, or wait until others end"}
		}
	}
	return p, nil
}

// add pins page i where it is found first.
func (p *Pins) add(i int, k *page.Key) error {
	for tier, t := range p.space.s.tiers {
		kept, ok, err := t.Keep(p.space.number, k)
		if err != nil {
			return err
		}
		if ok {
			p.kept[tier] = append(p.kept[tier], kept)
			p.bytes[tier] += kept.Bytes
			p.blocks[i] = kept.Block
			p.found.Set(i)
			return nil
		}
	}
	return nil
}

// Found has the bits of the pages that are pinned.
func (p *Pins) Found() page.Bitmap { return p.found }

// Blocks is where each page is in the store's Region, for readers; one without a Region is not in
// memory. The memory holds the page until Release. The reader compares the checksum.
func (p *Pins) Blocks() []mem.Block { return p.blocks }

// Bytes is how much of each tier the pages take, by Tier.
func (p *Pins) Bytes() [Object + 1]uint64 { return p.bytes }

// Capacities is how many bytes of pages each tier holds, by Tier; 0: there is none.
func (s *Store) Capacities() (n [Object + 1]uint64) {
	for i, t := range s.tiers {
		n[i] = t.Capacity()
	}
	return n
}

// Release ends the pins. Idempotent. Close has ended them already.
func (p *Pins) Release() {
	p.once.Do(func() {
		if !p.space.s.enter() {
			return
		}
		defer p.space.s.leave()
		p.releaseEntered()
	})
}

func (p *Pins) releaseEntered() {
	for i, all := range p.kept {
		for _, kept := range all {
			p.space.s.tiers[i].Release(kept)
		}
	}
}
