package plans

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
)

// expanded are the pieces of runs, in their order.
func expanded(runs []Run) (out []mem.Block) {
	for _, r := range runs {
		for i := range r.Count {
			out = append(out, mem.Block{Region: r.Region, Off: r.Off + uint64(i)*r.Stride, Len: r.Len})
		}
	}
	return out
}

// Every chunk of a list has the bytes of its entries in order, however small and uneven these are,
// no chunk has more pieces than a lane takes, and two lists of equal lengths have equal spaces.
func TestListResolvesEachByteOnce(t *testing.T) {
	region, err := mem.NewAnonymous("list", 8<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer region.Release()
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		limits := []uint64{1, 3, 100, 127, 129, 5000, 70000, 200000}
		limit := limits[rng.IntN(len(limits))]
		var runs, other []Run
		for pieces := 0; pieces < 1500 && len(runs) < 1+rng.IntN(900); {
			r := Run{Region: region, Len: 1 + rng.Uint64N(limit), Count: 1, Off: rng.Uint64N(1 << 20)}
			if rng.IntN(4) == 0 {
				r.Count, r.Stride = uint32(1+rng.IntN(8)), r.Len+rng.Uint64N(50)
			}
			pieces += int(r.Count)
			runs = append(runs, r)
			r.Off, r.Stride = 7, r.Stride+5
			other = append(other, r)
		}
		l, err := NewList(runs)
		if err != nil {
			t.Fatal(err)
		}
		twin, err := NewList(other)
		if err != nil || twin.Digest() != l.Digest() ||
			twin.Space().NumChunks() != l.Space().NumChunks() {
			t.Fatalf("seed %d: the other side has another space: %v", seed, err)
		}
		want, at := expanded(runs), uint64(0)
		for c := range l.Space().NumChunks() {
			blocks, err := l.Resolve(nil, transfer.Range{First: c, Count: 1})
			if err != nil {
				t.Fatal(err)
			}
			if len(blocks) > chunkPieces+1 {
				t.Fatalf("seed %d: chunk %d has %d pieces", seed, c, len(blocks))
			}
			for _, b := range blocks {
				if len(want) == 0 || want[0].Off != b.Off || want[0].Len < b.Len {
					t.Fatalf("seed %d: byte %d of the list is in %+v, want %+v", seed, at, b, want)
				}
				at += b.Len
				want[0].Off, want[0].Len = want[0].Off+b.Len, want[0].Len-b.Len
				if want[0].Len == 0 {
					want = want[1:]
				}
			}
		}
		if len(want) > 0 || l.Space().TotalBytes() != at {
			t.Fatalf("seed %d: %d bytes, %d pieces are missing, %d bytes in the space", seed, at, len(want),
				l.Space().TotalBytes())
		}
		all, err := l.Resolve(nil, l.Space().All())
		if err != nil {
			t.Fatal(err)
		}
		n := uint64(0)
		for _, b := range all {
			n += b.Len
		}
		if n != l.Space().TotalBytes() {
			t.Fatalf("seed %d: %d bytes at once, want %d", seed, n, l.Space().TotalBytes())
		}
	}
}

// An entry counts as arrived only if each chunk with a byte of it has landed.
func TestArrivedEntries(t *testing.T) {
	region, err := mem.NewAnonymous("list", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer region.Release()
	const c = transfer.ChunkBytes
	l, err := NewList([]Run{{Region: region, Len: c / 2, Count: 1}, {Region: region, Len: c, Count: 1},
		{Region: region, Len: c / 2, Count: 1}, {Region: region, Len: 10, Count: 1}})
	if err != nil {
		t.Fatal(err)
	}
	for missing, want := range map[uint32]byte{0: 0b1100, 1: 0b1001, 2: 0b0111} {
		landed := transfer.NewBitmap(l.Space().NumChunks())
		for i := range l.Space().NumChunks() {
			if i != missing {
				landed.Set(transfer.Range{First: i, Count: 1})
			}
		}
		if got := l.Arrived(landed.Missing()); !bytes.Equal(got, []byte{want}) {
			t.Errorf("without chunk %d: %04b, want %04b", missing, got, want)
		}
	}
}
