package store

import (
	"slices"
	"sync"

	"github.com/kvspray/kvspray/internal/sys/mem"
)

// toDevice copies a page to its block in GPU memory. at is the page in the store's arena; its
// region is nil where the page is in a buffer of this process.
func (s *Store) toDevice(to []mem.Block, page []byte, at mem.Block) error {
	if s.copy == nil || at.Region == nil {
		return mem.Scatter(to, page)
	}
	list := pageParts.Get().(*[]mem.Block)
	defer pageParts.Put(list)
	*list = cut((*list)[:0], at, to)
	return s.copy(to, *list)
}

// fromDevice is the reverse of toDevice.
func (s *Store) fromDevice(page []byte, at mem.Block, from []mem.Block) error {
	if s.copy == nil || at.Region == nil {
		return mem.Gather(page, from)
	}
	list := pageParts.Get().(*[]mem.Block)
	defer pageParts.Put(list)
	*list = cut((*list)[:0], at, from)
	return s.copy(*list, from)
}

// pageParts are lists that a copy needs for a moment.
var pageParts = sync.Pool{New: func() any { return new([]mem.Block) }}

// cut appends the parts of a page that belong to the pieces of its block.
func cut(parts []mem.Block, page mem.Block, block []mem.Block) []mem.Block {
	for i := range block {
		parts = append(parts, mem.Block{Region: page.Region, Off: page.Off, Len: block[i].Len})
		page.Off += block[i].Len
	}
	return parts
}

// together reports whether pages are copied between the arena and a GPU several at a time.
func (s *Store) together(b *Batch) bool { return s.copy != nil && b.pool.device }

// lists are the blocks of several pages, on the GPU and in the arena.
type lists struct{ far, near []mem.Block }

func (l *lists) clear() { l.far, l.near = l.far[:0], l.near[:0] }

// add appends a page and block i of a batch.
func (l *lists) add(b *Batch, i int, page mem.Block) {
	n := len(l.far)
	l.far = b.pool.place(l.far, b.blocks[i])
	l.near = cut(l.near, page, l.far[n:])
}

// getTogether copies those pages of a batch that are in memory and undamaged to the GPU, at once:
// each copy of its own would wait for the driver. rest are the other pages; all, if the copy fails.
func (s *Store) getTogether(b *Batch, pages []int, w *worker) (rest []int) {
	w.lists.clear()
	w.pages = w.pages[:0]
	for _, i := range pages {
		p, ok := s.memory.Pin(b.space.number, &b.keys[i])
		if !ok {
			rest = append(rest, i)
			continue
		}
		w.pages = append(w.pages, p)
		if mem.CRC32C(0, p.Bytes) != p.CRC {
			rest = append(rest, i)
			continue
		}
		w.lists.add(b, i, p.Block)
		b.results[i] = Result{Outcome: Hit, Tier: Memory}
	}
	defer func() {
		for _, p := range w.pages {
			s.memory.Unpin(p)
		}
	}()
	if len(w.lists.far) > 0 {
		if !b.guard.Enter() {
			return pages
		}
		defer b.guard.Leave()
		if s.copy(w.lists.far, w.lists.near) != nil {
			return pages // the error is that of the page's own copy
		}
	}
	for _, i := range pages {
		if r := &b.results[i]; r.Outcome == Hit {
			s.count(b.space, r)
		}
	}
	return rest
}

// fillTogether fills reserved pages from the GPU, at once, and returns those that are stored.
func (s *Store) fillTogether(b *Batch, pages []held, w *worker) []held {
	w.lists.clear()
	for j := range pages {
		if h := &pages[j]; b.results[h.i].Outcome == Pending {
			w.lists.add(b, h.i, h.page.Block)
		}
	}
	if len(w.lists.far) == 0 {
		return pages
	}
	copied := false
	if b.guard.Enter() {
		copied = s.copy(w.lists.near, w.lists.far) == nil
		b.guard.Leave()
	}
	for j := range pages {
		h := &pages[j]
		switch r := &b.results[h.i]; {
		case r.Outcome != Pending:
		case copied:
			*r = s.commit(h, mem.CRC32C(0, h.page.Bytes))
		default: // the error is that of the page's own copy
			*r = s.fill(b, h, w)
		}
	}
	return slices.DeleteFunc(pages, func(h held) bool { return h.page.Bytes == nil })
}

// copyPart copies a part of a page to host memory, and returns the checksum of what it copied,
// behind that of the parts before, which is crc.
func copyPart(crc uint32, to []mem.Block, page []byte) (uint32, error) {
	for _, b := range to {
		p := page[:b.Len]
		page = page[b.Len:]
		mapped, ok := b.Bytes()
		if !ok {
			crc = mem.CRC32C(crc, p)
			if err := b.Region.WriteAt(p, b.Off); err != nil {
				return crc, err
			}
			continue
		}
		crc = mem.CopyCRC32C(crc, mapped, p)
	}
	return crc, nil
}

// part appends where bytes [from, to) of a page are in its block.
func part(place []mem.Block, from, to uint64, into []mem.Block) []mem.Block {
	for _, b := range place {
		if from < b.Len {
			n := min(to, b.Len) - from
			into = append(into, mem.Block{Region: b.Region, Off: b.Off + from, Len: n})
			from += n
		}
		if to <= b.Len {
			break
		}
		from, to = from-b.Len, to-b.Len
	}
	return into
}

// copyIn fills a page from its block in host memory, and returns the checksum of what the page has
// now. The source may change while it is copied, and then the caller breaks its word, but the page
// and its checksum still agree.
func copyIn(page []byte, from []mem.Block) (crc uint32, err error) {
	for _, b := range from {
		p := page[:b.Len]
		page = page[b.Len:]
		mapped, ok := b.Bytes()
		if !ok {
			if err := b.Region.ReadAt(p, b.Off); err != nil {
				return crc, err
			}
			crc = mem.CRC32C(crc, p)
			continue
		}
		crc = mem.CopyCRC32C(crc, p, mapped)
	}
	return crc, nil
}
