package disk

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/page"
)

// Version is that of the format. A store of another one is refused, not read.
const Version = 1

// block is what everything on a device is aligned to.
const block = 4096

// Sizes of what is written, in bytes. All numbers are little-endian.
const (
	headerBytes = 64
	spaceBytes  = 40
	entryBytes  = 76
	// maxEntries bounds the pages of one segment: a segment of 1 GiB of pages of 4 KiB has fewer.
	maxEntries = 1 << 18
	maxSpaces  = 1024 // of one table, and of the ledger
)

// The magic at the beginning of each thing, 8 bytes.
const (
	magicSuper   = "KVSPRAY\x01"
	magicSegment = "KVSPSEG\x01"
	magicTable   = "KVSPTAB\x01"
	magicEnd     = "KVSPEND\x01"
	magicLedger  = "KVSPLED\x01"
)

// kind is what a table describes.
type kind uint8

const (
	kindGroup  kind = iota + 1 // the pages that follow the table
	kindFooter                 // all pages of the segment
)

// storeID is random for each store.
type storeID [16]byte

var errDamaged = errors.New("damaged")

// space is a namespace in a table, by its era.
type space struct {
	era       page.Era
	pageBytes uint32
}

// entry is one page in a table.
type entry struct {
	key   page.Key
	after page.Key // the page before it in its prompt; zero: none
	crc   uint32
	at    uint32 // blocks from the start of the segment
	space uint16 // index into the table's spaces
}

// table describes pages of one segment.
type table struct {
	kind    kind
	seq     uint64 // of the segment's life
	spaces  []space
	entries []entry
}

func tableBytes(spaces,
	entries int) int {
	return headerBytes + spaces*spaceBytes + entries*entryBytes
}

func blocksOf(bytes int) uint32 { return uint32((bytes + block - 1) / block) }

// groupPages is how many pages one group has at most: its table is one block.
const groupPages = (block - headerBytes - spaceBytes) / entryBytes

// seal stores the checksum of b in its bytes 8 to 12, over everything else.
func seal(b []byte) {
	binary.LittleEndian.PutUint32(b[8:], 0)
	binary.LittleEndian.PutUint32(b[8:], mem.CRC32C(0, b))
}

// sealed checks magic and checksum, and leaves b as it is.
func sealed(b []byte, magic string) bool {
	if string(b[:8]) != magic {
		return false
	}
	sum := mem.CRC32C(0, b[:8])
	sum = mem.CRC32C(sum, []byte{0, 0, 0, 0})
	return mem.CRC32C(sum, b[12:]) == binary.LittleEndian.Uint32(b[8:])
}

// encode writes the table at the beginning of b, which is zero and long enough.
func (t *table) encode(b []byte, store storeID) {
	n := tableBytes(len(t.spaces), len(t.entries))
	b = b[:n]
	le := binary.LittleEndian
	copy(b, magicTable)
	le.PutUint16(b[12:], Version)
	b[14] = byte(t.kind)
	copy(b[16:], store[:])
	le.PutUint64(b[32:], t.seq)
	le.PutUint32(b[40:], uint32(len(t.entries)))
	le.PutUint16(b[44:], uint16(len(t.spaces)))
	le.PutUint32(b[48:], uint32(n))
	p := b[headerBytes:]
	for _, s := range t.spaces {
		copy(p, s.era[:])
		le.PutUint32(p[32:], s.pageBytes)
		p = p[spaceBytes:]
	}
	for i := range t.entries {
		e := &t.entries[i]
		copy(p, e.key[:])
		copy(p[32:], e.after[:])
		le.PutUint32(p[64:], e.crc)
		le.PutUint32(p[68:], e.at)
		le.PutUint16(p[72:], e.space)
		p = p[entryBytes:]
	}
	seal(b)
}

// length reads how many bytes the table has that begins b, which has headerBytes at least.
func length(b []byte) (int, bool) {
	le := binary.LittleEndian
	n, entries, spaces := le.Uint32(b[48:]), le.Uint32(b[40:]), le.Uint16(b[44:])
	if string(b[:8]) != magicTable || entries > maxEntries || spaces > maxSpaces {
		return 0, false
	}
	return int(n), int(n) == tableBytes(int(spaces), int(entries))
}

// parse reads the table at the beginning of b. Everything in b may be wrong. What it returns is a
// table of this store, kind and segment, whose pages lie inside a segment of this many blocks.
func parse(b []byte, store storeID, k kind, seq uint64, segment uint32) (*table, error) {
	bad := func(what string) (*table, error) {
		return nil, fmt.Errorf("disk: table of segment life %d: %s: %w", seq, what, errDamaged)
	}
	if len(b) < headerBytes {
		return bad("too short")
	}
	n, ok := length(b)
	if !ok || n > len(b) {
		return bad("length")
	}
	b = b[:n]
	le := binary.LittleEndian
	switch {
	case !sealed(b, magicTable):
		return bad("checksum")
	case le.Uint16(b[12:]) != Version || kind(b[14]) != k:
		return bad("version or kind")
	case storeID(b[16:32]) != store || le.Uint64(b[32:]) != seq:
		return bad("of another store, or of an earlier life")
	}
	t := &table{kind: k, seq: seq, spaces: make([]space, le.Uint16(b[44:])),
		entries: make([]entry, le.Uint32(b[40:]))}
	p := b[headerBytes:]
	for i := range t.spaces {
		t.spaces[i] = space{page.Era(p[:16]), le.Uint32(p[32:])}
		if t.spaces[i].pageBytes == 0 || t.spaces[i].pageBytes > page.MaxBytes {
			return bad("page size")
		}
		p = p[spaceBytes:]
	}
	for i := range t.entries {
		e := entry{page.Key(p[:32]), page.Key(p[32:64]), le.Uint32(p[64:]), le.Uint32(p[68:]),
			le.Uint16(p[72:])}
		if int(e.space) >= len(t.spaces) {
			return bad("namespace")
		}
		if size := blocksOf(int(t.spaces[e.space].pageBytes)); e.at == 0 || e.at > segment ||
			size > segment-e.at {
			return bad("place of a page")
		}
		t.entries[i] = e
		p = p[entryBytes:]
	}
	return t, nil
}

// super is the first block of a device.
type super struct {
	store    storeID
	device   uint32 // which of the store's devices this is
	devices  uint32
	segment  uint32 // blocks
	segments uint32
}

func (s *super) encode(b []byte) {
	le := binary.LittleEndian
	copy(b, magicSuper)
	le.PutUint16(b[12:], Version)
	copy(b[16:], s.store[:])
	for i, v := range []uint32{s.device, s.devices, s.segment, s.segments} {
		le.PutUint32(b[32+4*i:], v)
	}
	seal(b[:block])
}

// errVersion is a store of another format.
type errVersion uint16

func (e errVersion) Error() string {
	other := "newer"
	if e < Version {
		other = "older"
	}
	return fmt.Sprintf("it holds a store of format %d, this release reads format %d; start the "+
		"%s release, or name another path", uint16(e), Version, other)
}

func parseSuper(b []byte) (s super, err error) {
	le := binary.LittleEndian
	if string(b[:8]) != magicSuper {
		return s,
			errors.New("it holds something that is no kvspray store; name another path, or " +
				"empty it yourself")
	}
	// Before the checksum: a newer format may have another one.
	v := le.Uint16(b[12:])
	if v > Version {
		return s, errVersion(v)
	}
	if !sealed(b[:block], magicSuper) {
		return s,
			fmt.Errorf("its first block is %w; name another path, or empty it yourself: its "+
				"pages are lost", errDamaged)
	}
	if v < Version {
		return s, errVersion(v)
	}
	s = super{storeID(b[16:32]), le.Uint32(b[32:]), le.Uint32(b[36:]), le.Uint32(b[40:]),
		le.Uint32(b[44:])}
	if s.devices == 0 || s.device >= s.devices || s.segment < minSegmentBlocks ||
		s.segment > maxSegmentBlocks || s.segments == 0 {
		return s, fmt.Errorf("its first block is %w: %+v", errDamaged, s)
	}
	return s, nil
}

func encodeSegment(b []byte, store storeID, seq uint64) {
	copy(b, magicSegment)
	binary.LittleEndian.PutUint16(b[12:], Version)
	copy(b[16:], store[:])
	binary.LittleEndian.PutUint64(b[32:], seq)
	seal(b[:block])
}

// Lives that no segment begins with.
const (
	neverUsed   = 0 // the store has not written to the segment
	unknownLife = 1 // the header cannot be read: the segment may hold pages of any earlier life
)

// parseSegment returns the number of a segment's life. It is neverUsed for zeros, and for another
// store's header.
func parseSegment(b []byte, store storeID) uint64 {
	switch {
	case !sealed(b[:block], magicSegment):
		for _, v := range b[:block] {
			if v != 0 {
				return unknownLife
			}
		}
		return neverUsed
	case storeID(b[16:32]) != store:
		return neverUsed
	}
	return binary.LittleEndian.Uint64(b[32:])
}

// encodeEnd writes the last block of a segment that has a footer before it, of this many blocks.
func encodeEnd(b []byte, store storeID, seq uint64, footer uint32) {
	copy(b, magicEnd)
	copy(b[16:], store[:])
	binary.LittleEndian.PutUint64(b[32:], seq)
	binary.LittleEndian.PutUint32(b[40:], footer)
	seal(b[:block])
}

// parseEnd returns how many blocks the footer before it has; 0: there is none.
func parseEnd(b []byte, store storeID, seq uint64, segment uint32) uint32 {
	le := binary.LittleEndian
	n := le.Uint32(b[40:])
	if !sealed(b[:block], magicEnd) || storeID(b[16:32]) != store || le.Uint64(b[32:]) != seq ||
		n == 0 || n > segment-2 {
		return 0
	}
	return n
}
