package disk

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/disk/disktest"
	"github.com/kvspray/kvspray/store/offheap"
	"github.com/kvspray/kvspray/store/page"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// Of the stores in these tests: small segments, two owners with pages of 4,096 and 10,000 bytes.
const simSegment = 128 << 10

var simPages = []int{4096, 10_000}

func simSpace(owner uint16) page.ID { return page.ID{byte(owner) + 1} }

func simKey(owner uint16, i int) (k page.Key) {
	binary.LittleEndian.PutUint64(k[:], uint64(i+1)*0x9e3779b97f4a7c15)
	k[31] = byte(owner) + 1
	return k
}

// content is the page of a key.
func content(k page.Key, size int) []byte {
	buf, err := offheap.New[byte](PaddedBytes(size))
	if err != nil {
		panic(err)
	}
	_, _ = rand.NewChaCha8(k).Read(buf.Elems()[:size])
	return append([]byte(nil), buf.Elems()...)
}

func sims(devices, size int, seed uint64) (out []*disktest.Sim) {
	for i := range devices {
		out = append(out, disktest.New(size, seed+uint64(i)))
	}
	return out
}

// start opens the store that lies on the disks.
func start(tb interface {
	Fatal(...any)
	Helper()
}, files []*disktest.Sim) *Tier {
	tb.Helper()
	var devices []OpenDevice
	for _, f := range files {
		devices = append(devices, OpenDevice{"sim", f, int64(f.Size())})
	}
	t, err := OpenFiles(devices, Config{SegmentBytes: simSegment, MaxPages: 4096})
	if err != nil {
		tb.Fatal(err)
	}
	own(tb, t)
	return t
}

// own names the owners by the numbers that the store has for them.
func own(tb interface{ Fatal(...any) }, t *Tier) {
	known := t.Known()
	taken := map[uint16]bool{}
	for _, n := range known {
		taken[n] = true
	}
	for i, size := range simPages {
		n, ok := known[simSpace(uint16(i))]
		for !ok && taken[n] {
			n++
		}
		taken[n] = true
		if err := t.SetOwner(n, simSpace(uint16(i)), size, 0, 0); err != nil {
			tb.Fatal(err)
		}
	}
}

func number(t *Tier, owner uint16) uint16 { return t.Known()[simSpace(owner)] }

// record is a page to write.
func record(owner uint16, i int, after *page.Key) Record {
	k := simKey(owner, i)
	data := content(k, simPages[owner])
	return Record{Key: k, After: after, Data: data, CRC: mem.CRC32C(0, data[:simPages[owner]])}
}

// load writes pages [from, to) of an owner as one prompt and returns which are durable.
func load(t *Tier, owner uint16, from, to int) (durable []int, last error) {
	var after *page.Key
	group := t.GroupPages(simPages[owner])
	for from < to {
		var records []Record
		for i := from; i < min(from+group, to); i++ {
			records = append(records, record(owner, i, after))
			after = &records[len(records)-1].Key
		}
		for i, err := range t.Write(number(t, owner), records, nil) {
			if err == nil {
				durable = append(durable, from+i)
			} else {
				last = err
			}
		}
		from += len(records)
	}
	return durable, last
}

// has reports whether a page can be read. Wrong bytes end the test.
func has(tb interface{ Fatal(...any) }, t *Tier, owner uint16, i int) bool {
	k := simKey(owner, i)
	buf := make([]byte, PaddedBytes(simPages[owner]))
	_, err := t.Read(number(t, owner), &k, buf, Sum)
	if err != nil {
		return false
	}
	if string(buf[:simPages[owner]]) != string(content(k, simPages[owner])[:simPages[owner]]) {
		tb.Fatal("WRONG PAGE", owner, i)
	}
	return true
}

// listed is what the catalog has of an owner's first n pages.
func listed(t *Tier, owner uint16, n int) page.Bitmap {
	keys := make([]page.Key, n)
	for i := range keys {
		keys[i] = simKey(owner, i)
	}
	b := page.NewBitmap(n)
	t.Exists(number(t, owner), keys, b)
	return b
}
