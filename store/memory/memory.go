// SPDX-License-Identifier: Apache-2.0

// Package memory is the store's first tier: pages in slabs of one sealed memfd, which can be passed
// to engines of this host and pinned once for all transports.
//
// Ownership: the tier owns the arena and the index. A Page that Pin or Reserve returned belongs to
// the caller until Unpin; its bytes stay where they are for as long. Whoever reserved a page alone
// writes to it until Commit, and nobody writes to it afterwards.
//
// Invariants: a page that can be pinned is whole; a slot is reused only when its page has no pin; an
// owner's pages stay within its quota, and above its reserve as far as others are concerned.
//
// One mutex guards everything but the bytes. It is held for an index lookup or an eviction, and
// longer only while a slab changes its class, which moves at most a slab. No goroutines.
package memory

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/internal/mem"
	"github.com/kvspray/kvspray/store/evict"
	"github.com/kvspray/kvspray/store/index"
	"github.com/kvspray/kvspray/store/offheap"
	"github.com/kvspray/kvspray/store/page"
)

// Bounds and defaults.
const (
	DefaultSlabBytes = 64 << 20
	minSlabBytes     = 64 << 10
	leastPageBytes   = 64 << 10 // what MaxPages is derived from
	maxPins          = 1<<16 - 1
	existsPiece      = 1024 // keys that are looked up under one hold of the lock
)

// Config describes a tier.
type Config struct {
	Bytes     uint64 // of the arena
	SlabBytes uint64 // 0: DefaultSlabBytes, or an eighth of a small arena
	MaxPages  int    // 0: one for every 64 KiB of the arena
	Populate  bool   // take the memory at once
}

// Errors that callers tell apart.
var (
	ErrFull   = errors.New("memory: no page can be given up: all are pinned or reserved for others")
	ErrExists = errors.New("memory: the page is here")
	ErrBusy   = errors.New("memory: the page is being stored or removed")
)

// Page is one pinned page.
type Page struct {
	node  index.Node
	owner uint16
	Bytes []byte    // of the page
	Slot  []byte    // the same and what is left of its slot: aligned to 4 KiB and as long as a multiple of it
	Block mem.Block // the same in the arena's region
	CRC   uint32    // once the page is committed
}

// Tier holds pages.
type Tier struct {
	region *mem.Region
	arena  []byte
	slab   uint64
	began  time.Time

	mu     sync.Mutex // guards what follows
	table  *index.Table
	links  *offheap.Array[evict.Link]
	ghosts *offheap.Array[uint32]
	policy *evict.Policy
	slabs  *slabs
	owners map[uint16]owner

	evicted, moved atomic.Uint64
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
		return nil, fmt.Errorf("store.memory: %d bytes in slabs of %d: must hold one slab at least, and at most 16 TiB; "+
			"raise store.memory", c.Bytes, c.SlabBytes)
	}
	c.Bytes = c.Bytes / slab * slab
	if c.MaxPages == 0 {
		c.MaxPages = int(max(64, c.Bytes/leastPageBytes))
	}
	t := &Tier{slab: slab, slabs: newSlabs(c.Bytes, slab), owners: map[uint16]owner{}, began: time.Now()}
	if err := t.allocate(c); err != nil {
		t.free()
		return nil, fmt.Errorf("store.memory: %w", err)
	}
	t.policy = evict.New(t.links.Elems(), t.ghosts.Elems())
	return t, nil
}

func (t *Tier) allocate(c Config) (err error) {
	var opts []mem.Option
	if c.Populate {
		opts = append(opts, mem.Populate())
	}
	if t.region, err = mem.NewAnonymous("store", c.Bytes, opts...); err != nil {
		return err
	}
	t.arena, _ = t.region.Bytes()
	if t.table, err = index.New(c.MaxPages); err != nil {
		return err
	}
	if t.links, err = offheap.New[evict.Link](c.MaxPages + 1); err != nil {
		return err
	}
	t.ghosts, err = offheap.New[uint32](evict.GhostsFor(c.MaxPages))
	return err
}

func (t *Tier) free() {
	if t.region != nil {
		t.region.Release()
	}
	if t.table != nil {
		t.table.Close()
	}
	t.links.Free()
	t.ghosts.Free()
}

// Close frees the arena. Nobody has a page pinned.
func (t *Tier) Close() { t.free() }

// Region is the arena, for passing on. It stays the tier's.
func (t *Tier) Region() *mem.Region { return t.region }

// IndexBytes is the memory of the index when it is full.
func (t *Tier) IndexBytes() int { return t.table.Bytes() + t.links.Bytes() + t.ghosts.Bytes() }

// now is in hundredths of a second since the tier was made; it goes round after 497 days, and the policy compares differences.
func (t *Tier) now() uint32 { return uint32(time.Since(t.began) / (10 * time.Millisecond)) }

// SetOwner makes or changes an owner: the size of its pages, its quota and its reserve.
func (t *Tier) SetOwner(id uint16, pageBytes int, quota, reserve uint64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if uint64(pageBytes) > t.slab {
		return fmt.Errorf("store.memory: arena of %d bytes: a page of %d bytes does not fit into its slabs of %d bytes; "+
			"set store.memory to %d or more", t.region.Size(), pageBytes, t.slab, 8*pageBytes)
	}
	if quota != 0 && (quota < uint64(pageBytes) || reserve > quota) {
		return fmt.Errorf("store quota: %d bytes: must hold one page of %d bytes and the reserve of %d bytes; raise it",
			quota, pageBytes, reserve)
	}
	class, err := t.slabs.classFor(pageBytes)
	if err != nil {
		return err
	}
	t.owners[id] = owner{pageBytes, class}
	t.policy.SetOwner(id, evict.Owner{PageBytes: uint64(t.slabs.classes[class].bytes), Class: class, Max: quota, Min: reserve})
	return nil
}

// Used is how many bytes of the arena an owner's pages take.
func (t *Tier) Used(id uint16) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.policy.Used(id)
}

// Stats are counts since the tier was made.
type Stats struct {
	Pages          int
	Evicted, Moved uint64 // pages
}

// Stats returns them.
func (t *Tier) Stats() Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	return Stats{t.policy.Pages(), t.evicted.Load(), t.moved.Load()}
}

// Exists sets the bits of the owner's keys that are here.
func (t *Tier) Exists(id uint16, keys []page.Key, found page.Bitmap) {
	var nodes [existsPiece]index.Node
	for at := 0; at < len(keys); at += existsPiece {
		piece := keys[at:min(at+existsPiece, len(keys))]
		t.mu.Lock()
		t.table.FindAll(piece, nodes[:len(piece)])
		for i, n := range nodes[:len(piece)] {
			if n != 0 && t.liveLocked(n, id) {
				found.Set(at + i)
			}
		}
		t.mu.Unlock()
	}
}

func (t *Tier) liveLocked(n index.Node, id uint16) bool {
	e := t.table.At(n)
	return e.State == index.Live && !e.Doomed && t.policy.Owner(uint32(n)) == id
}

func (t *Tier) pageLocked(n index.Node, id uint16) Page {
	e := t.table.At(n)
	off, size := uint64(e.Loc)*unit, uint64(t.owners[id].bytes)
	slot := uint64(t.slabs.classes[t.owners[id].class].bytes)
	return Page{node: n, owner: id, CRC: e.CRC, Bytes: t.arena[off : off+size : off+size], Slot: t.arena[off : off+slot : off+slot],
		Block: mem.Block{Region: t.region, Off: off, Len: size}}
}

// Pin finds a page, counts a use, and keeps the page where it is.
func (t *Tier) Pin(id uint16, k *page.Key) (Page, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.table.Find(k)
	if n == 0 || !t.liveLocked(n, id) || t.table.At(n).Pins == maxPins {
		return Page{}, false
	}
	t.policy.Touch(uint32(n), t.now())
	t.pinLocked(n)
	return t.pageLocked(n, id), true
}

func (t *Tier) pinLocked(n index.Node) {
	e := t.table.At(n)
	e.Pins++
	if e.Pins == 1 {
		t.policy.Pin(uint32(n))
	}
}

// Unpin gives a page back. Its bytes are dead.
func (t *Tier) Unpin(p Page) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.unpinLocked(p.node)
}

func (t *Tier) unpinLocked(n index.Node) {
	e := t.table.At(n)
	e.Pins--
	if e.Pins > 0 {
		return
	}
	t.policy.Unpin(uint32(n), t.now(), t.freeLocked)
	if e.Doomed {
		t.removeLocked(n)
	}
}

// removeLocked drops a page that has no pins.
func (t *Tier) removeLocked(n index.Node) {
	e := t.table.At(n)
	t.slabs.give(e.Loc)
	e.State, e.Doomed = index.Gone, false
	t.policy.Remove(uint32(n), t.freeLocked)
}

func (t *Tier) freeLocked(n uint32) { t.table.Delete(index.Node(n)) }

func (t *Tier) evictLocked(n index.Node) {
	e := t.table.At(n)
	t.slabs.give(e.Loc)
	e.State = index.Gone
	t.policy.Evict(uint32(n), t.table.Hash(&e.Key), t.freeLocked)
	t.evicted.Add(1)
}

// Drop forgets a pinned page, for instance one whose bytes were found damaged. It goes when its last pin does; until then
// nobody finds it.
func (t *Tier) Drop(p Page) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.table.At(p.node).Doomed = true
	t.unpinLocked(p.node)
}

// RemoveOwner forgets all pages of an owner. Those that are pinned go with their last pin. SetOwner must follow before the
// owner stores again.
func (t *Tier) RemoveOwner(id uint16) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for n := index.Node(1); n <= t.table.Last(); n++ {
		e := t.table.At(n)
		if e.State != index.Live && e.State != index.Filling || t.policy.Owner(uint32(n)) != id {
			continue
		}
		if e.Pins > 0 {
			e.Doomed = true
			continue
		}
		t.removeLocked(n)
	}
}
