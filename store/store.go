package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/disk"
	"github.com/kvspray/kvspray/store/evict"
	"github.com/kvspray/kvspray/store/memory"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/store/removal"
)

// MaxSpaces bounds the namespaces of a store that are open or have pages. One more takes the place
// of the one that has not been open for longest, which loses its pages.
const MaxSpaces = evict.MaxSpaces

// minWorkers: reads of disks block, so there are more workers than processors.
const minWorkers = 8

// Config describes a store.
type Config struct {
	Memory    memory.Config
	Disk      *disk.Config // nil: none
	Opened    *disk.Tier   // instead of Disk: one that is open, and the store's from now on
	WriteBack bool         // a put is done once it is in memory, and goes to the disk afterwards
	Workers   int          // 0: twice the processors, at least 8

	Object       *object.Config // nil: none
	OpenedObject *object.Tier   // instead of Object: one that is open, and the store's from now on
	ObjectAtPut  bool           // a page goes there at its put, not only when no other tier keeps it
	Fetchers     int            // reads of the object store at the same time; 0: 16

	// Copy copies each block of one list to the block at the same place of the other, which is as
	// long, between the store's arena and the memory of a GPU, in any number of regions. When it
	// returns nothing is in flight.
	// nil: mem.Device copies.
	Copy func(to, from []mem.Block) error

	// EraseWithin is how long it takes, if the disk has room and works, until what removed pages have
	// left there is overwritten; 0: an hour.
	EraseWithin time.Duration

	// Shares are those of a namespace that no engine has opened, and of every namespace in the object
	// tier; nil: there are none.
	Shares func(page.ID) Shares

	// Peers have pages that this node's memory and disk lack. It is called once, before the store is
	// used; nil: no other node is asked.
	Peers func(*Store) Peers
}

// Store is the tiers of one node.
type Store struct {
	tiers     [Object + 1]tier // by Tier, nearest first
	memory    *memory.Tier     // the same tiers
	disk      *disk.Tier       // nil: none
	object    *objectTier      // nil: none
	writeBack *writeBack       // nil: a put is done once it is on the disk
	atPut     bool             // pages go to the object tier at their put
	shares    func(page.ID) Shares
	copy      func(to, from []mem.Block) error
	removing  [MaxSpaces]atomic.Int32 // removals under way: nothing goes to the object tier
	stages    [stages]*stage          // in the order in which pages pass them; nil: there is none

	peers Peers // nil: none
	feed  *feed // nil: there are no Peers

	// life counts the calls that use the tiers outside of a worker. Close adds closing, waits for
	// those under way, and ends the tiers.
	life atomic.Int64
	idle chan struct{} // has room for one: no call is under way any more

	mu      sync.Mutex // guards what follows; not held over I/O
	spaces  map[page.ID]*Space
	numbers [MaxSpaces]bool // in use
	uses    uint64          // of namespaces: each that was opened or closed has a number
	closed  bool

	counters counters

	eraseWithin time.Duration
	erase       chan struct{} // has room for one: a namespace was removed
	noErase     chan struct{} // closed by Close
	eraser      sync.WaitGroup
}

type counters struct {
	hits                                      [Peer + 1]atomic.Uint64
	misses, damaged, stored, existed, refused atomic.Uint64
}

// Open makes a store, or recovers the one on the disks.
func Open(c Config) (*Store, error) {
	s := &Store{copy: c.Copy, shares: c.Shares,
		spaces: map[page.ID]*Space{}, idle: make(chan struct{}, 1), eraseWithin: c.EraseWithin,
		erase: make(chan struct{}, 1), noErase: make(chan struct{})}
	if c.WriteBack {
		s.writeBack = newWriteBack()
	}
	if s.eraseWithin == 0 {
		s.eraseWithin = defaultEraseWithin
	}
	if err := s.openTiers(&c); err != nil {
		return nil, errors.Join(err, s.closeTiers())
	}
	s.start(&c)
	return s, nil
}

func (s *Store) openTiers(c *Config) (err error) {
	for i := range s.tiers {
		s.tiers[i] = noTier{}
	}
	if s.memory, err = memory.New(c.Memory); err != nil {
		return err
	}
	s.tiers[Memory] = memoryTier{s.memory}
	if s.disk = c.Opened; c.Disk != nil {
		if s.disk, err = disk.Open(*c.Disk); err != nil {
			return err
		}
	}
	if s.disk != nil {
		s.tiers[Disk] = s.disk
	}
	objects := c.OpenedObject
	if c.Object != nil {
		if objects, err = object.Open(*c.Object); err != nil {
			return err
		}
	}
	if objects != nil {
		s.object = &objectTier{Tier: objects}
		s.tiers[Object] = s.object
	}
	return nil
}

func (s *Store) closeTiers() error {
	var errs []error
	for _, t := range slices.Backward(s.tiers[:]) { // one may be reading pages of those before it
		errs = append(errs, t.Close())
	}
	return errors.Join(errs...)
}

func (s *Store) start(c *Config) {
	if s.disk != nil {
		for _, n := range s.disk.Known() {
			s.numbers[n] = true
		}
	}
	s.stages[requests] = newStage(requests, cmp.Or(c.Workers,
		max(minWorkers, 2*runtime.GOMAXPROCS(0))), s.requestSize, s.serveRequest)
	if s.disk == nil {
		s.stages[requests].fair.copiers(runtime.GOMAXPROCS(0))
	}
	if c.Peers != nil {
		s.feed = newFeed()
		s.peers = c.Peers(s)
		s.stages[peerFinds] = newStage(peerFinds, peerFinders,
			func(_ *Batch, pages []int, _ bool) int { return len(pages) }, s.findPages)
		s.stages[peerReads] = s.peerStage()
	}
	if s.object != nil {
		s.atPut = c.ObjectAtPut
		s.stages[objectReads] = s.objectStage(cmp.Or(c.Fetchers, defaultFetchers))
	}
	s.watchEvictions()
	if s.disk != nil {
		s.eraser.Go(s.eraseRemoved)
		s.eraseSoon() // what earlier starts have left
	}
	for _, st := range s.stages {
		st.start()
	}
}

// Close ends the store: requests that are under way end first, new ones are refused. It ends all
// pins: their blocks are read no more. Idempotent.
func (s *Store) Close() error {
	s.mu.Lock()
	closed := s.closed
	s.closed = true
	s.mu.Unlock()
	if closed {
		return nil
	}
	close(s.noErase)
	s.eraser.Wait()
	for _, st := range s.stages { // each adds pages to those after it
		st.close()
	}
	if s.life.Add(closing) != closing {
		<-s.idle
	}
	return s.closeTiers()
}

// enter keeps the tiers until leave; false: they are closed.
func (s *Store) enter() bool {
	if s.life.Add(1) < 0 {
		s.leave()
		return false
	}
	return true
}

func (s *Store) leave() {
	if s.life.Add(-1) == closing {
		select {
		case s.idle <- struct{}{}:
		default:
		}
	}
}

// closing is more than all calls that can be under way.
const closing = -1 << 62

// Flush returns once all pages whose results came before are durable, or could not be made so, and
// all that were on their way to the object store are there.
func (s *Store) Flush(ctx context.Context) error {
	if s.writeBack != nil {
		if err := s.writeBack.wait(ctx); err != nil {
			return err
		}
	}
	if s.object != nil {
		return s.object.Flush(ctx)
	}
	return nil
}

// Region is the memory of all slots, for engines and transports to map and pin.
func (s *Store) Region() *mem.Region { return s.memory.Region() }

// Share is a namespace's part of one tier, in bytes.
type Share struct {
	Quota   uint64 // it never has more; 0: no limit
	Reserve uint64 // pages of other namespaces never take these
}

// Shares are a namespace's parts of all tiers, by Tier.
type Shares [Object + 1]Share

func (s *Store) sharesOf(id page.ID) (out Shares) {
	if s.shares != nil {
		out = s.shares(id)
	}
	return out
}

// Space is one namespace.
type Space struct {
	s         *Store
	id        page.ID
	number    uint16
	pageBytes int
	shares    Shares        // guarded by Store.mu
	object    *object.Owner // nil: the store has no object tier
	// users counts those that opened it, its batches, and its calls under way. At 0 the number can be
	// given to another namespace, and only Store.Space makes it 1 again, under Store.mu.
	users atomic.Int64
	last  uint64 // of Store.uses; guarded by Store.mu
	// removals counts those that have begun. What a put has found in memory before one, or during it,
	// does not go to other tiers.
	removals atomic.Uint64

	counts counts
	flows  [stages]flow // each guarded by the lock of its stage
}

// Space opens a namespace. A second call for the same one returns the same Space, and changes its
// shares. Each call is followed by one Space.Close.
func (s *Store) Space(ns page.Namespace, shares Shares) (*Space, error) {
	if err := ns.Check(); err != nil {
		return nil, err
	}
	id := ns.ID()
	if !s.enter() {
		return nil, ErrClosed
	}
	defer s.leave()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	n, err := s.numberLocked(id)
	if err != nil {
		return nil, err
	}
	return s.openLocked(id, n, ns.PageBytes, shares)
}

// openLocked gives a namespace its shares of all tiers, or leaves everything as it was.
func (s *Store) openLocked(id page.ID, n uint16, pageBytes int, shares Shares) (*Space, error) {
	sp := s.spaces[id]
	isNew := sp == nil
	if isNew {
		sp = &Space{s: s, id: id, number: n, pageBytes: pageBytes}
	}
	set := func(t Tier, share Share) error {
		return s.tiers[t].SetOwner(n, id, pageBytes, share.Quota, share.Reserve)
	}
	for t, share := range shares {
		err := set(Tier(t), share)
		if err == nil {
			continue
		}
		for t, share := range sp.shares[:t] {
			_ = set(Tier(t), share)
			if isNew {
				s.tiers[t].DropOwner(n) // unless it has pages of an earlier start
			}
		}
		return nil, fmt.Errorf("store: namespace %s: %w", id, err)
	}
	sp.shares = shares
	if isNew && s.object != nil {
		sp.object = s.object.owners[n].Load()
	}
	s.uses++
	sp.last = s.uses
	s.spaces[id] = sp
	s.numbers[n] = true
	sp.users.Add(1)
	return sp, nil
}

// Use adds one use of a namespace that has one, which ends with a Close of its own.
func (sp *Space) Use() { sp.users.Add(1) }

// Close ends one use of a namespace. Its pages stay, and so do batches under way and pins. Calls
// after the last Close are refused.
func (sp *Space) Close() {
	sp.s.mu.Lock()
	defer sp.s.mu.Unlock()
	sp.s.uses++
	sp.last = sp.s.uses
	sp.users.Add(-1)
}

// acquire keeps the space and its store until release.
func (sp *Space) acquire() error {
	if !sp.hold() {
		return ErrClosed
	}
	if !sp.s.enter() {
		sp.users.Add(-1)
		return ErrClosed
	}
	return nil
}

func (sp *Space) release() {
	sp.s.leave()
	sp.users.Add(-1)
}

// hold counts one more user of a space that has one.
func (sp *Space) hold() bool {
	for {
		n := sp.users.Load()
		if n < 1 {
			return false
		}
		if sp.users.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// reclaimLocked frees the numbers of namespaces that are closed and have no pages.
func (s *Store) reclaimLocked() {
	used := map[uint16]*Space{}
	for _, sp := range s.spaces {
		used[sp.number] = sp
	}
	for i := range s.numbers {
		n := uint16(i)
		sp := used[n]
		if !s.numbers[n] || sp != nil && sp.users.Load() > 0 || s.memory.Used(n) != 0 ||
			!s.tiers[Disk].DropOwner(n) {
			continue
		}
		s.memory.DropOwner(n) // it has no pages, and no batch that could add one
		s.tiers[Object].DropOwner(n)
		s.numbers[n] = false
		if sp != nil {
			delete(s.spaces, sp.id)
		}
	}
}

// numberLocked is the number of a namespace that has one, or a free one. If it has to empty another
// namespace for that, it releases mu meanwhile.
func (s *Store) numberLocked(id page.ID) (uint16, error) {
	tried := map[uint16]bool{}
	for {
		if sp := s.spaces[id]; sp != nil {
			return sp.number, nil
		}
		if s.disk != nil {
			if n, _, ok := s.disk.Find(id); ok {
				return n, nil
			}
		}
		for range 2 {
			for n := range s.numbers {
				if !s.numbers[n] {
					return uint16(n), nil
				}
			}
			s.reclaimLocked()
		}
		n, ok := s.oldestLocked(tried)
		if !ok {
			return 0, fmt.Errorf("store: all %d namespaces that a store can have are in use; close those "+
				"that are not needed", MaxSpaces)
		}
		tried[n] = true // its pages may be pinned, or it may be opened meanwhile
		s.mu.Unlock()
		s.memory.RemoveOwner(n)
		if s.disk != nil {
			s.disk.Forget(n)
		}
		s.mu.Lock()
		s.reclaimLocked()
	}
}

// oldestLocked is the number of the namespace whose last use is the oldest, among those that are
// not in use. Namespaces that this process has not opened come first.
func (s *Store) oldestLocked(but map[uint16]bool) (number uint16, ok bool) {
	var last [MaxSpaces]uint64
	for _, sp := range s.spaces {
		last[sp.number] = sp.last
		if sp.users.Load() > 0 {
			last[sp.number] = inUse
		}
	}
	first := uint64(inUse)
	for n, used := range s.numbers {
		if used && !but[uint16(n)] && last[n] < first {
			number, ok, first = uint16(n), true, last[n]
		}
	}
	return number, ok
}

const inUse = 1<<64 - 1

// Exists reports which pages any tier has.
func (sp *Space) Exists(keys []page.Key) (page.Bitmap, error) {
	if err := checkKeys(len(keys)); err != nil {
		return nil, err
	}
	if err := sp.acquire(); err != nil {
		return nil, err
	}
	defer sp.release()
	found := page.NewBitmap(len(keys))
	for _, t := range sp.s.tiers {
		if found.Count() < len(keys) {
			t.Exists(sp.number, keys, found)
		}
	}
	return found, nil
}

// Keys lists keys of pages in memory or on the disk, in no order, until out is full or a bound of
// work is reached. It begins at first, and returns where to go on; 0: that was all.
func (sp *Space) Keys(tier Tier, first uint32, out []page.Key) ([]page.Key, uint32, error) {
	if err := sp.acquire(); err != nil {
		return nil, 0, err
	}
	defer sp.release()
	switch {
	case tier == Memory:
		out, first = sp.s.memory.Keys(sp.number, first, out)
	case tier == Disk && sp.s.disk != nil:
		out, first = sp.s.disk.Keys(sp.number, first, out)
	default:
		return nil, 0, &RequestError{"tier", "this store has none of that kind, or does not list it",
			"name memory or disk"}
	}
	return out, first, nil
}

// Get loads page i into block blocks[i] of the pool.
func (sp *Space) Get(keys []page.Key, pool *Pool, blocks []uint32) (*Batch, error) {
	return sp.request(&Batch{keys: keys, pool: pool, blocks: blocks})
}

// Put stores the pages of blocks, in the order of their prompt. after is the key of the page before
// the first one, or nil. The blocks do not change until Done.
func (sp *Space) Put(keys []page.Key, after *page.Key, pool *Pool, blocks []uint32) (*Batch,
	error) {
	return sp.request(&Batch{keys: keys, pool: pool, blocks: blocks, after: after, put: true})
}

func (sp *Space) request(b *Batch) (*Batch, error) {
	b.space = sp
	if b.put && sp.s.writeBack != nil { // they are needed after the caller has its results
		b.keys = slices.Clone(b.keys)
	}
	if b.after != nil {
		after := *b.after
		b.after = &after
	}
	if err := b.check(); err != nil {
		return nil, err
	}
	if (sp.object != nil || sp.s.peers != nil) && !b.put {
		b.ctx, b.stop = context.WithCancel(context.Background())
	}
	b.results = make([]Result, len(b.keys))
	b.done = make(chan struct{})
	b.unresolved.Store(int64(len(b.keys)))
	b.inUse.Store(int64(len(b.keys)))
	err := ErrClosed
	if sp.hold() { // until its last piece has ended
		if err = sp.s.stages[requests].beginRequest(b); err == nil {
			return b, nil
		}
		sp.users.Add(-1)
	}
	for _, r := range b.pool.regions {
		r.Release()
	}
	if b.stop != nil {
		b.stop()
	}
	return nil, err
}

// Remove forgets all pages of the namespace, durably. A put that was done before does not come
// back; one that is under way is removed, or ends after the removal.
func (sp *Space) Remove() error {
	if err := sp.acquire(); err != nil {
		return err
	}
	defer sp.release()
	return sp.remove()
}

// remove empties the object tier first, and memory last: what a get takes from one tier before it
// is empty has its slot in memory by then. Nothing goes to a lower tier meanwhile.
func (sp *Space) remove() error {
	s, removing := sp.s, &sp.s.removing[sp.number]
	removing.Add(1) // before removals: see wanted
	defer removing.Add(-1)
	sp.removals.Add(1)
	// These take locks: what was given up before is in the object tier, too.
	s.tiers[Memory].Used(sp.number)
	s.tiers[Disk].Used(sp.number)
	objects, err := s.removeBelow(sp.id)
	s.memory.RemoveOwner(sp.number)
	return removed(sp.id, err, objects)
}

// removeBelow removes a namespace from the object tier, and then from the disk.
func (s *Store) removeBelow(id page.ID) (objects, err error) {
	objects = s.removeObjects(id)
	if s.disk != nil {
		err = s.disk.Remove(id)
		s.eraseSoon()
	}
	return objects, err
}

// wanted returns a function that reports, at any later time, whether pages that the namespace has
// in memory from now on may still go to another tier. That tier calls the function with its lock
// held, so a removal that begins later finds the page there.
func (sp *Space) wanted() func() bool {
	before := sp.removals.Load()
	if sp.s.removing[sp.number].Load() > 0 {
		return func() bool { return false }
	}
	return func() bool { return sp.removals.Load() == before }
}

// removed is the error of a removal.
func removed(id page.ID, err, objects error) error {
	switch {
	case err != nil:
		err = errors.Join(err, objects)
	case objects != nil:
		err = fmt.Errorf("%w: %w", removal.ErrObjects, objects)
	default:
		return nil
	}
	return fmt.Errorf("store: namespace %s: remove: %w", id, err)
}

// RemoveSpace is Remove for a namespace that need not be open, nor have pages that this start has
// found.
func (s *Store) RemoveSpace(id page.ID) error {
	if !s.enter() {
		return ErrClosed
	}
	defer s.leave()
	sp := s.opened(id)
	if sp == nil {
		objects, err := s.removeBelow(id)
		// If it was opened meanwhile, memory may have pages that were read before their removal.
		if sp = s.opened(id); sp == nil {
			return removed(id, err, objects)
		}
	}
	defer sp.users.Add(-1)
	return sp.remove()
}

// opened is one more use of a namespace that is open, or was; nil: it was not.
func (s *Store) opened(id page.ID) *Space {
	s.mu.Lock()
	defer s.mu.Unlock()
	sp := s.spaces[id]
	if sp != nil {
		sp.users.Add(1)
	}
	return sp
}

// RemoveObjects is the rest of a removal that has failed with removal.ErrObjects. Pages that were
// put since stay in memory and on the disk.
func (s *Store) RemoveObjects(id page.ID) error {
	if !s.enter() {
		return ErrClosed
	}
	defer s.leave()
	return removed(id, nil, s.removeObjects(id))
}

func (s *Store) removeObjects(id page.ID) error {
	if s.object == nil {
		return nil
	}
	return s.object.Remove(context.Background(), id) // it has a timeout
}

// Has reports whether a namespace is open, or may have pages on the disk or in the object store.
func (s *Store) Has(id page.ID) bool {
	s.mu.Lock()
	found := s.spaces[id] != nil
	s.mu.Unlock()
	return found || s.disk != nil && s.disk.Has(id) || s.object != nil && s.object.Has(id)
}

// Keeps reports whether the store may have pages of an earlier start.
func (s *Store) Keeps() bool {
	return s.object != nil || s.disk != nil && s.disk.Keeps()
}

// Note returns what SetNote has stored, by this process or an earlier one; nil: nothing, or there
// is no disk, and a note ends with the process.
func (s *Store) Note() ([]byte, error) {
	if s.disk == nil {
		return nil, nil
	}
	return s.disk.Note()
}

// SetNote stores a few bytes beside the pages of the disk, as disk.Tier.SetNote does.
func (s *Store) SetNote(note []byte) error {
	if s.disk == nil {
		return nil
	}
	return s.disk.SetNote(note)
}

// Usage is what one namespace has, and its pages since the store opened it.
type Usage struct {
	ID                            page.ID
	Bytes                         [Object + 1]uint64 // by Tier
	Hits, Misses, Stored, Refused uint64
}

type counts struct{ hits, misses, stored, refused atomic.Uint64 }

// Usage returns that of all namespaces that were opened, or have pages on the disk.
func (s *Store) Usage() (out []Usage) {
	if !s.enter() {
		return nil
	}
	defer s.leave()
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, sp := range s.spaces {
		c := &sp.counts
		u := Usage{ID: id, Hits: c.hits.Load(), Misses: c.misses.Load(), Stored: c.stored.Load(),
			Refused: c.refused.Load()}
		for i, t := range s.tiers {
			u.Bytes[i] = t.Used(sp.number)
		}
		out = append(out, u)
	}
	if s.disk == nil {
		return out
	}
	for id, n := range s.disk.Known() {
		if s.spaces[id] == nil {
			out = append(out, Usage{ID: id, Bytes: [Object + 1]uint64{Disk: s.disk.Used(n)}})
		}
	}
	return out
}

// Stats are counts since the store was opened.
type Stats struct {
	Hits    [Peer + 1]uint64 // pages, by tier
	Misses  uint64
	Damaged uint64
	Stored  uint64
	Existed uint64
	Refused uint64 // puts without room
	Memory  memory.Stats
	Disk    disk.Stats
	Object  object.Stats
}

// ObjectProblem is Stats().Object.Problem at a low cost.
func (s *Store) ObjectProblem() string {
	if s.object == nil {
		return ""
	}
	return s.object.Problem()
}

// Stats returns them.
func (s *Store) Stats() Stats {
	c := &s.counters
	out := Stats{Misses: c.misses.Load(), Damaged: c.damaged.Load(), Stored: c.stored.Load(),
		Existed: c.existed.Load(), Refused: c.refused.Load(), Memory: s.memory.Stats()}
	for t := range out.Hits {
		out.Hits[t] = c.hits[t].Load()
	}
	if s.disk != nil {
		out.Disk = s.disk.Stats()
	}
	if s.object != nil {
		out.Object = s.object.Stats()
	}
	return out
}
