// Package catalog is what one tier holds: its index, its policy and the pins of its pages. The tier
// decides what an entry's Loc means, and locks: no method locks, and all of them need the tier's
// lock.
//
// Invariants: an entry that is Live and not Doomed can be read; an entry with pins keeps its Loc,
// unless the tier itself moves it; an entry that goes gives its Loc back through Release, once. An
// entry of state Gone is there for the policy only. No goroutines, no I/O.
package catalog

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/evict"
	"github.com/kvspray/kvspray/store/index"
	"github.com/kvspray/kvspray/store/offheap"
	"github.com/kvspray/kvspray/store/page"
)

// Bounds of the pins of one page. Those that engines keep leave as many for reads, and both leave
// some for the tier's own work.
const (
	maxKept = 1 << 15
	maxPins = 1<<16 - 1 - ownPins
	ownPins = 64
)

// Errors that callers distinguish.
var (
	ErrExists = errors.New("the page is here")
	ErrBusy   = errors.New("the page is being stored or removed")
	ErrDoomed = fmt.Errorf("%w: an earlier copy is still read", ErrBusy)
	ErrPins   = fmt.Errorf("%d pins of one page have not ended", maxKept)
	ErrFull   = errors.New("no page can be given up: all are pinned, or reserved for others")
)

// Catalog is the entries of one tier.
type Catalog struct {
	*index.Table
	*evict.Policy
	links   *offheap.Array[evict.Link]
	history *offheap.Array[uint32]
	release func(owner uint16, loc uint32)
	began   time.Time
	evicted uint64
	age     uint32 // mean of what was given up lately, as Now
	spill   func(owner uint16, e *index.Entry, after *page.Key)
	removed func(owner uint16, k *page.Key)
}

// OnRemove makes the catalog call f for each page that RemoveSome drops. f does not call the
// catalog. OnRemove is called before the first page is added.
func (c *Catalog) OnRemove(f func(owner uint16, k *page.Key)) { c.removed = f }

// OnEvict has f called with each page that is given up, while its bytes are still at its Loc. f
// does not call the catalog. It is set before the first page.
func (c *Catalog) OnEvict(f func(owner uint16, e *index.Entry, after *page.Key)) { c.spill = f }

// New makes a catalog of up to pages pages. release takes back the place of a page that goes.
func New(pages int, release func(owner uint16, loc uint32)) (*Catalog, error) {
	c := &Catalog{release: release, began: time.Now()}
	var err error
	if c.Table, err = index.New(pages); err != nil {
		return nil, err
	}
	if c.links, err = offheap.New[evict.Link](pages + 1); err == nil {
		c.history, err = offheap.New[uint32](evict.HistoryEntries(pages))
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	c.Policy = evict.New(c.links.Elems(), c.history.Elems())
	return c, nil
}

// Close frees the memory.
func (c *Catalog) Close() {
	c.Table.Close()
	c.links.Free()
	c.history.Free()
}

// Bytes is the memory that a full catalog takes.
func (c *Catalog) Bytes() int { return c.Table.Bytes() + c.links.Bytes() + c.history.Bytes() }

// Evicted counts the pages that were given up.
func (c *Catalog) Evicted() uint64 { return c.evicted }

// EvictionAge is how long the pages that were given up lately had not been used: about how long a
// page stays.
func (c *Catalog) EvictionAge() time.Duration {
	return time.Duration(c.age) * 10 * time.Millisecond
}

// ageShare: one page moves the mean by 1/ageShare of its difference.
const ageShare = 16

func (c *Catalog) aged(n index.Node) {
	age := int64(c.Age(uint32(n), c.Now()))
	if c.evicted == 0 {
		c.age = uint32(age)
		return
	}
	c.age = uint32(int64(c.age) + (age-int64(c.age))/ageShare)
}

// Keys appends the keys of an owner's pages that can be read, in no order, to those of out, from
// the entry first on, until out is full or maxScanned entries were looked at. It returns the entry
// to go on with; 0: that was the last one.
func (c *Catalog) Keys(owner uint16, first uint32, out []page.Key) ([]page.Key, uint32) {
	n := max(index.Node(first), 1)
	for scanned := 0; n <= c.Last(); n++ {
		if scanned == maxScanned || len(out) == cap(out) {
			return out, uint32(n)
		}
		scanned++
		if c.Readable(n, owner) {
			out = append(out, c.At(n).Key)
		}
	}
	return out, 0
}

// maxScanned bounds how long one call of Keys holds the tier's lock.
const maxScanned = 1 << 16

// Now is in hundredths of a second since the catalog was made. It goes round after 497 days: the
// policy compares differences.
func (c *Catalog) Now() uint32 { return uint32(time.Since(c.began) / (10 * time.Millisecond)) }

// Readable reports whether a node is an owner's page that can be read.
func (c *Catalog) Readable(n index.Node, owner uint16) bool {
	if n == 0 {
		return false
	}
	e := c.At(n)
	return e.State == index.Live && !e.Doomed && c.Owner(uint32(n)) == owner
}

// Acquire finds an owner's page, counts a use and pins it; 0: it is not here.
func (c *Catalog) Acquire(owner uint16, k *page.Key) index.Node {
	n := c.Find(k)
	if !c.Readable(n, owner) || c.At(n).Pins >= maxPins {
		return 0
	}
	c.Touch(uint32(n), c.Now())
	c.Hold(n)
	return n
}

// Pinned is a page that an engine keeps in a tier.
type Pinned struct {
	Node  index.Node
	Bytes uint64    // that it takes of the tier's capacity
	Block mem.Block // where it is in the store's memory; without a region: it is elsewhere
}

// Keep is Acquire for a pin that an engine holds as long as it likes: the page's pins that are left
// are for reads, and the error names that.
func (c *Catalog) Keep(owner uint16, k *page.Key) (index.Node, error) {
	n := c.Find(k)
	if c.Readable(n, owner) && c.At(n).Pins >= maxKept {
		return 0, ErrPins
	}
	return c.Acquire(owner, k), nil
}

// Hold pins a page that is Live or Filling once more.
func (c *Catalog) Hold(n index.Node) {
	e := c.At(n)
	e.Pins++
	if e.Pins == 1 {
		c.Pin(uint32(n))
	}
}

// Drop ends one Acquire or Hold, or the pin of Begin. A doomed page goes with its last pin.
func (c *Catalog) Drop(n index.Node) {
	e := c.At(n)
	e.Pins--
	if e.Pins > 0 {
		return
	}
	c.Unpin(uint32(n), c.Now(), c.free)
	if e.Doomed {
		c.remove(n)
	}
}

// Doom makes a page that is pinned unreadable, and has it go with its last pin.
func (c *Catalog) Doom(n index.Node) { c.At(n).Doomed = true }

func (c *Catalog) free(n uint32) { c.Delete(index.Node(n)) }

func (c *Catalog) remove(n index.Node) {
	e := c.At(n)
	c.release(c.Owner(uint32(n)), e.Loc)
	e.State, e.Doomed = index.Gone, false
	c.Remove(uint32(n), c.free)
}

// GiveUp evicts a page without pins.
func (c *Catalog) GiveUp(n index.Node) {
	e := c.At(n)
	owner := c.Owner(uint32(n))
	if c.spill != nil && e.State == index.Live {
		var after *page.Key
		if up := c.Parent(uint32(n)); up != 0 {
			after = &c.At(index.Node(up)).Key
		}
		c.spill(owner, e, after)
	}
	c.aged(n)
	c.release(owner, e.Loc)
	e.State = index.Gone
	c.Evict(uint32(n), c.Hash(&e.Key), c.free)
	c.evicted++
}

// Bounds of one call of RemoveSome: some 0.2 ms.
const (
	maxRemoved = 1 << 10 // pages
	maxWalked  = 1 << 14 // entries
)

// Removing is how far the removal of an owner's pages has come; at first it is zero.
type Removing struct {
	began bool
	left  int        // pages that can be in the owner's queues
	at    index.Node // the next entry that is looked at; 0: none was yet
}

// RemoveSome drops some of the pages that an owner had at the first call, and reports whether it
// was the last one. Those with pins go with their last pin. It looks at all entries, from call to
// call, only where pages are left that are in no queue: those with pins, and those before them in
// their prompt.
func (c *Catalog) RemoveSome(owner uint16, r *Removing) (done bool) {
	if !r.began {
		r.began, r.left = true, c.Pages()
	}
	for i := 0; i < maxRemoved && r.left > 0; i++ {
		n := index.Node(c.Queued(owner))
		if n == 0 {
			r.left = 0
			break
		}
		r.left--
		c.drop(owner, n)
	}
	if c.Used(owner) == 0 {
		return true
	}
	if r.left > 0 {
		return false
	}
	from := max(1, r.at)
	last := min(c.Last(), from+maxWalked-1)
	for n := from; n <= last; n++ {
		e := c.At(n)
		if (e.State == index.Live || e.State == index.Filling) && c.Owner(uint32(n)) == owner {
			c.drop(owner, n)
		}
	}
	r.at = last + 1
	return last == c.Last()
}

// drop removes a page of an owner, or has it go with its last pin.
func (c *Catalog) drop(owner uint16, n index.Node) {
	e := c.At(n)
	if c.removed != nil {
		c.removed(owner, &e.Key)
	}
	if e.Pins > 0 {
		e.Doomed = true
		c.Unqueue(uint32(n))
		return
	}
	c.remove(n)
}

// Begin makes an entry of state Filling with one pin. after is the key of the page before it in its
// prompt, or nil. room is called while neither that page nor the entry itself can be given up, and
// returns the place for the page; it may evict.
func (c *Catalog) Begin(owner uint16, k, after *page.Key, room func() (loc uint32,
	err error)) (index.Node, error) {
	n := c.Find(k)
	// A hole keeps its owner: another namespace's page in it would be that owner's to read.
	if n != 0 && (c.At(n).State != index.Gone || c.Owner(uint32(n)) != owner) {
		if c.Readable(n, owner) {
			return 0, ErrExists
		}
		if c.At(n).Doomed && c.Owner(uint32(n)) == owner {
			return 0, ErrDoomed
		}
		return 0, ErrBusy
	}
	parent := index.Node(0)
	if after != nil {
		if parent = c.Find(after); parent != 0 && (c.At(parent).State == index.Gone ||
			c.Owner(uint32(parent)) != owner) {
			parent = 0
		}
	}
	keep := [2]index.Node{parent, n}
	for _, k := range keep {
		if k != 0 {
			c.Pin(uint32(k))
		}
	}
	loc, err := c.roomFor(owner, room)
	if err == nil && n == 0 {
		n, err = c.entry(owner, k)
		if err != nil {
			c.release(owner, loc)
		}
	}
	now := c.Now()
	if err == nil {
		e := c.At(n)
		e.State, e.Loc, e.CRC, e.Pins, e.Doomed = index.Filling, loc, 0, 1, false
		c.Insert(uint32(n), uint32(parent), c.Hash(k), owner, now)
		c.Pin(uint32(n))
	}
	for _, k := range keep {
		if k != 0 {
			c.Unpin(uint32(k), now, c.free)
		}
	}
	return n, err
}

// Follow names the page before one that may have begun without it.
func (c *Catalog) Follow(owner uint16, k, after *page.Key) {
	n, parent := c.Find(k), c.Find(after)
	if n != 0 && parent != 0 && c.Owner(uint32(n)) == owner {
		c.Policy.Follow(uint32(n), uint32(parent), c.Now())
	}
}

func (c *Catalog) roomFor(owner uint16, room func() (uint32, error)) (uint32, error) {
	for c.Over(owner) {
		if err := c.GiveUpOne(owner, evict.Any); err != nil {
			return 0, err
		}
	}
	return room()
}

// GiveUpOne evicts the page of a class that the policy names so that an owner gets one more.
func (c *Catalog) GiveUpOne(owner uint16, class uint8) error {
	v := c.Victim(owner, class, c.Now())
	if v == 0 {
		return ErrFull
	}
	c.GiveUp(index.Node(v))
	return nil
}

func (c *Catalog) entry(owner uint16, k *page.Key) (index.Node, error) {
	for {
		n, err := c.Table.Insert(k)
		if !errors.Is(err, index.ErrFull) {
			return n, err
		}
		if err := c.GiveUpOne(owner, evict.Any); err != nil {
			return 0, err
		}
	}
}

// Insert is the policy's; the table's is used by Begin only.
func (c *Catalog) Insert(n, parent uint32, hash uint64, owner uint16, now uint32) {
	c.Policy.Insert(n, parent, hash, owner, now)
}

// Finish makes a page readable that Begin began. The pin stays.
func (c *Catalog) Finish(n index.Node, crc uint32) {
	e := c.At(n)
	e.State, e.CRC = index.Live, crc
}

// Walk returns the keys that can be read among `most` nodes from a node on, 0 or the last result,
// and the node to go on with; 0: that was all.
func (c *Catalog) Walk(from index.Node, limit int) (keys []page.Key, next index.Node) {
	n, last := max(1, from), c.Last()
	for ; n <= last && limit > 0; n, limit = n+1, limit-1 {
		if e := c.At(n); e.State == index.Live && !e.Doomed {
			keys = append(keys, e.Key)
		}
	}
	if n > last {
		return keys, 0
	}
	return keys, n
}

// Pieces is how many keys are looked up under one hold of the tier's lock.
const Pieces = 1024

// Exists sets the bits of an owner's keys that can be read, for at most Pieces keys, from bit at
// on.
func (c *Catalog) Exists(owner uint16, keys []page.Key, found page.Bitmap, at int) {
	var nodes [Pieces]index.Node
	c.FindAll(keys, nodes[:len(keys)])
	for i, n := range nodes[:len(keys)] {
		if c.Readable(n, owner) {
			found.Set(at + i)
		}
	}
}
