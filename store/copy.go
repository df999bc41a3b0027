package store

import (
	"sync"

	"github.com/kvspray/kvspray/internal/sys/mem"
)

// copyPiece is how much is copied before its checksum is computed: what the copy has just brought
// into the first-level cache. [measured, EPYC, pages of 256 KiB, the best of several] copying alone
// 23 GB/s, with the checksum behind each 4 or 8 KiB 12.8, behind each 16 KiB and more 12, before
// the copy 6 to 9. The crc32 instruction takes 8 bytes a cycle: 28 GB/s, so a get with a check
// cannot come nearer to a copy than about half on one core, where the caches feed the copy.
const copyPiece = 8 << 10

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
		for len(p) > 0 {
			n := min(len(p), copyPiece)
			mem.Copy(mapped, p[:n])
			crc = mem.CRC32C(crc, p[:n])
			mapped, p = mapped[n:], p[n:]
		}
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
		for len(p) > 0 {
			n := min(len(p), copyPiece)
			copy(p[:n], mapped) // not mem.Copy, which may leave the bytes out of the caches
			crc = mem.CRC32C(crc, p[:n])
			mapped, p = mapped[n:], p[n:]
		}
	}
	return crc, nil
}
