package disk

import (
	"encoding/binary"
	"reflect"
	"testing"

	"github.com/kvspray/kvspray/store/page"
	"pgregory.net/rapid"
)

var fuzzStore = storeID{1, 2, 3}

func drawTable(t *rapid.T) table {
	tab := table{kind: rapid.SampledFrom([]kind{kindGroup, kindFooter}).Draw(t, "kind"),
		seq:    rapid.Uint64().Draw(t, "seq"),
		spaces: []space{}, entries: []entry{}}
	for range rapid.IntRange(1, 5).Draw(t, "spaces") {
		tab.spaces = append(tab.spaces, space{page.Era{rapid.Byte().Draw(t, "id")},
			rapid.Uint32Range(1, 100_000).Draw(t, "bytes")})
	}
	for range rapid.IntRange(0, 60).Draw(t, "entries") {
		tab.entries = append(tab.entries, entry{key: page.Key{rapid.Byte().Draw(t, "key")},
			after: page.Key{1, rapid.Byte().Draw(t, "after")},
			crc:   rapid.Uint32().Draw(t, "crc"), at: rapid.Uint32Range(1, 900).Draw(t, "at"),
			space: uint16(rapid.IntRange(0, len(tab.spaces)-1).Draw(t, "space"))})
	}
	return tab
}

func TestTableRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tab := drawTable(t)
		b := make([]byte, tableBytes(len(tab.spaces), len(tab.entries))+100)
		tab.encode(b, fuzzStore)
		got, err := parse(b, fuzzStore, tab.kind, tab.seq, 1024)
		if err != nil || !reflect.DeepEqual(*got, tab) {
			t.Fatalf("%v: %+v, want %+v", err, got, tab)
		}
		for _, other := range []func() (*table, error){
			func() (*table, error) { return parse(b, storeID{9}, tab.kind, tab.seq, 1024) },
			func() (*table, error) { return parse(b, fuzzStore, 3-tab.kind, tab.seq, 1024) },
			func() (*table, error) { return parse(b, fuzzStore, tab.kind, tab.seq+1, 1024) },
			func() (*table, error) {
				return parse(b[:len(b)-101], fuzzStore, tab.kind, tab.seq, 1024)
			},
		} {
			if _, err := other(); err == nil {
				t.Fatal("accepted where it does not belong")
			}
		}
		bit := rapid.IntRange(0, 8*(len(b)-100)-1).Draw(t, "bit")
		b[bit/8] ^= 1 << (bit % 8)
		if _, err := parse(b, fuzzStore, tab.kind, tab.seq, 1024); err == nil {
			t.Fatalf("bit %d flipped, and it is accepted", bit)
		}
	})
}

// FuzzTable: whatever stands on a device, nothing is read past its end, and what is accepted lies
// inside the segment. The checksum is made right, so that the fields behind it are reached.
func FuzzTable(f *testing.F) {
	for _, tab := range []table{
		{kind: kindGroup, seq: 7, spaces: []space{{page.Era{1}, 4096}}, entries: []entry{{at: 1},
			{at: 2, crc: 5}}},
		{kind: kindFooter, seq: 7, spaces: []space{{page.Era{1}, 4096}, {page.Era{2}, 10_000}},
			entries: []entry{{at: 9, space: 1}}},
	} {
		b := make([]byte, tableBytes(len(tab.spaces), len(tab.entries)))
		tab.encode(b, fuzzStore)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= headerBytes {
			if n := int(binary.LittleEndian.Uint32(b[48:])); n >= headerBytes && n <= len(b) {
				seal(b[:n])
			}
		}
		for _, k := range []kind{kindGroup, kindFooter} {
			tab, err := parse(b, fuzzStore, k, 7, 1024)
			if err != nil {
				continue
			}
			for _, e := range tab.entries {
				size := tab.spaces[e.space].pageBytes
				if e.at < 1 || uint64(e.at)*block+uint64(size) > 1024*block {
					t.Fatalf("page at block %d of %d bytes", e.at, size)
				}
			}
		}
	})
}

// FuzzBlocks reads everything else that stands on a device.
func FuzzBlocks(f *testing.F) {
	b := make([]byte, ledgerBytes)
	s := super{fuzzStore, 0, 1, 32, 10}
	s.encode(b)
	f.Add(append([]byte(nil), b[:block]...))
	clear(b)
	encodeSegment(b, fuzzStore, 9)
	f.Add(append([]byte(nil), b[:block]...))
	clear(b)
	encodeEnd(b, fuzzStore, 7, 3)
	f.Add(append([]byte(nil), b[:block]...))
	clear(b)
	encodeLedger(b, fuzzStore, 4, 9, map[page.ID]era{{1}: {era: page.Era{3}}})
	f.Add(b)
	f.Fuzz(func(t *testing.T, in []byte) {
		b := make([]byte, ledgerBytes)
		copy(b, in)
		for _, size := range []int{block, ledgerBytes} {
			seal(b[:size])
			if s, err := parseSuper(b); err == nil && (s.devices == 0 ||
				s.segment < minSegmentBlocks || s.segments == 0) {
				t.Fatalf("%+v", s)
			}
			parseSegment(b, fuzzStore)
			if n := parseEnd(b, fuzzStore, 7, 64); n > 62 {
				t.Fatalf("a footer of %d blocks in a segment of 64", n)
			}
			if _, _, eras := parseLedger(b, fuzzStore); len(eras) > maxSpaces {
				t.Fatalf("%d namespaces", len(eras))
			}
		}
	})
}
