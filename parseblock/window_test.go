package parseblock

import (
	"errors"
	"fmt"
	"testing"

	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// windowed is a layout of one layer with the given window. Rows are wide: a block is several
// chunks.
func windowed(n uint32, window, prefixCache int64) *layout.Layout {
	page := uint64(n) * transfer.ChunkBytes * 3 / 2
	return &layout.Layout{Groups: []layout.Group{{TokensPerBlock: n, NumBlocks: 64, Strategy: MLA,
		Params: map[string]int64{"window": window, "prefix_cache": prefixCache},
		Layers: []layout.Layer{{Name: "a", PageBytes: page, BlockStride: page}}}}}
}

// TestWindowsOfAnyBlocks tries every small window with every pair of block sizes and prompts of
// every length. The moved part begins with the source's first token or the start of the receiver's
// block, pages report their position, and no chunk is ready before the last token with a byte in
// it.
func TestWindowsOfAnyBlocks(t *testing.T) {
	reg := Default()
	for _, c := range [][2]uint32{{1, 4}, {3, 4}, {4, 3}, {4, 4}, {8, 4}, {4, 8}, {5, 2},
		{2, 5}, {16, 1}} {
		for window := uint32(1); window <= 12; window++ {
			m, err := NewMatch(reg, windowed(c[0], int64(window), 0), windowed(c[1], int64(window), 0), nil)
			if err != nil {
				t.Fatal(err)
			}
			for tokens := uint32(1); tokens <= 40; tokens++ {
				for _, skip := range []uint32{0, tokens / 2 / c[1] * c[1], tokens / c[1] * c[1]} {
					p, err := m.Plan(tokens, []uint32{skip})
					if err != nil {
						t.Fatal(err)
					}
					if err := checkWindow(p, c[0], c[1], window, tokens, skip); err != nil {
						t.Fatalf("blocks of %d to %d, window %d, %d tokens, skip %d: %v", c[0], c[1], window,
							tokens, skip, err)
					}
				}
			}
		}
	}
}

func checkWindow(p *Plan, ns, nd, window, tokens, skip uint32) error {
	const row = transfer.ChunkBytes * 3 / 2
	seen := uint32(0)
	if tokens+1 > window {
		seen = tokens + 1 - window
	}
	first := max(skip, seen/nd*nd, seen/ns*ns)
	r, bytes := p.Space().Segment(0)
	if want := uint64(tokens-min(first, tokens)) * row; bytes != want {
		return fmt.Errorf("%d bytes, want those of the tokens from %d on", bytes, first)
	}
	token := first
	for off := uint64(0); off < bytes; {
		block, n := p.Page(0, off)
		end := min((token/nd+1)*nd, tokens)
		if block != token/nd || n != uint64(end-token)*row {
			return fmt.Errorf("byte %d is in a page of block %d with %d bytes, want block %d with the "+
				"tokens [%d, %d)", off, block, n, token/nd, token, end)
		}
		if b, k := p.Page(0, off+n-1); b != block || k != n {
			return fmt.Errorf("the last byte of block %d is in one of block %d", block, b)
		}
		off += n
		token = end
	}
	for have := range tokens + 1 {
		for _, final := range []bool{false, true} {
			got := p.Ready(0, have, final)
			blocks := have / nd * nd // of the receiver, complete
			if final && have == tokens {
				blocks = tokens
			}
			var whole uint64
			if blocks > first {
				whole = uint64(blocks-first) * row
			}
			want := uint32(whole / transfer.ChunkBytes)
			if whole == bytes {
				want = r.Count
			}
			if got.First != r.First || got.Count != want {
				return fmt.Errorf("of %d tokens (final %v) %d chunks are ready, want %d", have, final,
					got.Count, want)
			}
		}
	}
	return nil
}

// TestKeptBlocksAreWhole: a receiver with a prefix cache gives a prompt the blocks of another. For
// every small window and pair of block sizes, a plan is refused exactly if a later prompt could see
// missing tokens: a prompt that continues after block h-1 reuses blocks as far back as one token
// sees, and none older.
func TestKeptBlocksAreWhole(t *testing.T) {
	reg := Default()
	refused, cut := 0, 0
	for ns := uint32(1); ns <= 6; ns++ {
		for nd := uint32(1); nd <= 6; nd++ {
			for window := uint32(1); window <= 14; window++ {
				src := windowed(ns, int64(window), 0)
				kept, err := NewMatch(reg, src, windowed(nd, int64(window), 1), nil)
				if err != nil {
					t.Fatal(err)
				}
				alone, err := NewMatch(reg, src, windowed(nd, int64(window), 0), nil)
				if err != nil {
					t.Fatal(err)
				}
				for tokens := uint32(1); tokens <= 40; tokens++ {
					if _, err := alone.Plan(tokens, []uint32{0}); err != nil {
						t.Fatal(err)
					}
					seen := uint32(0)
					if tokens+1 > window {
						seen = tokens + 1 - window
					}
					block := seen / nd
					has := max(seen/ns*ns, block*nd) // of the receiver's first block
					unsafe := false
					back := (window - 1 + nd - 1) / nd // blocks that a hit takes
					for h := block + back; back > 0 && h <= block+back+20; h++ {
						unsafe = unsafe || h*nd-(window-1) < has
					}
					if has > block*nd {
						cut++
					}
					_, err := kept.Plan(tokens, []uint32{0})
					var e *layout.Error
					if unsafe != errors.As(err, &e) || unsafe && e.Field != "tokens" {
						t.Fatalf("blocks of %d to %d, window %d, %d tokens: %v, want a refusal: %v", ns, nd, window,
							tokens, err, unsafe)
					}
					if unsafe {
						refused++
					}
				}
			}
		}
	}
	if refused == 0 || refused == cut {
		t.Errorf("%d of %d cut blocks were refused", refused, cut)
	}
}
