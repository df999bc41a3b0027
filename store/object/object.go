// Package object is the store's tier on an object store, such as S3: pages packed into immutable
// objects of DefaultObjectBytes or so.
//
// Each store has a prefix of its own in a bucket: a ledger, and objects with pages of one namespace
// each, behind a header that names them. Add copies a page into a buffer, where it can be read at
// once. A buffer that is full, or has waited for Config.MaxAge, is uploaded in the background. Add
// never waits: where all buffers wait for uploads, the page is not taken. A page is durable once
// Flush has returned after its Add.
//
// Space comes back by cleaning, one object at a time: of objects that are mostly dead, and of small
// ones, the pages that are left are merged into a new object; an object without pages is deleted.
//
// Invariants. Read passes on the bytes that were added, or an error: their checksum is compared on
// each way, into the tier and out of it. No start finds a removed page again, whatever is damaged:
// a removal ends the era of the namespace in the ledger, and each object has its era in its header.
// All pages of an owner are of one era, but those that are doomed and those of an owner
// that is being emptied. No two objects have one name. An object is deleted only when all it had is
// durable elsewhere, removed or given up. Objects of another store or format are not read, and
// nothing but this store's objects is ever deleted or replaced. Two processes with one prefix do
// no harm but misses: the one that started first can change the ledger no more.
//
// The tier goes on without the object store: it is asked again after a pause, which grows, and
// until then reads end at once with ErrAway.
//
// Ownership: the tier owns its Bucket. One lock, Tier.mu, guards all state and is never held over
// I/O; callers may hold the locks of other tiers. Goroutines: Config.Uploads that upload, two that
// fetch pages other tiers give up, and the keeper, which opens, cleans and deletes. Close joins
// them.
package object

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvspray/kvspray/store/catalog"
	"github.com/kvspray/kvspray/store/evict"
	"github.com/kvspray/kvspray/store/page"
)

// Bounds and defaults.
const (
	DefaultObjectBytes = 32 << 20
	MinObjectBytes     = 8 << 20
	maxObjectBytes     = 1 << 30
	maxPages           = 1 << placeBits // of an object
	maxObjects         = 1 << (32 - placeBits)
	placeBits          = 12
	typicalPageBytes   = 64 << 10 // what MaxPages is derived from
	// spareShare: 1/spareShare of the size holds no pages that the policy counts, so that objects
	// can be partly dead.
	spareShare = 7
	// MaxRangeBytes bounds what one request reads.
	MaxRangeBytes = 8 << 20
)

// Config describes a tier.
type Config struct {
	Bucket      Bucket
	Prefix      string // of the names of all objects; this store's alone
	Size        uint64 // bytes of objects that the tier aims at
	ObjectBytes int    // 0: DefaultObjectBytes
	MaxPages    int    // 0: one for every 64 KiB
	Buffers     int    // memory for objects to upload, in objects; 0: 8
	Uploads     int    // at the same time; 0: 4
	Loads       int    // headers that a start reads at the same time; 0: 64
	MaxAge      time.Duration
	Timeouts    Timeouts
}

// Timeouts bound how long the object store may take. Each includes all retries.
type Timeouts struct {
	Open   time.Duration // Open, until the ledger is read and written; 0: 10 s
	Read   time.Duration // one ranged read of up to MaxRangeBytes; 0: 5 s
	Small  time.Duration // a header, a list page, a deletion, the ledger; 0: 15 s
	Upload time.Duration // one object; afterwards its pages are given up; 0: 2 min
	Close  time.Duration // the uploads of Close; 0: 10 s
}

func (c *Config) complete() error {
	for _, d := range []struct {
		v *time.Duration
		d time.Duration
	}{
		{&c.MaxAge, time.Minute}, {&c.Timeouts.Open, 10 * time.Second},
		{&c.Timeouts.Read, 5 * time.Second}, {&c.Timeouts.Small, 15 * time.Second},
		{&c.Timeouts.Upload, 2 * time.Minute}, {&c.Timeouts.Close, 10 * time.Second},
	} {
		if *d.v == 0 {
			*d.v = d.d
		}
	}
	for _, n := range []struct {
		v *int
		d int
	}{{&c.ObjectBytes, DefaultObjectBytes}, {&c.Buffers, 8}, {&c.Uploads, 4}, {&c.Loads, 64}} {
		if *n.v == 0 {
			*n.v = n.d
		}
	}
	if c.Prefix != "" && c.Prefix[len(c.Prefix)-1] != '/' {
		c.Prefix += "/"
	}
	bad := func(field string, value any, problem, remedy string) error {
		return &ConfigError{field, fmt.Sprint(value), problem, remedy}
	}
	switch {
	case c.ObjectBytes < MinObjectBytes || c.ObjectBytes > maxObjectBytes:
		return bad("object_bytes", c.ObjectBytes, fmt.Sprintf("is not %d to %d", MinObjectBytes,
			maxObjectBytes), "leave it out, for 32 MiB")
	case c.Size < uint64(4*c.ObjectBytes):
		return bad("size", c.Size, "holds less than four objects", fmt.Sprintf("raise it to %d "+
			"or more", 4*c.ObjectBytes))
	case c.Size/uint64(c.ObjectBytes) > maxObjects/4:
		return bad("size", c.Size, fmt.Sprintf("has more than %d objects", maxObjects/4),
			fmt.Sprintf("lower it to %d", maxObjects/4*c.ObjectBytes))
	case c.Buffers < 2:
		return bad("buffers", c.Buffers, "is less than 2", "leave it out, for 8")
	case c.Uploads < 1 || c.Loads < 1:
		return bad("uploads", c.Uploads, "is less than 1", "leave it out, for 4")
	}
	return nil
}

// Tier holds pages.
type Tier struct {
	c        Config
	capacity uint64
	ctx      context.Context // until Close
	cancel   context.CancelFunc
	running  sync.WaitGroup
	spills   chan spill

	book sync.Mutex // held while the ledger is read or written; taken before mu
	tag  string     // of the ledger as this process wrote it last; guarded by book

	mu      sync.Mutex // guards what follows
	wake    sync.Cond  // something changed for a goroutine of the tier
	ledger  ledger
	pending map[page.ID]bool // removed before the ledger could be read
	state   state
	closed  bool
	problem error // why it does not store, or what it passed over
	silent  int   // requests without an answer, one after the other
	silence error // of the last of them, once they are many; nil: it answers
	// what the object store refused, which only a person mends, by the request's first word, until
	// one of its kind succeeds
	refused map[string]error
	life    uint64
	pages   *catalog.Catalog
	owners  map[page.ID]*Owner
	numbers [evict.MaxOwners]*Owner
	ended   *Owner // has the objects of eras that have ended
	uses    uint64 // of owners: each that was opened or closed has a number
	objects []*object
	free    []uint32 // numbers of objects
	buffers int      // in use
	queue   []*builder
	bytes   uint64 // of all pages that can be read
	stored  uint64 // bytes of all objects
	away    time.Time
	pause   time.Duration
	dirty   bool // there may be something to clean
	stats   Stats
}

// state is how far the tier has come.
type state uint8

const (
	opening state = iota // the ledger is not written yet
	loading              // headers are being read
	ready
	stopped // it stores and removes nothing any more
)

// Owner is one namespace.
type Owner struct {
	t         *Tier
	id        page.ID
	number    uint16
	pageBytes int
	builder   *builder // that takes pages
	users     int
	last      uint64 // of Tier.uses
	objects   int    // that have pages of it
	emptying  int    // calls that remove its pages: it takes none meanwhile
}

// cost is what a page takes of an object.
func (o *Owner) cost() uint64 { return uint64(o.pageBytes + entryBytes) }

// perObject is how many pages an object has at most.
func (t *Tier) perObject(pageBytes int) int {
	n := (t.c.ObjectBytes - headBytes) / (pageBytes + entryBytes)
	return min(max(n, 1), maxPages)
}

// object is what the tier has of one object of the bucket, or of one that becomes one.
type object struct {
	number  uint32
	life    uint64
	owner   *Owner
	begin   uint32 // where its pages begin
	pages   int    // in its header
	live    int    // that the catalog places here
	bytes   uint64
	readers int
	era     page.Era
	kept    int      // pages of builders that are here, too: it stays until these are uploaded
	b       *builder // its bytes, until it is uploaded and has no readers
	stored  bool     // it is uploaded
	doomed  bool     // it could not be: its name is deleted when it has no pages
	busy    bool     // it is being merged or deleted
}

func (o *object) name(t *Tier) string { return fmt.Sprintf("%spages/%016x", t.c.Prefix, o.life) }

// Stats are counts since the tier was opened.
type Stats struct {
	Ready                  bool // all objects of earlier starts are found
	Pages, Bytes, Capacity uint64
	Objects, Stored        uint64 // and their bytes
	Added, Uploaded        uint64 // pages; uploaded ones are durable
	Dropped                uint64 // pages that were not taken, or whose upload failed
	Evicted                uint64
	EvictionAge            time.Duration
	Damaged, Missing       uint64 // pages that were found so, and dropped
	Retries, Failed        uint64 // requests
	Moved, Deleted         uint64 // pages, and objects
	Removed                uint64 // bytes of objects of removed pages that are not deleted yet
	Foreign                uint64 // objects that are another store's or format's, or damaged
	Problem                string // the fault that an operator must mend; empty: nothing
}

// Open opens the store of a prefix, or makes one where it has none. A mistake in the configuration
// is returned. An object store that does not answer within Timeouts.Open is none: the tier goes on
// without it, until it does.
func Open(c Config) (*Tier, error) {
	if err := c.complete(); err != nil {
		return nil, err
	}
	capacity := c.Size - c.Size/spareShare
	if c.MaxPages == 0 {
		c.MaxPages = int(max(64, capacity/typicalPageBytes))
	}
	t := &Tier{c: c, capacity: capacity, owners: map[page.ID]*Owner{}, spills: make(chan spill,
		maxSpills), refused: map[string]error{}}
	t.wake.L = &t.mu
	_, _ = rand.Read(t.ledger.process[:]) // never fails
	t.ledger.eras, t.pending = map[page.ID]era{}, map[page.ID]bool{}
	t.ended = &Owner{t: t}
	var err error
	if t.pages, err = catalog.New(c.MaxPages, t.releaseLocked); err != nil {
		return nil, fmt.Errorf("store.object: %w", err)
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	ctx, cancel := context.WithTimeout(t.ctx, c.Timeouts.Open)
	err = t.begin(ctx)
	cancel()
	if mistake(err) {
		t.cancel()
		t.pages.Close()
		return nil, err
	}
	t.start(err)
	return t, nil
}

// mistake reports whether an error is one that only a person mends.
func mistake(err error) bool {
	var c *ConfigError
	return errors.As(err, &c)
}

func (t *Tier) start(err error) {
	t.problem = err
	for range t.c.Uploads {
		t.running.Go(t.upload)
	}
	for range spillers {
		t.running.Go(t.fetchSpills)
	}
	t.running.Go(t.keep)
}

// Close uploads what is in buffers, for Timeouts.Close at most, and ends the tier. No other call is
// under way, but those of other tiers that give up pages.
func (t *Tier) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), t.c.Timeouts.Close)
	defer cancel()
	err := t.Flush(ctx)
	t.mu.Lock()
	t.closed = true
	t.wake.Broadcast()
	t.mu.Unlock()
	t.cancel()
	close(t.spills)
	t.running.Wait()
	for _, o := range t.objects {
		if o != nil && o.b != nil {
			o.b.mem.Free()
		}
	}
	t.pages.Close()
	t.c.Bucket.Close()
	return err
}

// Stats returns them.
func (t *Tier) Stats() Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.stats
	s.Ready = t.state == ready
	s.Pages, s.Bytes, s.Capacity = uint64(t.pages.Pages()), t.bytes, t.capacity
	s.Objects, s.Stored, s.Evicted = uint64(len(t.objects)-len(t.free)), t.stored, t.pages.Evicted()
	s.EvictionAge = t.pages.EvictionAge()
	for _, x := range t.objects {
		if x != nil && (x.stored || x.doomed) && t.ledger.eras[x.owner.id].era != x.era {
			s.Removed += x.bytes
		}
	}
	s.Problem = t.problemLocked()
	return s
}

// Problem is Stats.Problem; it costs no look at each object.
func (t *Tier) Problem() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.problemLocked()
}

func (t *Tier) problemLocked() string {
	switch {
	case t.problem != nil:
		return t.problem.Error()
	case len(t.refused) > 0:
		return t.refused[slices.Min(slices.Collect(maps.Keys(t.refused)))].Error()
	case t.silence != nil:
		return t.silence.Error()
	}
	return ""
}

// Ready returns once all objects of earlier starts are found, or the tier has stopped.
func (t *Tier) Ready(ctx context.Context) error {
	return t.until(ctx, func() (bool, error) {
		switch {
		case t.closed:
			return true, ErrClosed
		case t.state == stopped:
			return true, t.problem
		}
		return t.state == ready, nil
	})
}

// until waits until done returns true, which is called with mu held.
func (t *Tier) until(ctx context.Context, done func() (bool, error)) error {
	stop := context.AfterFunc(ctx, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.wake.Broadcast()
	})
	defer stop()
	t.mu.Lock()
	defer t.mu.Unlock()
	for {
		if ok, err := done(); ok {
			return err
		}
		if err := ctx.Err(); err != nil {
			return errors.Join(fmt.Errorf("store.object: %w", err), t.problem)
		}
		t.wake.Wait()
	}
}

// Owner makes an owner, or changes its shares. Each call is followed by one Owner.Close.
func (t *Tier) Owner(id page.ID, pageBytes int, quota, reserve uint64) (*Owner, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	o, err := t.ownerLocked(id, pageBytes)
	for range maxVictims {
		if !errors.Is(err, errOwners) || !t.giveUpOwnerLocked() {
			break
		}
		o, err = t.ownerLocked(id, pageBytes)
	}
	if err != nil {
		return nil, err
	}
	e := evict.Owner{PageBytes: o.cost(), Max: quota, Min: reserve}
	if err := t.pages.CheckShares("store.object", o.number, e, t.capacity); err != nil {
		return nil, err
	}
	t.pages.SetOwner(o.number, e)
	o.users++
	t.usedLocked(o)
	return o, nil
}

// Used is how many bytes of objects the owner's pages take.
func (o *Owner) Used() uint64 {
	o.t.mu.Lock()
	defer o.t.mu.Unlock()
	return o.t.pages.Used(o.number)
}

// Close ends one use of an owner. Its pages stay.
func (o *Owner) Close() {
	o.t.mu.Lock()
	defer o.t.mu.Unlock()
	o.users--
	o.t.usedLocked(o)
}

func (t *Tier) usedLocked(o *Owner) {
	t.uses++
	o.last = t.uses
}

// maxVictims bounds the owners that are emptied for another one: a page of each can be pinned.
const maxVictims = 8

var errOwners = fmt.Errorf("store.object: all %d namespaces that it can have are in use or have "+
	"uploads under way; close those that are not needed", evict.MaxOwners)

func (t *Tier) ownerLocked(id page.ID, pageBytes int) (*Owner, error) {
	if o := t.owners[id]; o != nil {
		if o.pageBytes != pageBytes {
			return nil, fmt.Errorf("store.object: namespace %s has pages of %d bytes, not of %d",
				id, o.pageBytes, pageBytes)
		}
		return o, nil
	}
	for range 2 {
		for n := range t.numbers {
			if t.numbers[n] == nil {
				o := &Owner{t: t, id: id, number: uint16(n), pageBytes: pageBytes}
				t.numbers[n], t.owners[id] = o, o
				t.pages.SetOwner(o.number, evict.Owner{PageBytes: o.cost()})
				return o, nil
			}
		}
		t.reclaimLocked()
	}
	return nil, errOwners
}

// reclaimLocked forgets owners without users and pages.
func (t *Tier) reclaimLocked() {
	for n, o := range t.numbers {
		if o != nil && o.users == 0 && o.objects == 0 && o.emptying == 0 &&
			t.pages.Used(uint16(n)) == 0 {
			t.pages.DropOwner(uint16(n))
			delete(t.owners, o.id)
			t.numbers[n] = nil
			t.endEraLocked(o.id)
		}
	}
}

// giveUpOwnerLocked drops the pages of the owner whose last use is the oldest, among those that are
// not in use and have nothing to upload. Its objects are deleted in the background. It releases mu
// meanwhile. false: there is none.
func (t *Tier) giveUpOwnerLocked() bool {
	waits := map[*Owner]bool{}
	for _, x := range t.objects {
		if x != nil && (x.b != nil || x.busy || x.readers > 0) {
			waits[x.owner] = true
		}
	}
	var oldest *Owner
	for _, o := range t.numbers {
		if o != nil && o.users == 0 && o.emptying == 0 && !waits[o] &&
			(oldest == nil || o.last < oldest.last) {
			oldest = o
		}
	}
	if oldest == nil {
		return false
	}
	usedLast := oldest.last
	t.emptyLocked(oldest)
	if oldest.users > 0 || oldest.last != usedLast || t.pages.Used(oldest.number) > 0 {
		return true // it is used now, or a page is pinned
	}
	for _, x := range t.objects {
		if x != nil && x.owner == oldest && x.live == 0 && x.b == nil && !x.busy && x.readers == 0 {
			x.owner = t.ended
			t.ended.objects++
			oldest.objects--
		}
	}
	return true
}

// Exists sets the bits of the owner's keys that are here and can be asked for.
func (o *Owner) Exists(keys []page.Key, found page.Bitmap) {
	t := o.t
	for at := 0; at < len(keys); at += catalog.Pieces {
		some := keys[at:min(at+catalog.Pieces, len(keys))]
		t.mu.Lock()
		if !t.isAwayLocked() {
			t.pages.Exists(o.number, some, found, at)
		} else {
			for i := range some {
				if t.hasLocked(o, &some[i]) {
					found.Set(at + i)
				}
			}
		}
		t.mu.Unlock()
	}
}

// Has reports whether an owner's page is here and can be asked for.
func (o *Owner) Has(k *page.Key) bool {
	o.t.mu.Lock()
	defer o.t.mu.Unlock()
	return o.t.hasLocked(o, k)
}

// hasLocked is Has: while the object store does not answer, there are the pages in buffers.
func (t *Tier) hasLocked(o *Owner, k *page.Key) bool {
	n := t.pages.Find(k)
	if !t.pages.Readable(n, o.number) {
		return false
	}
	x, _ := t.at(t.pages.At(n).Loc)
	return x.b != nil || !t.isAwayLocked()
}

// Keep finds a page and protects it from eviction.
func (o *Owner) Keep(k *page.Key) (p catalog.Pinned, ok bool, err error) {
	o.t.mu.Lock()
	defer o.t.mu.Unlock()
	n, err := o.t.pages.Keep(o.number, k)
	return catalog.Pinned{Node: n, Bytes: o.cost()}, n != 0, err
}

// Capacity is how many bytes of pages fit.
func (t *Tier) Capacity() uint64 { return t.capacity }

// Release ends a Keep.
func (t *Tier) Release(p catalog.Pinned) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pages.Drop(p.Node)
}

// at is the object of a place, and which of its pages the place is.
func (t *Tier) at(loc uint32) (*object, uint32) {
	return t.objects[loc>>placeBits], loc & (maxPages - 1)
}

// offset is where a page is in its object.
func (o *object) offset(i uint32) int64 {
	return int64(o.begin) + int64(i)*int64(o.owner.pageBytes)
}

// countLocked counts a page that has its place in an object now, or no more.
func (t *Tier) countLocked(loc uint32, n int) {
	o, _ := t.at(loc)
	o.live += n
	t.bytes += uint64(n) * o.owner.cost()
	if n < 0 {
		t.touchLocked()
	}
}

// touchLocked has the keeper look for something to clean.
func (t *Tier) touchLocked() {
	if !t.dirty {
		t.dirty = true
		t.wake.Broadcast()
	}
}

// releaseLocked takes back the place of a page that went.
func (t *Tier) releaseLocked(_ uint16, loc uint32) { t.countLocked(loc, -1) }

// roomLocked gives up pages until one more fits into what the tier may hold.
func (t *Tier) roomLocked(o *Owner) error {
	for t.bytes+o.cost() > t.capacity {
		if err := t.pages.GiveUpOne(o.number, evict.Any); err != nil {
			return fmt.Errorf("store.object: %w", err)
		}
	}
	return nil
}

// newObjectLocked makes an object of this life.
func (t *Tier) newObjectLocked(o *Owner, e page.Era, life uint64) (*object, error) {
	n := uint32(len(t.objects))
	if len(t.free) > 0 {
		n = t.free[len(t.free)-1]
		t.free = t.free[:len(t.free)-1]
	} else {
		if n == maxObjects {
			return nil, fmt.Errorf("store.object: %d objects: a store has no more", n)
		}
		t.objects = append(t.objects, nil)
	}
	x := &object{number: n, life: life, owner: o, era: e}
	t.objects[n] = x
	o.objects++
	return x, nil
}

// forgetLocked ends an object that has no pages and no readers, and is not in the bucket.
func (t *Tier) forgetLocked(x *object) {
	t.stored -= x.bytes
	t.objects[x.number] = nil
	t.free = append(t.free, x.number)
	x.owner.objects--
	t.returnLocked(x)
}

// returnLocked gives a buffer back.
func (t *Tier) returnLocked(x *object) {
	if x.b == nil {
		return
	}
	x.b.mem.Free()
	x.b = nil
	t.buffers--
	t.wake.Broadcast()
}

// nextLifeLocked is a number that no object had.
func (t *Tier) nextLifeLocked() uint64 {
	t.life++
	return t.life
}

// epochOf is the start that numbered a life.
func epochOf(life uint64) uint64 { return life >> epochShift }
