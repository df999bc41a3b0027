// Package disk is the store's tier on files and block devices: pages in a log of segments.
//
// Each device has its own log. Pages are appended in groups: one block that describes up to 52
// pages, and the pages. A group is durable, and Write returns, after the device was synced. A
// segment that is full gets a footer with all its pages, so that a start reads footers and not
// groups. An embedded database as index was considered and left out: the index has to be in memory
// anyway, a footer costs one write per segment and one read at the start, and there is one thing
// less that can be damaged.
//
// Space comes back by cleaning. The policy chooses the pages to give up among all pages; a seventh
// of the space is kept spare, so that this leaves segments with little in them. The segment with
// the fewest bytes is cleaned: its pages are appended again, and once that is durable it is reused.
//
// Invariants. What Write has acknowledged is found after a crash, unless it was given up or removed
// since; what was removed is not found again, whatever is damaged (ledger). All pages of an owner
// are of one era, but those that are doomed and those of an owner that is being emptied. Read
// returns the bytes that were written, or an error: their checksum is compared on each way, into
// the tier and out of it. A segment is overwritten only after its new life is durable in its
// header, no reader is in it, and all it had is durable elsewhere or given up. A table counts only
// in the life of the segment that it was written in. A store that cannot be read by this release is
// refused, and not touched.
//
// Ownership: the tier owns its files, and locks them. Locks: log.mu, one appender or cleaner per
// device, is taken before Tier.mu, which guards all state in memory and is never held over I/O. The
// package starts no goroutine: reads and writes at the same time come from several of the caller's.
package disk

import (
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/catalog"
	"github.com/kvspray/kvspray/store/evict"
	"github.com/kvspray/kvspray/store/index"
	"github.com/kvspray/kvspray/store/offheap"
	"github.com/kvspray/kvspray/store/page"
)

// Bounds and defaults.
const (
	DefaultSegmentBytes = 64 << 20
	minSegmentBlocks    = 16
	maxSegmentBlocks    = 1 << 18 // 1 GiB
	minSegments         = 5       // of a device
	MaxDevices          = 64
	typicalPageBytes    = 64 << 10 // what MaxPages is derived from
	// MaxGroupBytes bounds what is written at once.
	MaxGroupBytes = 16 << 20
	// spareShare: 1/spareShare of the segments hold no pages that the policy counts, so that
	// cleaning finds room.
	spareShare = 7
	// Places on a device.
	ledgerAt   = 64 << 10
	segmentsAt = 1 << 20
)

// Device names one file, directory or block device.
type Device struct {
	Path string
	Size int64 // bytes
}

// Config describes a tier.
type Config struct {
	Devices      []Device
	SegmentBytes int // 0: DefaultSegmentBytes
	MaxPages     int // 0: one for every 64 KiB
}

// Errors that callers distinguish.
var (
	ErrMissing = errors.New("store.disk: the page is not here")
	ErrDamaged = errors.New("store.disk: the page is damaged")
	ErrRemoved = errors.New("store.disk: the namespace was removed meanwhile")
)

// Tier holds pages.
type Tier struct {
	id     storeID
	logs   []*log
	segb   uint32 // blocks of a segment
	ledger ledger
	notes  struct {
		mu   sync.Mutex // guards what follows; of other locks only log.syncing is taken under it
		last uint64     // generation of the newest copy that was read or written
	}

	mu       sync.Mutex // guards what follows, and the segments of the logs
	drained  sync.Cond  // a reader left a segment
	pages    *catalog.Catalog
	owners   map[uint16]*owner
	ids      map[page.ID]uint16
	seq      uint64 // the last life of a segment
	bytes    uint64 // of all pages
	limbo    uint64 // of those that have no place yet
	capacity uint64
	turn     int  // counts writes
	removes  bool // a namespace was removed in this start
	stats    Stats
}

type owner struct {
	id        page.ID
	pageBytes uint32
	// bytes of a device that a page takes at most, with its part of tables and of what stays unused
	cost     uint64
	emptying int // calls that remove its pages: it takes none meanwhile
}

// perSegment is how many pages of a size a segment holds if each is written alone: the worst case.
func (t *Tier) perSegment(pageBytes int) uint32 {
	each := blocksOf(pageBytes) + 1
	n := (t.segb - 2) / each
	footer := blocksOf(tableBytes(spacesInFooter, int(n)))
	if t.segb < 2+footer {
		return 0
	}
	return (t.segb - 2 - footer) / each
}

// spacesInFooter is how many namespaces one segment usually has at most.
const spacesInFooter = 8

// Stats are counts since the tier was opened.
type Stats struct {
	Pages, Bytes, Capacity uint64
	Evicted                uint64
	EvictionAge            time.Duration
	Damaged                uint64 // pages that were found so, and dropped
	Failed                 uint64 // segments that could not be written or synced
	Cleaned, Moved         uint64 // segments, and pages
	// Removed is the bytes of segments that may still have bytes of removed pages.
	Removed uint64
	Direct  bool // all devices bypass the page cache
}

// opened is a device that Open has opened.
type opened struct {
	path   string
	file   File
	size   int64 // that the store may use, where it makes a new one
	have   int64 // that the device has
	fresh  bool
	direct bool
}

// Open opens a store, or makes one where all devices are empty.
func Open(c Config) (*Tier, error) {
	if len(c.Devices) == 0 || len(c.Devices) > MaxDevices {
		return nil, fmt.Errorf("store.disk: %d devices: name 1 to %d", len(c.Devices), MaxDevices)
	}
	var devices []opened
	fail := func(path string, err error) (*Tier, error) {
		for _, d := range devices {
			_ = d.file.Close()
		}
		return nil, fmt.Errorf("store.disk path %s: %w", path, err)
	}
	for _, d := range c.Devices {
		f, size, err := openFile(d.Path)
		if err != nil {
			return fail(d.Path, err)
		}
		devices = append(devices, opened{path: d.Path, file: f, size: d.Size, have: size,
			direct: f.direct})
		o := &devices[len(devices)-1]
		if o.fresh, err = isFresh(f, size); err != nil {
			return fail(d.Path, err)
		}
		switch {
		case !o.fresh:
		case d.Size < segmentsAt+minSegments*int64(minSegmentBlocks)*block:
			return fail(d.Path, fmt.Errorf("size %d: less than the smallest store; raise it", d.Size))
		default:
			if o.have, err = f.grow(d.Size, size); err != nil {
				return fail(d.Path, err)
			}
		}
	}
	t, err := openAll(devices, c)
	if err != nil {
		for _, d := range devices {
			_ = d.file.Close()
		}
		return nil, err
	}
	return t, nil
}

// OpenDevice is a device that the caller has opened.
type OpenDevice struct {
	Path string // for messages
	File File
	Size int64 // bytes
}

// OpenFiles is Open on files of the caller's. On success they are the store's, on an error they
// stay the caller's.
func OpenFiles(files []OpenDevice, c Config) (*Tier, error) {
	var devices []opened
	for _, f := range files {
		fresh, err := isFresh(f.File, f.Size)
		if err != nil {
			return nil, fmt.Errorf("store.disk path %s: %w", f.Path, err)
		}
		devices = append(devices, opened{path: f.Path, file: f.File, size: f.Size,
			have: f.Size, fresh: fresh, direct: true})
	}
	return openAll(devices, c)
}

// isFresh reports whether a device holds nothing: no bytes, or only zeros where something would
// begin.
func isFresh(f File, size int64) (bool, error) {
	n := min(size, segmentsAt) / block * block
	if n == 0 {
		if size > 0 {
			return false,
				errors.New("it holds something that is no kvspray store; name another path, or " +
					"empty it yourself")
		}
		return true, nil
	}
	buf, err := offheap.New[byte](int(n))
	if err != nil {
		return false, err
	}
	defer buf.Free()
	if err := f.ReadAt(buf.Elems(), 0); err != nil {
		return false, err
	}
	for _, b := range buf.Elems() {
		if b != 0 {
			return false, nil
		}
	}
	return true, nil
}

// openAll makes or recovers a store on devices that are open. On an error they stay the caller's.
func openAll(devices []opened, c Config) (_ *Tier, err error) {
	if c.SegmentBytes == 0 {
		c.SegmentBytes = DefaultSegmentBytes
	}
	t := &Tier{owners: map[uint16]*owner{}, ids: map[page.ID]uint16{},
		segb: uint32(c.SegmentBytes / block)}
	t.drained.L = &t.mu
	if t.segb < minSegmentBlocks || t.segb > maxSegmentBlocks {
		return nil, fmt.Errorf("store.disk segment %d bytes: must be %d to %d", c.SegmentBytes,
			minSegmentBlocks*block, maxSegmentBlocks*block)
	}
	if err := t.identify(devices); err != nil {
		return nil, err
	}
	var segments uint64
	for _, l := range t.logs {
		l.first = uint32(segments)
		n := uint64(len(l.segments))
		segments += n
		l.capacity = (n - n/spareShare - 2) * uint64(t.segb) * block
		t.capacity += l.capacity
	}
	if segments*uint64(t.segb) > 1<<32-1 {
		return nil,
			fmt.Errorf("store.disk: %d segments of %d bytes: at most 16 TiB in all; lower size",
				segments, t.segb*block)
	}
	if c.MaxPages == 0 {
		c.MaxPages = int(max(64, t.capacity/typicalPageBytes))
	}
	if t.pages, err = catalog.New(c.MaxPages, t.releaseLocked); err != nil {
		return nil, fmt.Errorf("store.disk: %w", err)
	}
	if err := t.recover(); err != nil {
		t.pages.Close()
		return nil, err
	}
	return t, nil
}

// releaseLocked takes back the place of a page that went.
func (t *Tier) releaseLocked(id uint16, loc uint32) {
	n := t.owners[id].cost
	t.bytes -= n
	t.countLocked(loc, -n)
}

// noPlace is the place of a page that is being written.
const noPlace = 1<<32 - 1

// logOf is the log that has a place.
func (t *Tier) logOf(loc uint32) *log {
	for _, l := range t.logs {
		if loc/t.segb < l.first+uint32(len(l.segments)) {
			return l
		}
	}
	panic("disk: a place outside of all devices")
}

// Close closes the devices. No other call is under way.
func (t *Tier) Close() error {
	var errs []error
	for _, l := range t.logs {
		errs = append(errs, l.file.Close())
	}
	t.pages.Close()
	return errors.Join(errs...)
}

// IndexBytes is the memory of the index when it is full.
func (t *Tier) IndexBytes() int { return t.pages.Bytes() }

// Used is how many bytes of devices an owner's pages take.
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

// Stats returns them.
func (t *Tier) Stats() Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.stats
	s.Pages, s.Bytes, s.Capacity, s.Evicted = uint64(t.pages.Pages()), t.bytes, t.capacity,
		t.pages.Evicted()
	s.EvictionAge = t.pages.EvictionAge()
	for _, l := range t.logs {
		for i := range l.segments {
			if t.mayHaveRemovedLocked(&l.segments[i]) {
				s.Removed += uint64(t.segb) * block
			}
		}
	}
	return s
}

// SetOwner makes or changes an owner. The number of a namespace that was found on the disk is
// Known's.
func (t *Tier) SetOwner(n uint16, id page.ID, pageBytes int, quota, reserve uint64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.perSegment(pageBytes) == 0 {
		return fmt.Errorf("store.disk: page of %d bytes: does not fit into segments of %d "+
			"bytes; set store.segment to %d or more",
			pageBytes, t.segb*block, 2*PaddedBytes(pageBytes))
	}
	if o := t.owners[n]; o != nil && (o.id != id || o.pageBytes != uint32(pageBytes)) {
		return fmt.Errorf("store.disk: owner %d is namespace %s with pages of %d bytes", n, o.id,
			o.pageBytes)
	}
	o := evict.Owner{PageBytes: t.costOf(pageBytes), Max: quota, Min: reserve}
	if err := t.pages.CheckShares("store.disk", n, o, t.capacity); err != nil {
		return err
	}
	t.setOwnerLocked(n, id, pageBytes, quota, reserve)
	return nil
}

// costOf is how many bytes of a device a page of a namespace takes at most.
func (t *Tier) costOf(pageBytes int) uint64 {
	per := t.perSegment(pageBytes)
	return uint64((t.segb+per-1)/per) * block
}

func (t *Tier) setOwnerLocked(n uint16, id page.ID, pageBytes int, quota, reserve uint64) {
	if t.owners[n] == nil {
		t.owners[n] = &owner{id: id, pageBytes: uint32(pageBytes), cost: t.costOf(pageBytes)}
		t.ids[id] = n
	}
	t.pages.SetOwner(n, evict.Owner{PageBytes: t.owners[n].cost, Max: quota, Min: reserve})
}

// DropOwner forgets an owner, so that its number can be another's. The caller does not use the
// number any more. It reports whether the owner had no pages; otherwise nothing changes. What a
// device still has of it counts no more once the ledger is written again.
func (t *Tier) DropOwner(n uint16) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	o := t.owners[n]
	if t.pages.Used(n) != 0 || o != nil && o.emptying > 0 {
		return false
	}
	if o != nil {
		t.endEraLocked(o.id)
		delete(t.ids, o.id)
		delete(t.owners, n)
		t.pages.DropOwner(n)
	}
	return true
}

// Has reports whether a namespace may have pages here, found or not.
func (t *Tier) Has(id page.ID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, ok := t.ledger.eras[id]
	return ok
}

// Keeps reports whether any namespace may have pages here.
func (t *Tier) Keeps() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.ledger.eras) > 0
}

// Known is the number of each namespace that has an owner here.
func (t *Tier) Known() map[page.ID]uint16 {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make(map[page.ID]uint16, len(t.ids))
	for id, n := range t.ids {
		out[id] = n
	}
	return out
}

// Find is the number of a namespace that has an owner here, and the size of its pages.
func (t *Tier) Find(id page.ID) (n uint16, pageBytes int, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n, ok = t.ids[id]; ok {
		pageBytes = int(t.owners[n].pageBytes)
	}
	return n, pageBytes, ok
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

// Keep finds a page and protects it from eviction.
func (t *Tier) Keep(id uint16, k *page.Key) (p catalog.Pinned, ok bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n, err := t.pages.Keep(id, k)
	if n == 0 {
		return p, false, err
	}
	return catalog.Pinned{Node: n, Bytes: t.owners[id].cost}, true, nil
}

// Capacity is how many bytes of pages fit.
func (t *Tier) Capacity() uint64 { return t.capacity }

// Release ends a Keep.
func (t *Tier) Release(p catalog.Pinned) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pages.Drop(p.Node)
}

// OnRemove makes the tier call f for each page that is removed, as OnEvict. It is called before the
// first page is added.
func (t *Tier) OnRemove(f func(owner uint16, k *page.Key)) { t.pages.OnRemove(f) }

// OnEvict has f called with each page that is given up. f returns whether it will have read called,
// once, from any goroutine: with a buffer that gets the page's bytes. Until then the page's segment
// is not reused, so that must not take long. f calls nothing of the tier, whose lock is held, and
// does not wait. It is set before the first page.
func (t *Tier) OnEvict(f func(owner uint16, k, after *page.Key, crc uint32,
	read func([]byte) error) bool) {
	t.pages.OnEvict(func(id uint16, e *index.Entry, after *page.Key) {
		if e.Loc == noPlace {
			return
		}
		loc, l := e.Loc, t.logOf(e.Loc)
		seg := &l.segments[loc/t.segb-l.first]
		seg.readers++
		if !f(id, &e.Key, after, e.CRC, func(buf []byte) error {
			defer t.leave(seg)
			return l.fetchAny(loc, buf)
		}) {
			seg.readers--
		}
	})
}

// leave ends one reader of a segment.
func (t *Tier) leave(seg *segment) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if seg.readers--; seg.readers == 0 {
		t.drained.Broadcast()
	}
}

// fetchAny is fetch into a buffer of any length and place.
func (l *log) fetchAny(loc uint32, buf []byte) error {
	aligned, err := offheap.New[byte](PaddedBytes(len(buf)))
	if err != nil {
		return err
	}
	defer aligned.Free()
	err = l.fetch(loc, aligned.Elems())
	copy(buf, aligned.Elems())
	return err
}

// PaddedBytes is how long the buffers for an owner's pages are.
func PaddedBytes(pageBytes int) int { return int(blocksOf(pageBytes)) * block }

// Check compares the page in a buffer with its checksum. It may use the page in the same pass.
type Check func(page []byte, crc uint32) bool

// Sum is the plain Check.
func Sum(page []byte, crc uint32) bool { return mem.CRC32C(0, page) == crc }

// Follow names the page before one that may have been written without it.
func (t *Tier) Follow(id uint16, k, after *page.Key) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pages.Follow(id, k, after)
}

// Read reads an owner's page into buf, which is aligned to 4 KiB and PaddedBytes long, and has
// check compare it. It returns the checksum. A page that is damaged or cannot be read is dropped.
func (t *Tier) Read(id uint16, k *page.Key, buf []byte, check Check) (crc uint32, err error) {
	t.mu.Lock()
	n := t.pages.Acquire(id, k)
	if n == 0 {
		t.mu.Unlock()
		return 0, ErrMissing
	}
	e := *t.pages.At(n)
	size := int(t.owners[id].pageBytes)
	l := t.logOf(e.Loc)
	seg := &l.segments[e.Loc/t.segb-l.first]
	seg.readers++
	t.mu.Unlock()

	err = l.fetch(e.Loc, buf)

	t.leave(seg)
	if err == nil && !check(buf[:size], e.CRC) {
		err = ErrDamaged
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	// A page that was moved meanwhile is whole where it is now.
	if err != nil && t.pages.At(n).Loc == e.Loc {
		t.stats.Damaged++
		t.pages.Doom(n)
	}
	t.pages.Drop(n)
	if err != nil {
		return 0, fmt.Errorf("store.disk: page %s: %w", k, err)
	}
	return e.CRC, nil
}

// fetch reads what is at a place of the log. The segment is kept by a reader or a cleaner.
func (l *log) fetch(loc uint32, buf []byte) error {
	return l.file.ReadAt(buf, l.offset(loc/l.t.segb-l.first, loc%l.t.segb))
}

func newStoreID() (id storeID) {
	_, _ = rand.Read(id[:]) // never fails
	return id
}
