// SPDX-License-Identifier: Apache-2.0

package place

import (
	"sync"
	"sync/atomic"

	"github.com/kvspray/kvspray/placement/index"
	"github.com/kvspray/kvspray/proxy/internal/kvevents"
)

// Bounds of what engines report.
const (
	maxCached   = 1 << 22 // different blocks of all engines
	maxHeld     = 1 << 20 // blocks of one engine
	blocksAtOne = 1 << 10 // that change while no request can look
)

// Reasons why a reported block is not in the index.
const (
	LeftRemote  = "remote"     // it is not at the engine
	LeftAdapter = "adapter"    // it is of a LoRA adapter
	LeftExtra   = "extra_keys" // its hash depends on more than tokens
	LeftSize    = "block_size" // it has another size than the engine's first ones
	LeftOrphan  = "orphan"     // its parent is unknown
	LeftFull    = "full"       // a bound was reached
	LeftPartial = "partial"    // the engine's model has caches of several kinds
)

// LeftReasons lists them.
func LeftReasons() []string {
	return []string{LeftRemote, LeftAdapter, LeftExtra, LeftSize, LeftOrphan, LeftFull, LeftPartial}
}

// cache is what engines report about their caches: blocks of tokens. Each engine has two holders in
// the table: one for its GPU, and one for any tier.
//
// Lock order: a Holder's mutex, then the table's.
type cache struct {
	prefix  index.Prefix
	holders []*Holder // nil: an engine that reports nothing

	mu    sync.RWMutex // guards table
	table *index.Table
}

func newCache(reports []bool) *cache {
	c := &cache{prefix: index.NewPrefix(), table: index.NewTable(maxCached, 2*len(reports)),
		holders: make([]*Holder, len(reports))}
	for i, does := range reports {
		if does {
			h := &Holder{c: c, engine: i, held: index.NewHeld(maxHeld), left: map[string]uint64{}}
			h.usable.Store(unusable)
			c.holders[i] = h
		}
	}
	return c
}

// Holder takes the reports of one engine. It is a feed's sink.
type Holder struct {
	c      *cache
	engine int

	usable atomic.Int64 // block size; 0: unknown yet; unusable: reports cannot be used

	mu      sync.Mutex // guards all below
	held    *index.Held
	block   int  // tokens; 0: unknown
	live    bool // the reports are up to date
	partial bool // having a block is not enough for a hit
	left    map[string]uint64
}

const unusable = -1

// publish makes the state visible to requests, which do not wait for the mutex. It is held.
func (h *Holder) publish() {
	if h.live && !h.partial {
		h.usable.Store(int64(h.block))
	} else {
		h.usable.Store(unusable)
	}
}

func (h *Holder) gpu() int { return 2 * h.engine }
func (h *Holder) any() int { return 2*h.engine + 1 }

// Live takes whether reports are up to date. If they are not, they are not used.
func (h *Holder) Live(on bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.live = on
	h.publish()
}

// Void drops all that the engine has reported.
func (h *Holder) Void() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clear()
	h.block, h.partial = 0, false
	h.publish()
}

func (h *Holder) clear() {
	had := h.held.Clear()
	for len(had) > 0 {
		n := min(len(had), blocksAtOne)
		h.c.mu.Lock()
		for _, b := range had[:n] {
			h.lose(b, 0)
		}
		h.c.mu.Unlock()
		had = had[n:]
	}
}

// lose removes a block from the table, apart from some tiers. The table is locked.
func (h *Holder) lose(b index.Block, after uint8) {
	if gpu := uint8(kvevents.GPU); b.Tiers&gpu != 0 && after&gpu == 0 {
		h.c.table.Remove(b.Key, h.gpu())
	}
	if b.Tiers != 0 && after == 0 {
		h.c.table.Remove(b.Key, h.any())
	}
}

// Apply takes a batch.
func (h *Holder) Apply(b *kvevents.Batch) {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.publish()
	for i := range b.Events {
		e := &b.Events[i]
		switch {
		case e.Kind == kvevents.Cleared:
			h.clear()
		case e.Remote:
			h.left[LeftRemote] += uint64(len(e.Blocks))
		case e.Partial && !h.partial:
			h.clear()
			h.partial = true
			h.left[LeftPartial] += uint64(len(e.Blocks))
		case h.partial:
			h.left[LeftPartial] += uint64(len(e.Blocks))
		case e.Kind == kvevents.Removed:
			h.removed(e)
		default:
			h.stored(e)
		}
	}
}

func (h *Holder) removed(e *kvevents.Event) {
	for at := 0; at < len(e.Blocks); at += blocksAtOne {
		h.c.mu.Lock()
		for _, name := range e.Blocks[at:min(at+blocksAtOne, len(e.Blocks))] {
			before, after := h.held.Remove(uint64(name), uint8(e.Tier))
			h.lose(before, after)
		}
		h.c.mu.Unlock()
	}
}

func (h *Holder) stored(e *kvevents.Event) {
	all := uint64(len(e.Blocks))
	if h.block == 0 && e.Tier == kvevents.GPU {
		h.block = e.BlockSize
	}
	switch {
	case e.Adapter:
		h.left[LeftAdapter] += all
		return
	case e.BlockSize != h.block:
		h.left[LeftSize] += all
		return
	}
	key := h.c.prefix.First(h.block)
	if e.HasParent {
		var ok bool
		if key, ok = h.held.Key(uint64(e.Parent)); !ok {
			h.left[LeftOrphan] += all
			return
		}
	}
	h.left[LeftExtra] += all - uint64(e.Plain)
	keys := make([]uint64, e.Plain)
	for i := range keys {
		key = h.c.prefix.Next(key, e.Tokens[i*h.block:(i+1)*h.block])
		keys[i] = key
	}
	for at := 0; at < len(keys); at += blocksAtOne {
		end := min(at+blocksAtOne, len(keys))
		h.c.mu.Lock()
		full := h.add(e.Blocks[at:end], keys[at:end], e.Tier)
		h.c.mu.Unlock()
		h.left[LeftFull] += uint64(full)
	}
}

// add adds blocks, and returns for how many there was no place. The table is locked.
func (h *Holder) add(names []kvevents.Name, keys []uint64, tier kvevents.Tier) (full int) {
	for i, key := range keys {
		before, ok := h.held.Add(uint64(names[i]), key, uint8(tier))
		if !ok {
			full++
			continue
		}
		if before.Key != key {
			h.lose(before, 0)
		}
		ok = h.c.table.Add(key, h.any())
		if tier == kvevents.GPU {
			ok = h.c.table.Add(key, h.gpu()) && ok
		}
		if !ok {
			full++
		}
	}
	return full
}

// hit is what one engine has of a prompt, in tokens.
type hit struct {
	known    bool // the engine reports
	gpu, any int  // any: in any tier
}

// lookup returns what engines have of a prompt. about has the engines that serve the prompt's
// model. An engine that reported nothing yet has nothing.
func (c *cache) lookup(tokens []uint32, about []bool) []hit {
	hits := make([]hit, len(c.holders))
	sizes := make([]int, len(c.holders))
	for i, h := range c.holders {
		if h == nil || !about[i] {
			continue
		}
		if n := h.usable.Load(); n != unusable {
			hits[i].known, sizes[i] = true, int(n)
		}
	}
	for i, size := range sizes {
		if size == 0 {
			continue
		}
		// An engine computes at least one token.
		most := min(max(len(tokens)-1, 0)/size, maxChunks)
		blocks := make([]int, 2*len(c.holders))
		keys := c.prefix.Keys(tokens, size, most)
		c.mu.RLock()
		c.table.Lookup(keys, blocks)
		c.mu.RUnlock()
		for j := i; j < len(sizes); j++ {
			if sizes[j] == size {
				hits[j].gpu, hits[j].any = blocks[2*j]*size, blocks[2*j+1]*size
				sizes[j] = 0
			}
		}
	}
	return hits
}

// HolderStats are for metrics.
type HolderStats struct {
	Blocks  int
	Partial bool
	Left    map[string]uint64 // by reason
}

// Stats returns them.
func (h *Holder) Stats() HolderStats {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := HolderStats{h.held.Blocks(), h.partial, map[string]uint64{}}
	for _, r := range LeftReasons() {
		s.Left[r] = h.left[r]
	}
	return s
}

// bytes is the memory of all, about.
func (c *cache) bytes() int {
	c.mu.RLock()
	n := c.table.Bytes()
	c.mu.RUnlock()
	for _, h := range c.holders {
		if h != nil {
			h.mu.Lock()
			n += h.held.Bytes()
			h.mu.Unlock()
		}
	}
	return n
}
