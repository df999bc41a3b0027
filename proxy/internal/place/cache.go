package place

import (
	"context"
	"slices"
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
	LeftSize = "block_size" // it has another size than the engine's other ones
	LeftFull = "full"       // a bound was reached
)

// Places of the reasons.
const (
	leftRemote  = iota // it is not at the engine
	leftAdapter        // it is of a LoRA adapter
	leftExtra          // its hash depends on more than tokens
	leftSize
	leftOrphan // its parent is unknown
	leftFull
	leftPartial // the engine's model has caches of several kinds
	reasons
)

var leftReasons = [reasons]string{"remote", "adapter", "extra_keys", LeftSize, "orphan", LeftFull,
	"partial"}

// LeftReasons lists them.
func LeftReasons() []string { return leftReasons[:] }

// cache is what engines report about their caches: blocks of tokens. Each engine has two holders in
// the table: one for its GPU, and one for any tier.
type cache struct {
	prefix index.Prefix

	// guards all below; no call holds it for longer than blocksAtOne blocks take
	mu      sync.RWMutex
	holders []*Holder // nil: an engine that reports nothing
	table   *index.Table
}

func newCache() *cache {
	return &cache{prefix: index.NewPrefix(), table: index.NewTable(maxCached, 0)}
}

// holder makes the holder of an engine.
func (c *cache) holder(engine int) *Holder {
	c.mu.Lock()
	defer c.mu.Unlock()
	if more := engine + 1 - len(c.holders); more > 0 {
		c.holders = append(c.holders, make([]*Holder, more)...)
		c.table.Grow(2 * len(c.holders))
	}
	if c.holders[engine] == nil {
		h := &Holder{c: c, engine: engine, held: index.NewHeld(maxHeld)}
		h.usable.Store(unusable)
		c.holders[engine] = h
	}
	return c.holders[engine]
}

// remove drops the holder of an engine, if it has one.
func (c *cache) remove(engine int) {
	list := c.all()
	if engine >= len(list) || list[engine] == nil {
		return
	}
	list[engine].Live(false)
	list[engine].Void()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.holders[engine] = nil
}

func (c *cache) all() []*Holder {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return slices.Clone(c.holders)
}

// Holder takes the reports of one engine. It is a feed's sink: Live, Void and Apply are for the
// feed's goroutine, the other methods for any.
type Holder struct {
	c      *cache
	engine int

	usable  atomic.Int64 // block size; 0: unknown yet; unusable: reports cannot be used
	blocks  atomic.Int64
	bytes   atomic.Int64
	partial atomic.Bool // having a block is not enough for a hit
	left    [reasons]atomic.Uint64

	// of the feed's goroutine
	held  *index.Held
	block int  // tokens; 0: unknown
	live  bool // the reports are up to date
}

const unusable = -1

// publish makes the state visible to requests and metrics.
func (h *Holder) publish() {
	h.blocks.Store(int64(h.held.Blocks()))
	h.bytes.Store(int64(h.held.Bytes()))
	if h.live && !h.partial.Load() {
		h.usable.Store(int64(h.block))
	} else {
		h.usable.Store(unusable)
	}
}

// Usable reports whether the engine's reports can answer for a prompt.
func (h *Holder) Usable() bool { return h.usable.Load() != unusable }

func (h *Holder) gpu() int { return 2 * h.engine }
func (h *Holder) any() int { return 2*h.engine + 1 }

// Live takes whether reports are up to date. If they are not, they are not used.
func (h *Holder) Live(on bool) {
	h.live = on
	h.publish()
}

// Void drops all that the engine has reported.
func (h *Holder) Void() {
	h.lose(h.held.Clear(), uint8(kvevents.AllTiers))
	h.block = 0
	h.partial.Store(false)
	h.publish()
}

// lose removes blocks from the table that left some tiers. They are as they were before.
func (h *Holder) lose(had []index.Block, tiers uint8) {
	for at := 0; at < len(had); at += blocksAtOne {
		h.c.mu.Lock()
		for _, b := range had[at:min(at+blocksAtOne, len(had))] {
			h.loseOne(b, tiers)
		}
		h.c.mu.Unlock()
	}
}

// loseOne does so for one block. The table is locked.
func (h *Holder) loseOne(b index.Block, tiers uint8) {
	if gpu := uint8(kvevents.GPU); b.Tiers&tiers&gpu != 0 {
		h.c.table.Remove(b.Key, h.gpu())
	}
	if b.Tiers != 0 && b.Tiers&^tiers == 0 {
		h.c.table.Remove(b.Key, h.any())
	}
}

// Apply takes a batch. If ctx ends, it takes a part of it: the feed has ended.
func (h *Holder) Apply(ctx context.Context, b *kvevents.Batch) {
	defer h.publish()
	for i := range b.Events {
		if ctx.Err() != nil {
			return
		}
		e := &b.Events[i]
		all := uint64(len(e.Blocks))
		switch {
		case e.Kind == kvevents.Cleared:
			h.lose(h.held.Drop(uint8(e.Tier)), uint8(e.Tier))
		case e.Remote:
			h.left[leftRemote].Add(all)
		case e.Partial && !h.partial.Load():
			h.lose(h.held.Clear(), uint8(kvevents.AllTiers))
			h.partial.Store(true)
			h.left[leftPartial].Add(all)
		case h.partial.Load():
			h.left[leftPartial].Add(all)
		case e.Kind == kvevents.Removed:
			h.removed(ctx, e)
		default:
			h.stored(ctx, e)
		}
	}
}

func (h *Holder) removed(ctx context.Context, e *kvevents.Event) {
	had := make([]index.Block, 0, min(len(e.Blocks), blocksAtOne))
	for at := 0; at < len(e.Blocks) && ctx.Err() == nil; at += blocksAtOne {
		had = had[:0]
		for _, name := range e.Blocks[at:min(at+blocksAtOne, len(e.Blocks))] {
			before, _ := h.held.Remove(uint64(name), uint8(e.Tier))
			had = append(had, before)
		}
		h.lose(had, uint8(e.Tier))
	}
}

// size takes the block size of an event; false: its blocks do not count. The first ones of an
// engine may be parts of blocks.
func (h *Holder) size(e *kvevents.Event) bool {
	if gpu := e.Tier == kvevents.GPU; gpu && h.block == 0 {
		h.block = e.BlockSize
	} else if gpu && e.BlockSize > h.block && e.BlockSize%h.block == 0 {
		h.lose(h.held.Clear(), uint8(kvevents.AllTiers))
		h.block = e.BlockSize
	}
	return e.BlockSize == h.block
}

func (h *Holder) stored(ctx context.Context, e *kvevents.Event) {
	all := uint64(len(e.Blocks))
	if e.Adapter {
		h.left[leftAdapter].Add(all)
		return
	}
	if !h.size(e) {
		h.left[leftSize].Add(all)
		return
	}
	key := h.c.prefix.First(h.block)
	if e.HasParent {
		var ok bool
		if key, ok = h.held.Key(uint64(e.Parent)); !ok {
			h.left[leftOrphan].Add(all)
			return
		}
	}
	h.left[leftExtra].Add(all - uint64(e.Plain))
	adds := make([]added, 0, min(e.Plain, blocksAtOne))
	full := uint64(0)
	for at := 0; at < e.Plain && ctx.Err() == nil; at += blocksAtOne {
		adds = adds[:0]
		for i := at; i < min(at+blocksAtOne, e.Plain); i++ {
			key = h.c.prefix.Next(key, e.Tokens[i*h.block:(i+1)*h.block])
			before, ok := h.held.Add(uint64(e.Blocks[i]), key, uint8(e.Tier))
			if !ok {
				full++
				continue
			}
			adds = append(adds, added{before, key})
		}
		full += h.add(adds, e.Tier)
	}
	h.left[leftFull].Add(full)
}

// added is a block that the engine has now, and what had its name before.
type added struct {
	before index.Block
	key    uint64
}

// add adds blocks to the table, and returns for how many there was no place.
func (h *Holder) add(adds []added, tier kvevents.Tier) (full uint64) {
	h.c.mu.Lock()
	defer h.c.mu.Unlock()
	for _, a := range adds {
		if a.before.Key != a.key {
			h.loseOne(a.before, uint8(kvevents.AllTiers))
		}
		ok := h.c.table.Add(a.key, h.any())
		if tier == kvevents.GPU {
			ok = h.c.table.Add(a.key, h.gpu()) && ok
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

// hitOf is that of an engine, which may be newer than the list.
func hitOf(list []hit, engine int) hit {
	if engine < len(list) {
		return list[engine]
	}
	return hit{}
}

// blockKeys are the hashes of a prompt's blocks of one size, for the engines that have that size.
type blockKeys struct {
	size    int // 0: these engines reported nothing yet, and have nothing
	engines []int
	keys    []uint64
}

// keys hashes a prompt for all engines that report. about has those that serve its model.
func (c *cache) keys(tokens []uint32, about []bool) []blockKeys {
	list := []blockKeys{}
	for i, h := range c.all() {
		if h == nil || i >= len(about) || !about[i] {
			continue
		}
		size := int(h.usable.Load())
		if size == unusable {
			continue
		}
		at := slices.IndexFunc(list, func(b blockKeys) bool { return b.size == size })
		if at < 0 {
			at = len(list)
			b := blockKeys{size: size}
			if size > 0 {
				// An engine computes at least one token.
				chunks := min(max(len(tokens)-1, 0)/size, maxChunks)
				b.keys = c.prefix.Keys(tokens, size, chunks)
			}
			list = append(list, b)
		}
		list[at].engines = append(list[at].engines, i)
	}
	return list
}

// find returns what engines have of a prompt.
func (c *cache) find(list []blockKeys) []hit {
	n := len(c.all())
	hits := make([]hit, n)
	var blocks []int
	for _, b := range list {
		if b.size > 0 {
			if blocks == nil {
				blocks = make([]int, 2*n)
			}
			c.mu.RLock()
			c.table.Lookup(b.keys, blocks)
			c.mu.RUnlock()
		}
		for _, i := range b.engines {
			hits[i].known = true
			if b.size > 0 {
				hits[i].gpu, hits[i].any = blocks[2*i]*b.size, blocks[2*i+1]*b.size
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

// Stats returns them. It waits for nothing.
func (h *Holder) Stats() HolderStats {
	s := HolderStats{int(h.blocks.Load()), h.partial.Load(), map[string]uint64{}}
	for i, r := range leftReasons {
		s.Left[r] = h.left[i].Load()
	}
	return s
}

// bytes is the memory of all, about.
func (c *cache) bytes() int {
	c.mu.RLock()
	n := c.table.Bytes()
	c.mu.RUnlock()
	for _, h := range c.all() {
		if h != nil {
			n += int(h.bytes.Load())
		}
	}
	return n
}
