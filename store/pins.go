package store

import (
	"fmt"
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
	sp := p.space
	m, ok, err := sp.s.memory.Keep(sp.number, k)
	if ok {
		p.memory = append(p.memory, m)
		p.bytes[Memory] += uint64(len(m.Slot))
		p.blocks[i] = m.Block
	}
	if !ok && err == nil && sp.s.disk != nil {
		var d disk.Pinned
		if d, ok, err = sp.s.disk.Keep(sp.number, k); ok {
			p.disk = append(p.disk, d)
			p.bytes[Disk] += d.Bytes
		}
	}
	if !ok && err == nil && sp.object != nil {
		var o object.Pinned
		if o, ok, err = sp.object.Keep(k); ok {
			p.object = append(p.object, o)
			p.bytes[Object] += o.Bytes
		}
	}
	if ok {
		p.found.Set(i)
	}
	return err
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
	n[Memory] = s.memory.Capacity()
	if s.disk != nil {
		n[Disk] = s.disk.Capacity()
	}
	if s.object != nil {
		n[Object] = s.object.Capacity()
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
	for _, m := range p.memory {
		p.space.s.memory.Unpin(m)
	}
	for _, d := range p.disk {
		p.space.s.disk.Unpin(d)
	}
	for _, o := range p.object {
		p.space.object.Unpin(o)
	}
}
