package digest

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"math/big"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"github.com/kvspray/kvspray/layout"
)

// TestSipHash compares with published vectors: the key 00 01 .. 0f, the inputs 00 01 .. of 0, 8 and
// 15 bytes.
func TestSipHash(t *testing.T) {
	in := make([]byte, SeedBytes)
	for i := range in {
		in[i] = byte(i)
	}
	k := NewKey([SeedBytes]byte(in))
	for n, want := range map[int]uint64{0: 0x726fdb47dd0e0e31, 8: 0x93f5f5799a932462,
		15: 0xa129ca6149be45e5} {
		if got := sipHash(k.seed, in[:n]); got != want {
			t.Errorf("%d bytes: %#x, want %#x", n, got, want)
		}
	}
}

// TestDefinition: the digest is the sum over all bytes of byte * 2^(8*(position mod 4)) * weights.
func TestDefinition(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	p := big.NewInt(Prime)
	for range 200 {
		k := NewKey([SeedBytes]byte{byte(rng.Uint32())})
		u, mem, table := drawn(rng)
		want := new(big.Int)
		for row := u.FirstRow; row < u.FirstRow+u.Rows; row++ {
			for h := range u.Heads {
				for x := range u.Cols * u.Cell {
					off := u.at(row, table) + h*u.Head + x/u.Cell*u.Col + x%u.Cell
					term := big.NewInt(int64(mem[off]))
					term.Lsh(term, uint(x%4*8))
					for _, w := range []uint64{k.weight(axisWord, x/4), k.weight(axisRow, row),
						k.weight(axisHead, u.FirstHead+h), k.plane(u.Layer, u.Role)} {
						term.Mul(term, new(big.Int).SetUint64(w))
					}
					want.Add(want, term)
				}
			}
		}
		got, err := k.Sum(mem, u, table)
		if err != nil || got != want.Mod(want, p).Uint64() {
			t.Fatalf("%+v: digest %#x, %v, want %#x", u, got, err, want.Uint64())
		}
	}
}

// drawn returns units in any order, with random strides that leave gaps.
func drawn(rng *rand.Rand) (*Units, []byte, []uint32) {
	one := func(n uint64) uint64 { return 1 + rng.Uint64N(n) }
	u := &Units{Layer: "layer", Role: layout.RoleK, TileRows: one(4), Tiles: one(3), Cell: one(9),
		Cols: one(5), FirstHead: rng.Uint64N(4), Heads: one(4), FirstRow: rng.Uint64N(9), Rows: one(20)}
	at := u.Cell
	axes := []struct {
		n      uint64
		stride *uint64
	}{{u.Cols, &u.Col}, {u.Heads, &u.Head}, {u.TileRows, &u.Row}}
	rng.Shuffle(len(axes), func(a, b int) { axes[a], axes[b] = axes[b], axes[a] })
	for _, a := range append(axes, struct {
		n      uint64
		stride *uint64
	}{u.Tiles, &u.Tile}) {
		*a.stride = at + rng.Uint64N(2)*rng.Uint64N(3)
		at = *a.stride * a.n
	}
	u.Block, u.Off = at, rng.Uint64N(9)
	table := make([]uint32, (u.FirstRow+u.Rows-1)/(u.TileRows*u.Tiles)+1)
	for i, b := range rng.Perm(len(table)) {
		table[i] = uint32(b)
	}
	mem := make([]byte, u.Off+u.Block*uint64(len(table)))
	for i := range mem {
		mem[i] = byte(rng.Uint32())
	}
	return u, mem, table
}

// TestLargestSums: sums of the largest words, weights and digests stay below the prime.
func TestLargestSums(t *testing.T) {
	const words = MaxUnitBytes / 4
	var s wide
	want := new(big.Int)
	for range words {
		s.add(1<<60-1, 1<<32-1)
	}
	want.Mul(big.NewInt(1<<60-1), big.NewInt(1<<32-1))
	want.Mul(want, big.NewInt(words))
	if got := s.mod(); got != want.Mod(want, big.NewInt(Prime)).Uint64() {
		t.Errorf("%d words: %#x, want %#x", words, got, want.Uint64())
	}
	for _, a := range []uint64{0, 1, Prime - 1} {
		for _, b := range []uint64{0, 1, Prime - 1} {
			want.Mul(new(big.Int).SetUint64(a), new(big.Int).SetUint64(b))
			if got := mul(a, b); got != want.Mod(want, big.NewInt(Prime)).Uint64() {
				t.Errorf("%#x * %#x = %#x", a, b, got)
			}
		}
	}
}

// TestWeights: no weight is 0, and those of two axes, positions or seeds differ.
func TestWeights(t *testing.T) {
	seen := map[uint64]bool{}
	for seed := range byte(4) {
		k := NewKey([SeedBytes]byte{seed})
		for a := axisWord; a < axisPlane; a++ {
			for i := range uint64(1000) {
				seen[k.weight(a, i)] = true
			}
		}
		for _, layer := range []string{"", "a", "b"} {
			seen[k.plane(layer, layout.RoleK)], seen[k.plane(layer, layout.RoleV)] = true, true
		}
	}
	if n := 4 * (3*1000 + 6); len(seen) != n || seen[0] {
		t.Errorf("%d weights, want %d, none of them 0", len(seen), n)
	}
}

func TestRefusals(t *testing.T) {
	good := Units{TileRows: 4, Tiles: 1, Cell: 2, Cols: 1, Row: 2, Block: 8, Heads: 1, Rows: 8}
	for name, bad := range map[string]func(u *Units){
		"no rows in a block": func(u *Units) { u.TileRows = 0 },
		"no kernel block":    func(u *Units) { u.Tiles = 0 },
		"too many rows":      func(u *Units) { u.TileRows = layout.MaxTokensPerBlock + 1 },
		"an empty cell":      func(u *Units) { u.Cell = 0 },
		"a large unit":       func(u *Units) { u.Cols = MaxUnitBytes },
		"a wrapped unit":     func(u *Units) { u.Cell, u.Cols = 1<<32, 1<<32 },
		"a short table":      func(u *Units) { u.Rows = 9 },
		"wrapped rows":       func(u *Units) { u.FirstRow, u.Rows = 1<<63, 1<<63 },
		"a far block":        func(u *Units) { u.Block = 16 },
		"a wrapped offset":   func(u *Units) { u.Off = 1<<64 - 1 },
		"many heads":         func(u *Units) { u.Heads = 1 << 40 },
	} {
		u := good
		bad(&u)
		var refused *layout.Error
		if _, err := NewKey([SeedBytes]byte{}).Sum(make([]byte, 16), &u,
			[]uint32{0, 1}); !errors.As(err, &refused) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := NewKey([SeedBytes]byte{}).Sum(make([]byte, 16), &good, []uint32{0, 1}); err != nil {
		t.Error(err)
	}
}

// TestLimit keeps the heads of the model that are asked for and are there.
func TestLimit(t *testing.T) {
	for _, c := range []struct{ first, end, from, heads, off uint64 }{
		{0, 99, 4, 4, 0}, {5, 7, 5, 2, 16}, {0, 5, 4, 1, 0}, {8, 9, 0, 0, 0}, {0, 4, 0, 0, 0},
		{6, 6, 0, 0, 0},
	} {
		u := Units{FirstHead: 4, Heads: 4, Head: 16}
		u.Limit(c.first, c.end)
		if u.Heads != c.heads || c.heads > 0 && (u.FirstHead != c.from || u.Off != c.off) {
			t.Errorf("heads [%d, %d) of [4, 8): %+v", c.first, c.end, u)
		}
	}
}

func BenchmarkSum(b *testing.B) {
	const rows, heads, size = 4096, 8, 256
	u := &Units{TileRows: 16, Tiles: 1, Cell: size, Cols: 1, Head: size, Row: heads * size,
		Block: 16 * heads * size, Heads: heads, Rows: rows}
	table := make([]uint32, rows/16)
	for i := range table {
		table[i] = uint32(i)
	}
	mem := make([]byte, rows*heads*size)
	k := NewKey([SeedBytes]byte{1})
	b.SetBytes(int64(len(mem)))
	for b.Loop() {
		if _, err := k.Sum(mem, u, table); err != nil {
			b.Fatal(err)
		}
	}
}

// TestVectors: C has the same digests. The reference in pybind/tests/test_digest.py, which follows
// the definition in whole numbers, has computed them.
func TestVectors(t *testing.T) {
	b, err := os.ReadFile("testdata/digests.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Seed   string
		Bytes  int
		Units  map[string]any
		Table  []uint32
		Digest uint64
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	if err := d.Decode(&vectors); err != nil || len(vectors) < 20 {
		t.Fatal(len(vectors), err)
	}
	for i, v := range vectors {
		seed, err := hex.DecodeString(v.Seed)
		if err != nil {
			t.Fatal(err)
		}
		n := func(field string) uint64 {
			n, err := strconv.ParseUint(string(v.Units[field].(json.Number)), 10, 64)
			if err != nil {
				t.Fatal(field, err)
			}
			return n
		}
		u := &Units{Layer: v.Units["layer"].(string), Role: layout.Role(n("role")), Off: n("off"),
			Block: n("block"), Tile: n("tile"), Row: n("row"), Head: n("head"), Col: n("col"),
			TileRows: n("tile_rows"), Tiles: n("tiles"), Cell: n("cell"), Cols: n("cols"),
			FirstHead: n("first_head"), Heads: n("heads"), FirstRow: n("first_row"), Rows: n("rows")}
		mem := make([]byte, v.Bytes)
		for k := range mem {
			mem[k] = byte((k*k*31 + k) >> 3)
		}
		got, err := NewKey([SeedBytes]byte(seed)).Sum(mem, u, v.Table)
		if err != nil || got != v.Digest {
			t.Errorf("vector %d: digest %d, %v, want %d", i, got, err, v.Digest)
		}
	}
}
