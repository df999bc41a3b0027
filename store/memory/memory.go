// Package memory is the store's first tier: pages in slabs of one sealed memfd, which can be passed
// to engines of this host and pinned once for all transports.
//
// Ownership: the tier owns the arena and the index. A Page that Pin or Reserve returned belongs to
// the caller until Unpin; its bytes stay where they are for as long. Only the caller that reserved
// a page writes to it, until Commit; afterwards its bytes do not change.
//
// Invariants: a page that can be pinned is whole; a slot is reused only when its page has no pin;
// an owner's pages stay within its quota, and above its reserve as far as others are concerned.
//
// One mutex guards everything but the bytes. It is held for an index lookup or an eviction, and
// longer only while a slab changes its class, which moves at most a slab. No goroutines.
package memory

import (
	"fmt"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/catalog"
	"github.com/kvspray/kvspray/store/evict"
	"github.com/kvspray/kvspray/store/index"
	"github.com/kvspray/kvspray/store/page"
)

// Bounds and defaults.
const (
	DefaultSlabBytes = 64 << 20
	minSlabBytes     = 64 << 10
	TypicalPageBytes = 64 << 10 // what MaxPages is derived from
)

// Config describes a tier.
type Config struct {
	Bytes     uint64 // of the arena
	SlabBytes uint64 // 0: DefaultSlabBytes, or an eighth of a small arena
	MaxPages  int    // 0: one for every 64 KiB of the arena
	Populate  bool   // take the memory at once
	// Stop ends that early, once it is closed. nil: nothing does.
	Stop <-chan struct{}
}

// Page is one pinned page.
type Page struct {
	node  index.Node
	Bytes []byte // of the page
	// the same and what is left of its slot: aligned to 4 KiB and as long as a multiple of it
	Slot  []byte
	Block mem.Block // the same in the arena's region
	CRC   uint32    // once the page is committed
}

// Tier holds pages.
type Tier struct {
	region *mem.Region
	arena  []byte
	slab   uint64

	mu     sync.Mutex // guards what follows
	pages  *catalog.Catalog
	slabs  *slabs
	owners map[uint16]owner
	moved  uint64
}

type owner struct {
	bytes int
	class uint8
}

// New makes an empty tier.
func New(c Config) (*Tier, error) {
	if c.SlabBytes == 0 {
		c.SlabBytes = min(DefaultSlabBytes, max(minSlabBytes, c.Bytes/8))
	}
	slab := c.SlabBytes / unit * unit
	if slab < unit || c.Bytes < slab || c.Bytes/unit > 1<<32-1 {
		return nil,
			fmt.Errorf("store.memory: %d bytes in slabs of %d: must hold one slab at least, and "+
				"at most 16 TiB; "+
				"raise store.memory", c.Bytes, c.SlabBytes)
	}
	c.Bytes = c.Bytes / slab * slab
	if c.MaxPages == 0 {
		c.MaxPages = int(max(64, c.Bytes/TypicalPageBytes))
	}
	t := &Tier{slab: slab, slabs: newSlabs(c.Bytes, slab), owners: map[uint16]owner{}}
	if err := t.allocate(c); err != nil {
		t.free()
		return nil, fmt.Errorf("store.memory: %w", err)
	}
	return t, nil
}

func (t *Tier) allocate(c Config) (err error) {
	var opts []mem.Option
	if c.Populate {
		opts = append(opts, mem.PopulateUntil(c.Stop))
	}
	if t.region, err = mem.NewAnonymous("store", c.Bytes, opts...); err != nil {
		return err
	}
	t.arena, _ = t.region.Bytes()
	t.pages, err = catalog.New(c.MaxPages, func(_ uint16, loc uint32) { t.slabs.give(loc) })
	return err
}

func (t *Tier) free() {
	if t.region != nil {
		t.region.Release()
	}
	if t.pages != nil {
		t.pages.Close()
	}
}

// Close frees the arena. No page is pinned any more.
func (t *Tier) Close() { t.free() }

// Region is the arena, for passing on. It stays the tier's.
func (t *Tier) Region() *mem.Region { return t.region }

// IndexBytes is the memory of the index when it is full.
func (t *Tier) IndexBytes() int { return t.pages.Bytes() }

// SetOwner makes or changes an owner: the size of its pages, its quota and its reserve.
func (t *Tier) SetOwner(id uint16, pageBytes int, quota, reserve uint64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if uint64(pageBytes) > t.slab {
		return fmt.Errorf("store.memory: arena of %d bytes: a page of %d bytes does not fit "+
			"into its slabs of %d bytes; "+
			"set store.memory to %d or more", t.region.Size(), pageBytes, t.slab, 8*pageBytes)
	}
	class, err := t.slabs.classFor(pageBytes)
	if err != nil {
		return err
	}
	o := evict.Owner{PageBytes: uint64(t.slabs.classes[class].bytes), Class: class, Max: quota,
		Min: reserve}
	if err := t.pages.CheckShares("store.memory", id, o, t.region.Size()); err != nil {
		return err
	}
	t.owners[id] = owner{pageBytes, class}
	t.pages.SetOwner(id, o)
	return nil
}

// DropOwner forgets an owner, so that its number can be another's. The caller does not use the
// number any more. It reports whether the owner had no pages; otherwise nothing changes.
func (t *Tier) DropOwner(id uint16) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pages.Used(id) != 0 {
		return false
	}
	t.pages.DropOwner(id)
	delete(t.owners, id)
	return true
}

// Used is how many bytes of the arena an owner's pages take.
func (t *Tier) Used(id uint16) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.pages.Used(id)
}

// Keys lists keys, as Catalog.Keys.
func (t *Tier) Keys(id uint16, first uint32, out []page.Key) ([]page.Key, uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.pages.Keys(id, first, out)
}

// Capacity is how many bytes of pages fit.
func (t *Tier) Capacity() uint64 { return uint64(len(t.arena)) }

// Stats are counts since the tier was made.
type Stats struct {
	Pages          int
	Bytes          uint64
	Evicted, Moved uint64 // pages
	EvictionAge    time.Duration
}

// Stats returns them.
func (t *Tier) Stats() Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	st := Stats{Pages: t.pages.Pages(), Evicted: t.pages.Evicted(), Moved: t.moved,
		EvictionAge: t.pages.EvictionAge()}
	for id := range t.owners {
		st.Bytes += t.pages.Used(id)
	}
	return st
}

// Walk returns some of the pages of all owners, as catalog.Walk does.
func (t *Tier) Walk(from uint32, limit int) (keys []page.Key, next uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	keys, n := t.pages.Walk(index.Node(from), limit)
	return keys, uint32(n)
}

// Exists sets the bits of the owner's keys that are here.
func (t *Tier) Exists(id uint16, keys []page.Key, found page.Bitmap) {
	for at := 0; at < len(keys); at += catalog.Pieces {
		t.mu.Lock()
		t.pages.Exists(id, keys[at:min(at+catalog.Pieces, len(keys))], found, at)
		t.mu.Unlock()
	}
}

func (t *Tier) pageLocked(n index.Node, id uint16) Page {
	e := t.pages.At(n)
	off, size := uint64(e.Loc)*unit, uint64(t.owners[id].bytes)
	slot := uint64(t.slabs.classes[t.owners[id].class].bytes)
	return Page{node: n, CRC: e.CRC, Bytes: t.arena[off : off+size : off+size],
		Slot:  t.arena[off : off+slot : off+slot],
		Block: mem.Block{Region: t.region, Off: off, Len: size}}
}

// Pin finds a page, counts a use, and keeps the page where it is.
func (t *Tier) Pin(id uint16, k *page.Key) (Page, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.pages.Acquire(id, k)
	if n == 0 {
		return Page{}, false
	}
	return t.pageLocked(n, id), true
}

// Keep is Pin for an engine that holds the page as long as it likes.
func (t *Tier) Keep(id uint16, k *page.Key) (p catalog.Pinned, ok bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n, err := t.pages.Keep(id, k)
	if n == 0 {
		return p, false, err
	}
	m := t.pageLocked(n, id)
	return catalog.Pinned{Node: n, Bytes: uint64(len(m.Slot)), Block: m.Block}, true, nil
}

// Release ends a Keep.
func (t *Tier) Release(p catalog.Pinned) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pages.Drop(p.Node)
}

// Unpin gives a page back. Its bytes are dead.
func (t *Tier) Unpin(p Page) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pages.Drop(p.node)
}

// Drop gives a page back that must not be found any more, for instance because its bytes were
// damaged. It goes when its last pin does.
func (t *Tier) Drop(p Page) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pages.Doom(p.node)
	t.pages.Drop(p.node)
}

// Doom has a pinned page found no more. Each of its pins is still given back.
func (t *Tier) Doom(p Page) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pages.Doom(p.node)
}

// OnRemove makes the tier call f for each page that is removed, as OnEvict. It is called before the
// first page is added.
func (t *Tier) OnRemove(f func(owner uint16, k *page.Key)) { t.pages.OnRemove(f) }

// OnEvict has f called with each page that is given up. The bytes are dead when f returns. f calls
// nothing of the tier, whose lock is held, and does not wait. It is set before the first page.
func (t *Tier) OnEvict(f func(owner uint16, k, after *page.Key, crc uint32, bytes []byte)) {
	t.pages.OnEvict(func(id uint16, e *index.Entry, after *page.Key) {
		f(id, &e.Key, after, e.CRC, t.arena[uint64(e.Loc)*unit:][:t.owners[id].bytes])
	})
}

// RemoveOwner removes all pages that an owner has, also those that are being filled. Pages with
// pins end with their last pin.
func (t *Tier) RemoveOwner(id uint16) {
	var r catalog.Removing
	for done := false; !done; {
		t.mu.Lock()
		done = t.pages.RemoveSome(id, &r)
		t.mu.Unlock()
	}
}

// Reserve makes room for a page and returns it pinned, for the caller to fill and Commit, or Drop.
// after is the key of the page before it in its prompt, or nil. It returns catalog.ErrExists or
// ErrBusy if the key is taken, and ErrFull.
func (t *Tier) Reserve(id uint16, k, after *page.Key) (Page, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n, err := t.pages.Begin(id, k, after, func() (uint32, error) { return t.slotLocked(id) })
	if err != nil {
		return Page{}, fmt.Errorf("store.memory: %w", err)
	}
	t.slabs.name(t.pages.At(n).Loc, uint32(n))
	p := t.pageLocked(n, id)
	clear(p.Slot[len(p.Bytes):]) // what another tenant left there does not go to a disk
	return p, nil
}

// Follow names the page before one that may have been reserved without it.
func (t *Tier) Follow(id uint16, k, after *page.Key) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pages.Follow(id, k, after)
}

// Commit makes a reserved page readable. It stays pinned. A page that was removed meanwhile is not
// found.
func (t *Tier) Commit(p Page, crc uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pages.Finish(p.node, crc)
}
