package object

import (
	"bytes"
	"testing"

	"github.com/kvspray/kvspray/store/page"
)

func sampleHeader() (b []byte, h header, store storeID) {
	store = storeID{1, 2, 3}
	n := headerBytes(3)
	h = header{life: 7, era: page.Era{9}, pageBytes: 4096, begin: uint32(n),
		bytes: uint64(n + 5*4096)}
	for i, at := range []int{0, 1, 4} {
		h.entries = append(h.entries, entry{key: page.Key{byte(i)}, after: page.Key{byte(i), 1},
			crc: uint32(i), at: h.begin + uint32(at*4096), whole: true})
	}
	b = make([]byte, n)
	h.encode(b, store)
	return b, h, store
}

// A parsed header equals the encoded one, and any bit that differs is found.
func TestHeaders(t *testing.T) {
	b, h, store := sampleHeader()
	got, err := parse(b, store, 7, int64(h.bytes))
	if err != nil || got.era != h.era || len(got.entries) != 3 || got.entries[2] != h.entries[2] {
		t.Fatalf("%+v %v", got, err)
	}
	if _, err := parse(b, store, 8, int64(h.bytes)); err == nil {
		t.Error("an object under another name was taken")
	}
	if _, err := parse(b, store, 7, int64(h.bytes)-1); err == nil {
		t.Error("an object that was cut was taken")
	}
	for bit := range 8 * len(b) {
		c := bytes.Clone(b)
		c[bit/8] ^= 1 << (bit % 8)
		if _, err := parse(c, store, 7, int64(h.bytes)); err == nil || !isForeign(err) {
			t.Fatalf("bit %d: %v", bit, err)
		}
	}
}

func FuzzHeader(f *testing.F) {
	b, h, store := sampleHeader()
	f.Add(b, int64(h.bytes))
	f.Add([]byte("text"), int64(4))
	f.Fuzz(func(t *testing.T, b []byte, size int64) {
		if len(b) >= headBytes && headerLength(b) == len(b) {
			seal(b) // so that what is behind the checksum is reached
		}
		h, err := parse(b, store, 7, size)
		if err != nil {
			return
		}
		end := int64(h.begin)
		for _, e := range h.entries {
			if int64(e.at) < end || int64(e.at)+int64(h.pageBytes) > size {
				t.Fatalf("a page at %d", e.at)
			}
			end = int64(e.at) + int64(h.pageBytes)
		}
	})
}

func FuzzLedger(f *testing.F) {
	l := ledger{store: storeID{1}, epoch: 3, generation: 4,
		eras: map[page.ID]era{{1}: {era: page.Era{5}}}}
	f.Add(l.encode())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if half := b[:len(b)/2]; len(half) >= ledgerHead {
			seal(half)
		}
		got, err := parseLedger(b)
		if err == nil && (got.epoch == 0 || len(got.eras) > maxSpaces) {
			t.Fatalf("%+v", got)
		}
	})
}
