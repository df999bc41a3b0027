// SPDX-License-Identifier: Apache-2.0

package store

import (
	"sync"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/disk"
	"github.com/kvspray/kvspray/store/memory"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/page"
)

// Pins keeps pages where they are.
type Pins struct {
	space  *Space
	memory []memory.Page
	disk   []disk.Pinned
	object []object.Pinned
	once   sync.Once
	found  page.Bitmap
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
		if m, ok := sp.s.memory.Pin(sp.number, &keys[i]); ok {
			p.memory = append(p.memory, m)
			p.blocks[i] = m.Block
			p.found.Set(i)
			continue
		}
		if sp.s.disk != nil {
			if d, ok := sp.s.disk.Pin(sp.number, &keys[i]); ok {
				p.disk = append(p.disk, d)
				p.found.Set(i)
				continue
			}
		}
		if sp.object != nil {
			if o, ok := sp.object.Pin(&keys[i]); ok {
				p.object = append(p.object, o)
				p.found.Set(i)
			}
		}
	}
	return p, nil
}

// Found has the bits of the pages that are pinned.
func (p *Pins) Found() page.Bitmap { return p.found }

// Blocks is where each page is in the store's Region, for readers; one without a Region is not in
// memory. The memory holds the page until Release. The reader compares the checksum.
func (p *Pins) Blocks() []mem.Block { return p.blocks }

// InMemory is how many of the pages are in memory.
func (p *Pins) InMemory() int { return len(p.memory) }

// Release ends the pins. Idempotent. Close has ended them already.
func (p *Pins) Release() {
	p.once.Do(func() {
		if !p.space.s.enter() {
			return
		}
		defer p.space.s.leave()
		for _, m := range p.memory {
			p.space.s.memory.Unpin(m)
		}
		for _, d := range p.disk {
			p.space.s.disk.Unpin(d)
		}
		for _, o := range p.object {
			p.space.object.Unpin(o)
		}
	})
}
