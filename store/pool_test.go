package store

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"pgregory.net/rapid"
)

func poolMemory(t fatal, bytes uint64) *mem.Region {
	r, err := mem.NewAnonymous("pool", bytes)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestRefusesPools(t *testing.T) {
	r := poolMemory(t, 1<<20)
	defer r.Release()
	size := r.Size()
	for _, c := range []struct {
		name   string
		blocks int
		pieces []Piece
		want   string
	}{
		{"no blocks", 0, []Piece{{r, 0, 8, 8}}, "field blocks: 0; send 1 to"},
		{"no pieces", 1, nil, "field pieces: 0; send 1 to"},
		{"many pieces", 1, make([]Piece, MaxPieces+1), "field pieces: 4097"},
		{"no region", 1, []Piece{{nil, 0, 8, 8}}, "pieces[0]: has no region"},
		{"no bytes", 1, []Piece{{r, 0, 8, 0}}, "pieces[0]: has no region or no bytes"},
		{"stride", 2, []Piece{{r, 0, 7, 8}}, "stride 7 is less than length 8"},
		{"outside", 2, []Piece{{r, 0, size, 8}}, "pieces[0]"},
		{"outside by base", 1, []Piece{{r, 0, 8, 8}, {r, size - 7, 8, 8}}, "pieces[1]"},
		{"overflow", MaxBlocks, []Piece{{r, 0, 1 << 60, 8}}, "exceed every region"},
		{"overflow of base", 1, []Piece{{r, ^uint64(0) - 3, 8, 8}}, "pieces[0]"},
		{"shared", 4, []Piece{{r, 0, 16, 9}, {r, 8, 16, 8}}, "pieces[1]: shares bytes with pieces[0]"},
		{"shared by the next block", 4, []Piece{{r, 0, 16, 8}, {r, 8, 16, 9}}, "pieces[1]: shares"},
		{"other strides", 4, []Piece{{r, 0, 16, 8}, {r, 8, 32, 8}}, "pieces[1]: shares"},
	} {
		_, err := NewPool(c.pieces, c.blocks)
		var re *RequestError
		if !errors.As(err, &re) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
	p, err := NewPool([]Piece{{r, 0, 16, 8}, {r, 8, 16, 8}}, int(size/16))
	if err != nil || p.PageBytes() != 16 || p.Blocks() != int(size/16) {
		t.Errorf("keys and values in turns: %v", err)
	}
}

// A pool with pieces of equal strides is refused if and only if two blocks share a byte.
func TestPoolsOverlap(t *testing.T) {
	r := poolMemory(t, 1<<20)
	defer r.Release()
	rapid.Check(t, func(t *rapid.T) {
		blocks := rapid.IntRange(1, 6).Draw(t, "blocks")
		stride := rapid.Uint64Range(1, 24).Draw(t, "stride")
		var pieces []Piece
		for range rapid.IntRange(1, 4).Draw(t, "pieces") {
			pieces = append(pieces, Piece{r, rapid.Uint64Range(0, 80).Draw(t, "base"), stride,
				rapid.Uint64Range(1, 12).Draw(t, "len")})
		}
		used, shared := map[uint64]bool{}, false
		for _, c := range pieces {
			for i := range uint64(blocks) {
				for b := range c.Len {
					at := c.Base + i*stride + b
					shared = shared || used[at]
					used[at] = true
				}
			}
		}
		if _, err := NewPool(pieces, blocks); (err != nil) != shared {
			t.Fatalf("bytes are shared: %v, but NewPool: %v", shared, err)
		}
	})
}
