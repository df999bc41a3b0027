package store

import (
	"sync"

	"github.com/kvspray/kvspray/internal/sys/mem"
)

// toDevice copies a page to its block in GPU memory. at is the page in the store's arena; its
// region is nil where the page is in a buffer of this process.
func (s *Store) toDevice(to []mem.Block, page []byte, at mem.Block) error {
	if s.copy == nil || at.Region == nil {
		return mem.Scatter(to, page)
	}
	return eachRegion(to, at, func(block, page []mem.Block) error { return s.copy(block, page) })
}

// fromDevice is the reverse of toDevice.
func (s *Store) fromDevice(page []byte, at mem.Block, from []mem.Block) error {
	if s.copy == nil || at.Region == nil {
		return mem.Gather(page, from)
	}
	return eachRegion(from, at, func(block, page []mem.Block) error { return s.copy(page, block) })
}

// pageParts are lists that eachRegion needs for a moment.
var pageParts = sync.Pool{New: func() any { return new([]mem.Block) }}

// eachRegion calls f for each run of pieces of a block in one region, with the parts of the page
// that belong to them.
func eachRegion(block []mem.Block, page mem.Block, f func(block, page []mem.Block) error) error {
	list := pageParts.Get().(*[]mem.Block)
	defer pageParts.Put(list)
	for len(block) > 0 {
		n, parts := 0, (*list)[:0]
		for n < len(block) && block[n].Region == block[0].Region {
			parts = append(parts, mem.Block{Region: page.Region, Off: page.Off, Len: block[n].Len})
			page.Off += block[n].Len
			n++
		}
		*list = parts
		if err := f(block[:n], parts); err != nil {
			return err
		}
		block = block[n:]
	}
	return nil
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
