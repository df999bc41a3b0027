package store

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/catalog"
	"github.com/kvspray/kvspray/store/disk"
	"github.com/kvspray/kvspray/store/memory"
	"github.com/kvspray/kvspray/store/page"
)

// Peers are the stores of other nodes.
type Peers interface {
	// Find sets the bits of pages that other nodes probably have, for those whose bit is not set. It
	// takes no longer than the directory may.
	Find(keys []page.Key, found page.Bitmap)
	// Fetch loads pages into slots of the store's Region, which are whole multiples of 4 KiB. It calls
	// landed for a page once it writes to its slot no more, with the checksum that the holder states.
	// If landed returns false, the bytes are not the page's, and Fetch may load it again from another
	// holder. It may call landed for several pages at the same time.
	//
	// When it returns, no slot is written to any more, but those of lost: these are not used again.
	Fetch(ctx context.Context, space page.ID, pageBytes int, keys []page.Key, slots []mem.Block,
		landed func(i int, crc uint32) bool) (lost []int)
}

// Of reads from peers.
const (
	// peerFetchers is how many transfers of batches are under way at most. While one of them
	// waits for its holder's answer, the others move bytes.
	peerFetchers = 8
	// peerFinders look up which pages other nodes have. They wait for no transfer, so that a
	// miss does not wait for one either.
	peerFinders  = 4
	maxPeerBytes = 8 << 20 // of one transfer
	// How long pages wait for room in memory that other pages take on their way, and for another get
	// or put that brings the same page: as long as a transfer and its holder's answer may take.
	roomTime  = time.Second
	busyTime  = 15 * time.Second
	roomPause = time.Millisecond
)

// peerStage reads what other nodes have.
func (s *Store) peerStage() *stage {
	bytes := s.pieceBytes(peerFetchers, maxPeerBytes)
	return newStage(peerReads, peerFetchers, func(b *Batch, pages []int, _ bool) int {
		// Memory has room for small pages by their number.
		return min(len(pages), max(1, bytes/max(b.space.pageBytes, memory.TypicalPageBytes)))
	}, s.fromPeers)
}

// findPages looks up misses: what another node has is fetched, the rest goes on.
func (s *Store) findPages(b *Batch, pages []int, _ *worker) int {
	found := page.NewBitmap(len(pages))
	if !b.guard.Revoked() {
		s.peers.Find(b.keysOf(pages), found)
	}
	var there, missing []int
	for j, i := range pages {
		if found.Get(j) {
			there = append(there, i)
		} else {
			missing = append(missing, i)
		}
	}
	s.stages[peerReads].add(b, there)
	return len(missing) - s.afterPeers(b, missing)
}

// incoming is pages of a batch on their way from other nodes.
type incoming struct {
	s       *Store
	b       *Batch
	pages   []int // in the batch
	slots   []memory.Page
	ended   []bool // the result stands, and the slot is given back
	damaged []bool
}

// fromPeers reads pages from other nodes into slots of memory, where the next get finds them, and
// copies them from there. So nothing of another node is ever written to an engine's block: the copy
// compares the checksum, and goes under the batch's guard. What no node has, the object tier may
// have. It returns how many pages have ended here.
func (s *Store) fromPeers(b *Batch, pages []int, w *worker) int {
	all := len(pages)
	if b.guard.Revoked() {
		s.fetched(b, pages, Result{Outcome: Canceled})
		return len(pages)
	}
	var missing []int
	began := time.Now()
	for {
		in := &incoming{s: s, b: b}
		var wait []int // pages that another get or put brings, or that have no room
		limit := busyTime
		for n, i := range pages {
			p, err := s.room(b, i)
			if errors.Is(err, catalog.ErrFull) {
				wait, limit = append(wait, pages[n:]...), roomTime
				break
			}
			switch {
			case err == nil:
				in.pages, in.slots = append(in.pages, i), append(in.slots, p)
			case errors.Is(err, catalog.ErrBusy):
				wait = append(wait, i)
			case errors.Is(err, catalog.ErrExists):
				switch r := s.getPage(b, i, w); r.Outcome {
				case Miss, Damaged: // it has gone since
					wait = append(wait, i)
				case Failed:
					b.results[i] = r
					missing = append(missing, i)
				default:
					s.fetched(b, []int{i}, r)
				}
			default:
				missing = append(missing, i)
			}
		}
		missing = append(missing, in.run()...)
		if pages = wait; len(pages) == 0 {
			break
		}
		if len(in.pages) > 0 {
			continue
		}
		// Others bring these pages, or fill the memory, until theirs have come.
		if b.ctx.Err() != nil || time.Since(began) > limit {
			missing = append(missing, pages...)
			break
		}
		time.Sleep(roomPause)
	}
	return all - s.afterPeers(b, missing)
}

// room reserves a slot. A page whose prompt fills the memory comes without its place in the prompt,
// since the pages before it would stay for it.
func (s *Store) room(b *Batch, i int) (memory.Page, error) {
	p, err := s.memory.Reserve(b.space.number, &b.keys[i], b.before(i))
	if errors.Is(err, catalog.ErrFull) {
		p, err = s.memory.Reserve(b.space.number, &b.keys[i], nil)
	}
	return p, err
}

// afterPeers ends pages that no peer has, or leaves them to the object tier; it returns how many.
func (s *Store) afterPeers(b *Batch, pages []int) int {
	var fetch []int
	for _, i := range pages {
		switch {
		case b.guard.Revoked():
			s.fetched(b, []int{i}, Result{Outcome: Canceled})
		case s.object != nil && b.space.object.Has(&b.keys[i]):
			fetch = append(fetch, i)
		default:
			s.count(b.space, &b.results[i])
			s.finish(b, 1)
		}
	}
	s.stages[objectReads].add(b, fetch)
	return len(fetch)
}

// run fetches the pages. It returns those that did not come, and releases their slots.
func (in *incoming) run() (missing []int) {
	n := len(in.pages)
	if n == 0 {
		return nil
	}
	in.ended, in.damaged = make([]bool, n), make([]bool, n)
	blocks := make([]mem.Block, n)
	for j := range in.slots {
		blocks[j] = mem.Block{Region: in.slots[j].Block.Region, Off: in.slots[j].Block.Off,
			Len: uint64(len(in.slots[j].Slot))}
	}
	sp := in.b.space
	lost := in.s.peers.Fetch(in.b.ctx, sp.id, sp.pageBytes, in.b.keysOf(in.pages), blocks, in.landed)
	keep := map[int]bool{}
	for _, j := range lost {
		keep[j] = true // its slot may still be written to: no page ever gets it
	}
	for j, i := range in.pages {
		if in.ended[j] {
			continue
		}
		if !keep[j] {
			in.s.memory.Drop(in.slots[j])
		}
		if in.damaged[j] {
			in.b.results[i] = Result{Outcome: Damaged}
		}
		missing = append(missing, i)
	}
	return missing
}

// landed takes a page that is in its slot.
func (in *incoming) landed(j int, crc uint32) bool {
	s, b, i, p := in.s, in.b, in.pages[j], in.slots[j]
	clear(p.Slot[len(p.Bytes):]) // what a peer sent there does not go to a disk
	r := s.deliver(b, i, &worker{}, content{p.Bytes, p.Block, crc, Peer})
	if r.Outcome == Damaged || r.Outcome != Hit && mem.CRC32C(0, p.Bytes) != crc {
		in.damaged[j] = true
		return false
	}
	s.memory.Commit(p, crc)
	s.memory.Unpin(p)
	s.feed.add(b.space.number, &b.keys[i])
	in.ended[j] = true
	s.fetched(b, []int{i}, r)
	return true
}

// Staged is pages that are pinned in memory, for a peer to read.
type Staged struct {
	Looked int // keys that were looked for: the first ones, until there was no room for a page
	Found  page.Bitmap
	Blocks []mem.Block // of pages that were found, in their order: whole slots
	CRCs   []uint32    // likewise
	space  *Space
	pages  []memory.Page
	once   sync.Once
}

// Stage pins those pages that this node has in memory or on its disk, and reads them from there to
// memory, until Release. It fails where no namespace has this id and size of pages.
func (s *Store) Stage(id page.ID, pageBytes int, keys []page.Key) (*Staged, error) {
	if err := checkKeys(len(keys)); err != nil {
		return nil, err
	}
	if !s.enter() {
		return nil, ErrClosed
	}
	defer s.leave()
	sp, err := s.serve(id)
	if err != nil {
		return nil, err
	}
	defer sp.Close()
	if sp.pageBytes != pageBytes {
		return nil, &RequestError{"page_bytes", "differ from those of the namespace",
			"use one layout for a namespace"}
	}
	out := &Staged{Found: page.NewBitmap(len(keys)), space: sp}
	for i := range keys {
		p, ok := s.memory.Pin(sp.number, &keys[i])
		if !ok {
			p, err = s.raise(sp, &keys[i])
			if errors.Is(err, catalog.ErrFull) || errors.Is(err, catalog.ErrBusy) {
				break // the page is here, and will be in memory or have room there soon
			}
			ok = err == nil
		}
		out.Looked = i + 1
		if !ok {
			continue
		}
		out.Found.Set(i)
		out.pages = append(out.pages, p)
		out.Blocks = append(out.Blocks, mem.Block{Region: p.Block.Region, Off: p.Block.Off,
			Len: uint64(len(p.Slot))})
		out.CRCs = append(out.CRCs, p.CRC)
	}
	return out, nil
}

// serve opens a namespace that the store has, whether or not an engine uses it.
func (s *Store) serve(id page.ID) (*Space, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sp := s.spaces[id]; sp != nil {
		sp.users.Add(1)
		return sp, nil
	}
	if s.disk != nil {
		if n, pageBytes, ok := s.disk.Find(id); ok {
			return s.openLocked(id, n, pageBytes, s.sharesOf(id))
		}
	}
	return nil, &RequestError{"space", id.String() + " has no pages here", "ask another node"}
}

// errNotHere: the disk does not have a page.
var errNotHere = errors.New("store: the page is not here")

// raise reads a page from the disk into memory, pinned. catalog.ErrFull: it is there, and memory
// has no room.
func (s *Store) raise(sp *Space, k *page.Key) (memory.Page, error) {
	if s.disk == nil {
		return memory.Page{}, errNotHere
	}
	var found [1]uint64
	s.disk.Exists(sp.number, []page.Key{*k}, found[:])
	if found[0] == 0 {
		return memory.Page{}, errNotHere
	}
	p, err := s.memory.Reserve(sp.number, k, nil)
	if err != nil {
		return memory.Page{}, err
	}
	crc, err := s.disk.Read(sp.number, k, p.Slot, disk.Sum)
	if err != nil {
		s.memory.Drop(p)
		return memory.Page{}, err
	}
	s.memory.Commit(p, crc)
	p.CRC = crc
	return p, nil
}

// Release ends the pins. Idempotent. The memory is not read any more.
func (st *Staged) Release() {
	st.once.Do(func() {
		if !st.space.s.enter() {
			return
		}
		defer st.space.s.leave()
		for _, p := range st.pages {
			st.space.s.memory.Unpin(p)
		}
	})
}
