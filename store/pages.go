package store

import (
	"errors"
	"math"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/catalog"
	"github.com/kvspray/kvspray/store/disk"
	"github.com/kvspray/kvspray/store/memory"
	"github.com/kvspray/kvspray/store/page"
)

// Of pieces of requests.
const (
	// copied in a tenth of a millisecond or so, before others have their turn.
	getPieceBytes = 1 << 20
	maxPiecePages = 64
	// The same of a GPU, in a third of a millisecond: the driver takes as long for a call as for half
	// a MiB.
	devicePieceBytes = 16 << 20
	deviceParts      = 8192 // pieces of the engine's memory in one call: each worker keeps the lists
	// While several namespaces ask, a piece of a get is 1/shortPiece as long.
	shortPiece = 4
)

// requestSize is how many pages of a request a worker takes at once. Those of a put are pinned
// until they are on the disk.
func (s *Store) requestSize(b *Batch, pages []int, several bool) int {
	sp := b.space
	bytes := getPieceBytes
	if s.together(b) {
		bytes = s.pieceBytes(s.stages[requests].fair.workers, devicePieceBytes)
	}
	n := min(maxPiecePages, max(1, bytes/sp.pageBytes))
	if s.together(b) {
		n = min(n, max(1, deviceParts/len(b.pool.pieces)))
	}
	switch {
	case b.put && s.disk != nil:
		n = min(s.disk.GroupPages(sp.pageBytes),
			max(1, s.pieceBytes(s.stages[requests].fair.workers, math.MaxUint64)/sp.pageBytes))
	case !b.put && several:
		n = max(1, n/shortPiece) // others wait for its end
	}
	return min(n, len(pages))
}

// pieceBytes bounds a piece: all workers of a stage together pin a quarter of the memory at most,
// unless it is very small.
func (s *Store) pieceBytes(workers int, limit uint64) int {
	return int(min(limit, s.memory.Region().Size()/uint64(4*workers)))
}

// serveRequest puts pages, or gets them from memory and disk, and leaves the others to the next
// stages. It returns how many have ended here.
func (s *Store) serveRequest(b *Batch, pages []int, w *worker) int {
	if b.put {
		s.putPages(b, pages[0], pages[0]+len(pages), w)
		return len(pages)
	}
	var there, remote []int
	left := pages
	if s.together(b) && len(pages) > 1 {
		left = s.getTogether(b, pages, w)
	}
	for _, i := range left {
		r := s.getPage(b, i, w)
		b.results[i] = r
		if r.Outcome == Miss || r.Outcome == Damaged || r.Outcome == Failed {
			if s.peers != nil {
				remote = append(remote, i)
				continue
			}
			if s.object != nil && b.space.object.Has(&b.keys[i]) {
				there = append(there, i)
				continue
			}
		}
		s.count(b.space, &r)
	}
	n := len(pages) - len(there) - len(remote)
	s.finish(b, n)
	s.stages[objectReads].add(b, there)
	s.stages[peerFinds].add(b, remote)
	return n
}

// getPage loads page i of a batch from the nearest tier that has it.
func (s *Store) getPage(b *Batch, i int, w *worker) Result {
	if b.guard.Revoked() {
		return Result{Outcome: Canceled}
	}
	sp, k := b.space, &b.keys[i]
	var damaged bool
	if p, ok := s.memory.Pin(sp.number, k); ok {
		r := s.deliver(b, i, w, content{p.Bytes, p.Block, p.CRC, Memory})
		if r.Outcome != Damaged {
			s.memory.Unpin(p)
			return r
		}
		s.memory.Drop(p)
		damaged = true
	}
	if s.disk != nil {
		r := s.fromDisk(b, i, w)
		if r.Outcome != Miss || !damaged {
			r.Replaced = damaged && r.Outcome == Hit
			return r
		}
	}
	if damaged {
		return Result{Outcome: Damaged}
	}
	return Result{Outcome: Miss}
}

// fromDisk reads a page into a slot of memory, where the next get finds it, and copies it from
// there. Without a slot it goes through the worker's own buffer.
func (s *Store) fromDisk(b *Batch, i int, w *worker) Result {
	sp, k := b.space, &b.keys[i]
	var found [1]uint64
	s.disk.Exists(sp.number, b.keys[i:i+1], found[:])
	if found[0] == 0 {
		return Result{Outcome: Miss}
	}
	// The page is compared with its checksum while it is copied, in one pass.
	var r Result
	var at mem.Block
	deliver := func(page []byte, crc uint32) bool {
		r = s.deliver(b, i, w, content{page, at, crc, Disk})
		return r.Outcome == Hit || r.Outcome != Damaged && disk.Sum(page, crc)
	}
	p, err := s.memory.Reserve(sp.number, k, b.before(i))
	if err != nil { // a put is storing it, or nothing can be given up
		buf, err := w.room(disk.PaddedBytes(sp.pageBytes))
		if err != nil {
			return Result{Outcome: Failed, Err: err}
		}
		if _, err := s.disk.Read(sp.number, k, buf, deliver); err != nil {
			return unread(err)
		}
		return r
	}
	at = p.Block
	crc, err := s.disk.Read(sp.number, k, p.Slot, deliver)
	if err != nil {
		s.memory.Drop(p)
		return unread(err)
	}
	s.memory.Commit(p, crc)
	s.memory.Unpin(p)
	return r
}

func unread(err error) Result {
	switch {
	case errors.Is(err, disk.ErrMissing): // it went since
		return Result{Outcome: Miss}
	case errors.Is(err, disk.ErrDamaged):
		return Result{Outcome: Damaged}
	}
	return Result{Outcome: Failed, Err: err}
}

// content is a page that was found.
type content struct {
	bytes []byte
	at    mem.Block // the same in the arena; region nil: they are elsewhere
	crc   uint32
	from  Tier
}

// deliver copies a page to its block, under the guard.
func (s *Store) deliver(b *Batch, i int, w *worker, c content) Result {
	if !b.guard.Enter() {
		return Result{Outcome: Canceled}
	}
	defer b.guard.Leave()
	to := w.placeOf(b, i)
	var sum uint32
	var err error
	if mem.DeviceOf(to) == nil {
		sum, err = copyPart(0, to, c.bytes)
	} else if sum = mem.CRC32C(0, c.bytes); sum == c.crc {
		err = s.toDevice(to, c.bytes, c.at)
	}
	switch {
	case err != nil:
		return Result{Outcome: Failed, Err: err}
	case sum != c.crc:
		return Result{Outcome: Damaged}
	}
	return Result{Outcome: Hit, Tier: c.from}
}

// before is the key of the page before page i in its prompt. A get names a prompt's pages in their
// order, too.
func (b *Batch) before(i int) *page.Key {
	if i > 0 {
		return &b.keys[i-1]
	}
	return b.after
}

// held is a page of a put that is on its way to the disk: in a slot of memory, or in the worker's
// buffer.
type held struct {
	i      int // in the batch
	page   memory.Page
	pinned bool
	data   []byte // padded
	crc    uint32
	fresh  bool // this put has filled it
}

// putPages stores pages [from, to) of a batch: each in a slot of memory, and then all in one group
// on the disk. Buffers of the object tier get their copies where Config.ObjectAtPut asks for it.
func (s *Store) putPages(b *Batch, from, to int, w *worker) {
	wanted := b.space.wanted()
	pages := make([]held, 0, to-from)
	together := s.together(b)
	for i := from; i < to; i++ {
		p, r := s.reserve(b, i)
		h := held{i: i, page: p, pinned: true, data: p.Slot, crc: p.CRC}
		if r.Outcome == Pending && !together {
			r = s.fill(b, &h, w)
		}
		if b.results[i] = r; h.page.Bytes != nil {
			pages = append(pages, h)
		}
	}
	if together {
		pages = s.fillTogether(b, pages, w)
	}
	if s.disk == nil && !s.atPut {
		s.join(b, to)
		s.release(pages)
		s.finishPut(b, from, to)
		return
	}
	if s.disk != nil {
		pages = s.fillDirect(b, from, to, pages, w)
	}
	writeBack := s.writeBack != nil && len(pages) > 0
	var piece uint64
	if writeBack {
		piece = s.writeBack.begin(len(pages)) // before the results
		s.finishPut(b, from, to)
	}
	errs := s.below(b, pages, wanted)
	s.join(b, to)
	s.release(pages)
	if writeBack {
		s.writeBack.end(piece)
		return
	}
	for j, p := range pages {
		if s.disk == nil {
			break
		}
		r := &b.results[p.i]
		r.Durable = errs[j] == nil || errors.Is(errs[j], catalog.ErrExists)
		switch {
		case !r.Durable && p.pinned:
			r.Err = errs[j]
		case !r.Durable:
			*r = Result{Outcome: Full, Err: errs[j]}
		}
	}
	s.finishPut(b, from, to)
}

// join names the last page of a piece to the first one of the next: another worker may have stored
// that one before, and then no tier had the page before it.
func (s *Store) join(b *Batch, to int) {
	if to == len(b.keys) {
		return
	}
	s.memory.Follow(b.space.number, &b.keys[to], &b.keys[to-1])
	if s.disk != nil {
		s.disk.Follow(b.space.number, &b.keys[to], &b.keys[to-1])
	}
}

// fillDirect takes the pages for which memory has no room, such as the end of a prompt that is
// longer than memory, into the worker's buffer. They go to the disk only.
func (s *Store) fillDirect(b *Batch, from, to int, pages []held, w *worker) []held {
	sp := b.space
	padded := disk.PaddedBytes(sp.pageBytes)
	var buf []byte
	for i := from; i < to; i++ {
		r := &b.results[i]
		if r.Outcome != Full {
			continue
		}
		if buf == nil {
			var err error
			if buf, err = w.room((to - from) * padded); err != nil {
				r.Err = err
				return pages
			}
		}
		data := buf[:padded:padded]
		clear(data[sp.pageBytes:])
		crc, fr := s.copyIn(b, i, w, data[:sp.pageBytes], mem.Block{})
		if *r = fr; fr.Outcome == Stored {
			pages = append(pages, held{i: i, data: data, crc: crc, fresh: true})
			buf = buf[padded:]
		}
	}
	return pages
}

// copyIn copies a page from its block, under the guard. at is the page in the arena; region nil: it
// is elsewhere. The checksum is that of what is in the page now.
func (s *Store) copyIn(b *Batch, i int, w *worker, to []byte, at mem.Block) (crc uint32, _ Result) {
	if !b.guard.Enter() {
		return 0, Result{Outcome: Canceled}
	}
	defer b.guard.Leave()
	from := w.placeOf(b, i)
	var err error
	if mem.DeviceOf(from) == nil {
		crc, err = copyIn(to, from)
	} else if err = s.fromDevice(to, at, from); err == nil {
		crc = mem.CRC32C(0, to)
	}
	if err != nil {
		return 0, Result{Outcome: Failed, Err: err}
	}
	return crc, Result{Outcome: Stored}
}

func (s *Store) finishPut(b *Batch, from, to int) {
	for i := from; i < to; i++ {
		if b.results[i].Outcome == Stored {
			s.feed.add(b.space.number, &b.keys[i])
		}
		s.count(b.space, &b.results[i])
	}
	s.finish(b, to-from)
}

func (s *Store) release(pages []held) {
	for _, p := range pages {
		if p.pinned {
			s.memory.Unpin(p.page)
		}
	}
}

// reserve takes a slot of memory for a page; Pending: it is to be filled. A page that was in memory
// already is pinned, so that it can be made durable if it is not.
func (s *Store) reserve(b *Batch, i int) (memory.Page, Result) {
	if b.guard.Revoked() {
		return memory.Page{}, Result{Outcome: Canceled}
	}
	sp, k := b.space, &b.keys[i]
	p, err := s.memory.Reserve(sp.number, k, b.before(i))
	switch {
	case err == nil:
		return p, Result{Outcome: Pending}
	case errors.Is(err, catalog.ErrExists):
		// If it was given up in this moment, the Result is not durable.
		p, _ := s.memory.Pin(sp.number, k)
		return p, Result{Outcome: Existed}
	case errors.Is(err, catalog.ErrBusy) && !errors.Is(err, catalog.ErrDoomed):
		return memory.Page{}, Result{Outcome: Busy}
	default:
		return memory.Page{}, Result{Outcome: Full, Err: err}
	}
}

// fill copies a reserved page from its block. Without success the page is no longer held.
func (s *Store) fill(b *Batch, h *held, w *worker) Result {
	crc, r := s.copyIn(b, h.i, w, h.page.Bytes, h.page.Block)
	if r.Outcome != Stored {
		s.memory.Drop(h.page)
		h.page = memory.Page{}
		return r
	}
	return s.commit(h, crc)
}

// commit makes a page that is filled visible.
func (s *Store) commit(h *held, crc uint32) Result {
	s.memory.Commit(h.page, crc)
	h.crc, h.fresh = crc, true
	return Result{Outcome: Stored}
}

// below writes pages to the tiers below memory, unless their namespace was removed since they were
// put.
func (s *Store) below(b *Batch, pages []held, wanted func() bool) []error {
	sp := b.space
	if len(pages) == 0 {
		return nil
	}
	if s.atPut {
		for _, p := range pages {
			// Its error is not the put's: the page is asked for again when it is given up.
			_ = sp.object.Add(&b.keys[p.i], b.before(p.i), p.data[:sp.pageBytes], p.crc, wanted)
		}
	}
	if s.disk == nil {
		return nil
	}
	records := make([]disk.Record, len(pages))
	for j, p := range pages {
		records[j] = disk.Record{Key: b.keys[p.i], After: b.before(p.i), Data: p.data, CRC: p.crc,
			Fresh: p.fresh}
	}
	errs := s.disk.Write(sp.number, records, wanted)
	for j, err := range errs {
		// what is in memory is no longer what was put
		if pages[j].pinned && errors.Is(err, disk.ErrDamaged) {
			s.memory.Doom(pages[j].page)
		}
	}
	return errs
}

func (s *Store) count(sp *Space, r *Result) {
	c := &s.counters
	switch r.Outcome {
	case Hit:
		sp.counts.hits.Add(1)
		c.hits[r.Tier].Add(1)
	case Miss:
		sp.counts.misses.Add(1)
		c.misses.Add(1)
	case Damaged:
		c.damaged.Add(1)
	case Stored:
		sp.counts.stored.Add(1)
		c.stored.Add(1)
	case Existed:
		c.existed.Add(1)
	case Full:
		sp.counts.refused.Add(1)
		c.refused.Add(1)
	}
}
