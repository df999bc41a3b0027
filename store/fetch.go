package store

import (
	"errors"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/memory"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/page"
)

// defaultFetchers is how many reads of the object store are under way at most. A read waits for the
// network, so its goroutine is none of the workers: a get from memory never waits for one.
const defaultFetchers = 16

// objectStage reads what only the object tier has.
func (s *Store) objectStage(fetchers int) *stage {
	bytes := s.pieceBytes(fetchers, object.MaxRangeBytes)
	return newStage(objectReads, fetchers, func(b *Batch, pages []int, _ bool) int {
		n := min(len(pages), max(1, bytes/b.space.pageBytes))
		return b.space.object.Run(b.keysOf(pages[:n]), bytes)
	}, s.fromObject)
}

func (b *Batch) keysOf(pages []int) []page.Key {
	keys := make([]page.Key, len(pages))
	for j, i := range pages {
		keys[j] = b.keys[i]
	}
	return keys
}

// fromObject reads pages into slots of memory, where the next get finds them, and copies them from
// there. What finds no slot goes through the worker's own buffer.
func (s *Store) fromObject(b *Batch, pages []int, w *worker) int {
	all := len(pages)
	if b.guard.Revoked() {
		s.fetched(b, pages, Result{Outcome: Canceled})
		return all
	}
	sp := b.space
	slots := make([]memory.Page, len(pages))
	buffers := make([][]byte, len(pages))
	var own []byte
	var err error
	for j, i := range pages {
		// Before the read finds the pages: a removal in between then finds the slots.
		if slots[j], err = s.memory.Reserve(sp.number, &b.keys[i], b.before(i)); err == nil {
			buffers[j] = slots[j].Bytes
			continue
		}
		if own == nil {
			if own, err = w.room(len(pages) * sp.pageBytes); err != nil {
				s.fetched(b, pages[j:], Result{Outcome: Failed, Err: err})
				pages, buffers = pages[:j], buffers[:j]
				break
			}
		}
		buffers[j] = own[j*sp.pageBytes:][:sp.pageBytes:sp.pageBytes]
	}
	d := &delivery{b: b}
	sp.object.Read(b.ctx, b.keysOf(pages), object.Reading{
		Buffers: buffers,
		Part: func(j, from, to int) {
			d.part(pages[j], buffers[j], slots[j].Block, from, to)
		},
		Check: func(_ int, crc uint32) bool { return d.sum == crc },
		End: func(j int, crc uint32, err error) {
			r := d.r
			if err != nil {
				r = b.unfetched(pages[j], err)
			}
			if slots[j].Bytes != nil {
				if err == nil {
					s.memory.Commit(slots[j], crc)
					s.memory.Unpin(slots[j])
					s.feed.add(sp.number, &b.keys[pages[j]])
				} else {
					s.memory.Drop(slots[j])
				}
			}
			s.fetched(b, pages[j:j+1], r)
		},
	})
	return all
}

// delivery is a page on its way to its block: each part is copied, and added to the checksum,
// when it has come. at is the page in the arena; region nil: it is elsewhere.
type delivery struct {
	b      *Batch
	sum    uint32
	r      Result      // if the sum is right
	place  []mem.Block // of the page
	blocks []mem.Block // of the part
}

func (d *delivery) part(i int, page []byte, at mem.Block, from, to int) {
	if from == 0 {
		d.sum, d.r = 0, Result{Outcome: Hit, Tier: Object}
		d.place = d.b.pool.place(d.place[:0], d.b.blocks[i])
	}
	device := mem.DeviceOf(d.place) != nil
	if d.r.Outcome != Hit || !d.b.guard.Enter() {
		if d.r.Outcome == Hit {
			d.r = Result{Outcome: Canceled}
		}
		d.sum = mem.CRC32C(d.sum, page[from:to]) // the page may be whole, for the next get
		return
	}
	var err error
	before := d.sum
	switch {
	case !device:
		d.blocks = part(d.place, uint64(from), uint64(to), d.blocks[:0])
		d.sum, err = copyPart(d.sum, d.blocks, page[from:to])
	default:
		d.sum = mem.CRC32C(d.sum, page[from:to])
		if to == len(page) {
			err = d.b.space.s.toDevice(d.place, page, at)
		}
	}
	d.b.guard.Leave()
	if err != nil { // of the block: the page itself is whole, or not
		d.sum = mem.CRC32C(before, page[from:to])
		d.r = Result{Outcome: Failed, Err: err}
	}
}

// unfetched is the result of a page that could not be read from the object tier. Where this tier
// only lacks the page, the result of the tiers above stays.
func (b *Batch) unfetched(i int, err error) Result {
	switch {
	case b.guard.Revoked():
		return Result{Outcome: Canceled}
	case errors.Is(err, object.ErrMissing):
		return b.results[i]
	case errors.Is(err, object.ErrDamaged):
		return Result{Outcome: Damaged}
	}
	return Result{Outcome: Failed, Err: err}
}

// fetched gives pages their result.
func (s *Store) fetched(b *Batch, pages []int, r Result) {
	for _, i := range pages {
		replaced := r.Replaced || r.Outcome == Hit && b.results[i].Outcome == Damaged
		b.results[i] = r
		b.results[i].Replaced = replaced
		s.count(b.space, &b.results[i])
	}
	s.finish(b, len(pages))
}

// watchEvictions has pages that the lowest of the other tiers gives up go to the object tier, and
// reports what memory and the disk give up. Memory's
// are copied under its lock, as their slots are reused at once, and other calls of memory wait for
// that: 0.2 ms for a page of 256 KiB, 4 ms for one of 4 MiB on one core of an EPYC without huge
// pages (object.BenchmarkAdd). Four fifths of it is the kernel's, for memory that is touched first.
func (s *Store) watchEvictions() {
	if s.object == nil && s.feed == nil {
		return
	}
	if s.feed != nil {
		s.memory.OnRemove(s.feed.add)
		if s.disk != nil {
			s.disk.OnRemove(s.feed.add)
		}
	}
	if s.disk == nil || s.feed != nil {
		s.memory.OnEvict(func(n uint16, k, after *page.Key, crc uint32, bytes []byte) {
			s.feed.add(n, k)
			if o := s.spillTo(n); s.disk == nil && o != nil {
				_ = o.Add(k, after, bytes, crc, nil) // it is given up, here or there
			}
		})
	}
	if s.disk == nil {
		return
	}
	s.disk.OnEvict(func(n uint16, k, after *page.Key, crc uint32, read func([]byte) error) bool {
		s.feed.add(n, k)
		o := s.spillTo(n)
		return o != nil && o.Spill(k, after, crc, read)
	})
}

// spillTo is where pages of a namespace go that no other tier keeps; nil: nowhere.
func (s *Store) spillTo(n uint16) *object.Owner {
	if s.object == nil || s.removing[n].Load() > 0 {
		return nil
	}
	return s.object.owners[n].Load()
}
