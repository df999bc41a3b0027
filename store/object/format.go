package object

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/evict"
	"github.com/kvspray/kvspray/store/page"
)

// Version is that of the format. An object of another one is refused, not read.
const Version = 1

// Sizes of what is written, in bytes. All numbers are little-endian.
const (
	headBytes  = 128
	entryBytes = 72
	ledgerHead = 128
	eraBytes   = 48
	maxSpaces  = evict.MaxOwners
)

// The magic at the beginning of each thing, 8 bytes.
const (
	magicObject = "KVSPOBJ\x01"
	magicLedger = "KVSPOLG\x01"
)

// storeID is random for each store.
type storeID [16]byte

// Why an object or a ledger is not read.
var (
	errDamaged = errors.New("damaged")
	errForeign = errors.New("no kvspray store wrote it")
	errOther   = errors.New("another store wrote it")
)

// errVersion is an object of another format.
type errVersion uint16

func (e errVersion) Error() string {
	other := "newer"
	if e < Version {
		other = "older"
	}
	return fmt.Sprintf("it has format %d, this release reads format %d; start the %s release, or "+
		"name another prefix", uint16(e), Version, other)
}

// entry is one page in a header.
type entry struct {
	key   page.Key
	after page.Key // the page before it in its prompt; zero: none
	crc   uint32
	at    uint32 // bytes from the beginning of the object
	// Not part of the format:
	whole bool     // its bytes are there
	older *olderAt // nil: no object in the bucket has the page
}

// before is the key of the page before it, or nil.
func (e *entry) before() *page.Key {
	if e.after == (page.Key{}) {
		return nil
	}
	return &e.after
}

// header describes an object: all its pages are of one namespace and one size.
type header struct {
	life      uint64
	era       page.Era
	pageBytes uint32
	bytes     uint64 // of the object
	begin     uint32 // where the pages begin: the length of the header
	entries   []entry
}

func headerBytes(entries int) int { return headBytes + entries*entryBytes }

// seal stores the checksum of b in its bytes 8 to 12, over everything else.
func seal(b []byte) {
	binary.LittleEndian.PutUint32(b[8:], 0)
	binary.LittleEndian.PutUint32(b[8:], mem.CRC32C(0, b))
}

// sealed checks the checksum, and leaves b as it is.
func sealed(b []byte) bool {
	sum := mem.CRC32C(0, b[:8])
	sum = mem.CRC32C(sum, []byte{0, 0, 0, 0})
	return mem.CRC32C(sum, b[12:]) == binary.LittleEndian.Uint32(b[8:])
}

// encode writes the header into b, which is zero and headerBytes long.
func (h *header) encode(b []byte, store storeID) {
	le := binary.LittleEndian
	copy(b, magicObject)
	le.PutUint16(b[12:], Version)
	copy(b[16:], store[:])
	le.PutUint64(b[32:], h.life)
	copy(b[40:], h.era[:])
	le.PutUint32(b[72:], h.pageBytes)
	le.PutUint32(b[76:], uint32(len(h.entries)))
	le.PutUint32(b[80:], h.begin)
	le.PutUint64(b[88:], h.bytes)
	p := b[headBytes:]
	for i := range h.entries {
		e := &h.entries[i]
		copy(p, e.key[:])
		copy(p[32:], e.after[:])
		le.PutUint32(p[64:], e.crc)
		le.PutUint32(p[68:], e.at)
		p = p[entryBytes:]
	}
	seal(b)
}

// headerLength is how long the header is that begins with b; 0: b is too short, or damaged.
func headerLength(b []byte) int {
	if len(b) < headBytes || string(b[:8]) != magicObject {
		return 0
	}
	n := binary.LittleEndian.Uint32(b[76:])
	if n > maxPages || int(binary.LittleEndian.Uint32(b[80:])) != headerBytes(int(n)) {
		return 0
	}
	return headerBytes(int(n))
}

// parse reads a header. Everything in b may be wrong. What it returns is a header of this store and
// of the life that the object's name has, whose pages lie inside an object of size bytes, one
// after another.
func parse(b []byte, store storeID, life uint64, size int64) (*header, error) {
	le := binary.LittleEndian
	if len(b) < headBytes || string(b[:8]) != magicObject {
		return nil, errForeign
	}
	// Before the checksum: a newer format may have another one.
	if v := le.Uint16(b[12:]); v != Version {
		return nil, errVersion(v)
	}
	n := headerLength(b)
	if n == 0 || n > len(b) || !sealed(b[:n]) {
		return nil, fmt.Errorf("its header is %w", errDamaged)
	}
	b = b[:n]
	if storeID(b[16:32]) != store {
		return nil, errOther
	}
	h := &header{life: le.Uint64(b[32:]), era: page.Era(b[40:56]), pageBytes: le.Uint32(b[72:]),
		bytes: le.Uint64(b[88:]), begin: uint32(n)}
	if h.life != life || h.pageBytes == 0 || h.pageBytes > page.MaxBytes ||
		h.bytes != uint64(size) {
		return nil, fmt.Errorf("its header is another object's, or it was cut: %w", errDamaged)
	}
	h.entries = make([]entry, le.Uint32(b[76:]))
	next := uint64(h.begin)
	for i := range h.entries {
		p := b[headBytes+i*entryBytes:]
		e := entry{key: page.Key(p[:32]), after: page.Key(p[32:64]), crc: le.Uint32(p[64:]),
			at: le.Uint32(p[68:]), whole: true}
		at := uint64(e.at)
		if at < next || at+uint64(h.pageBytes) > h.bytes ||
			(at-uint64(h.begin))%uint64(h.pageBytes) != 0 ||
			(at-uint64(h.begin))/uint64(h.pageBytes) >= maxPages {
			return nil, fmt.Errorf("page %d is outside: %w", i, errDamaged)
		}
		next = at + uint64(h.pageBytes)
		h.entries[i] = e
	}
	return h, nil
}

// ledger decides which objects count. It has the era of each namespace, and the lives that objects
// have got. An object counts only if the ledger has its era: from before its upload until the
// removal of its namespace. A removal therefore also covers uploads that arrive later, and objects
// that a start has not found. The ledger is one object that is replaced whole, and only by the
// process that read or wrote it last. It holds its content twice, so that a flipped bit loses
// nothing.
type ledger struct {
	store      storeID
	epoch      uint64   // starts of the store: lives of this one are epoch<<epochShift and more
	process    [16]byte // random for each start
	generation uint64   // writes of this start
	eras       map[page.ID]era

	changes uint64 // of eras in this start
	durable uint64 // changes that the object store has
	// ended are the namespaces whose eras have ended by a change that the object store lacks, and
	// that change; of those that had no room there, endedToo is the last.
	ended    map[page.ID]uint64
	endedToo uint64
}

// era is that of a namespace.
type era struct {
	era   page.Era
	since uint64 // the change that began it; 0: one of an earlier start
}

// epochShift: a start gives up to 2^36 lives, and there can be 2^28 starts.
const epochShift = 36

func (l *ledger) encode() []byte {
	n := ledgerHead + len(l.eras)*eraBytes
	out := make([]byte, 2*n)
	b := out[:n]
	le := binary.LittleEndian
	copy(b, magicLedger)
	le.PutUint16(b[12:], Version)
	copy(b[16:], l.store[:])
	le.PutUint64(b[32:], l.epoch)
	copy(b[40:], l.process[:])
	le.PutUint64(b[56:], l.generation)
	le.PutUint32(b[64:], uint32(len(l.eras)))
	p := b[ledgerHead:]
	for id, e := range l.eras {
		copy(p, id[:])
		copy(p[32:], e.era[:])
		p = p[eraBytes:]
	}
	seal(b)
	copy(out[n:], b)
	return out
}

// parseLedger reads one of the two copies.
func parseLedger(b []byte) (*ledger, error) {
	err := error(errForeign)
	for _, half := range [][]byte{b[:len(b)/2], b[len(b)/2:]} {
		l, e := parseCopy(half)
		if e == nil {
			return l, nil
		}
		if !errors.Is(e, errForeign) {
			err = e
		}
	}
	return nil, err
}

func parseCopy(b []byte) (*ledger, error) {
	le := binary.LittleEndian
	if len(b) < ledgerHead || string(b[:8]) != magicLedger {
		return nil, errForeign
	}
	if v := le.Uint16(b[12:]); v > Version {
		return nil, errVersion(v)
	}
	n := le.Uint32(b[64:])
	if !sealed(b) || n > maxSpaces || len(b) != ledgerHead+int(n)*eraBytes {
		return nil, errDamaged
	}
	l := &ledger{store: storeID(b[16:32]), epoch: le.Uint64(b[32:]),
		process: [16]byte(b[40:56]), generation: le.Uint64(b[56:]), eras: map[page.ID]era{}}
	if l.epoch == 0 || l.epoch >= 1<<(64-epochShift) {
		return nil, errDamaged
	}
	for p := b[ledgerHead:]; len(p) > 0; p = p[eraBytes:] {
		l.eras[page.ID(p[:32])] = era{era: page.Era(p[32:48])}
	}
	return l, nil
}
