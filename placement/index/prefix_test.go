package index

import (
	"slices"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
)

func count(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(i)
	}
	return out
}

// A key names the tokens of its block and of all before it, and the block size.
func TestPrefixKeys(t *testing.T) {
	p := NewPrefix()
	tokens := count(1000)
	keys := p.Keys(tokens, 100, 1<<20)
	if len(keys) != 10 || !slices.Equal(keys, p.Keys(tokens, 100, 1<<20)) {
		t.Fatal(keys)
	}
	if got := p.Keys(tokens[:999], 100, 1<<20); !slices.Equal(got, keys[:9]) {
		t.Error("a block that is not whole has a key")
	}
	if got := p.Keys(tokens, 100, 4); !slices.Equal(got, keys[:4]) {
		t.Error("the bound is not kept")
	}
	if got := p.Keys(tokens, 0, 1<<20); got != nil {
		t.Error(got)
	}
	other := slices.Clone(tokens)
	other[450]++
	changed := p.Keys(other, 100, 1<<20)
	for i := range keys {
		if (keys[i] == changed[i]) != (i < 4) {
			t.Errorf("block %d after a change in block 4", i)
		}
	}
	half := p.Keys(tokens, 50, 1<<20)
	for i, k := range keys {
		if slices.Contains(half, k) || slices.Contains(keys[:i], k) {
			t.Errorf("key %d is another block's", i)
		}
	}
	if p2 := NewPrefix(); p2.First(100) == p.First(100) {
		t.Error("keys of two indexes agree")
	}
}

func TestHeld(t *testing.T) {
	h := NewHeld(4)
	add := func(name, key uint64, tier, want uint8) {
		t.Helper()
		if b, ok := h.Add(name, key, tier); !ok || b.Tiers != want {
			t.Errorf("%d: %+v %v", name, b, ok)
		}
	}
	add(1, 101, 1, 0)
	add(1, 101, 2, 1)
	add(2, 102, 1, 0)
	if b, after := h.Remove(1, 1); b != (Block{Key: 101, Tiers: 3}) || after != 2 || h.Blocks() != 2 {
		t.Errorf("%+v %d", b, after)
	}
	if b, after := h.Remove(1, 2); b.Tiers != 2 || after != 0 || h.Blocks() != 1 {
		t.Errorf("%+v %d", b, after)
	}
	if b, _ := h.Remove(1, 2); b.Tiers != 0 || h.Blocks() != 1 {
		t.Errorf("a block is lost twice: %+v", b)
	}
	if k, ok := h.Key(1); !ok || k != 101 {
		t.Error("a lost block has no key")
	}
	add(1, 101, 1, 0) // again
	add(2, 999, 2, 1) // another block of that name
	if b, after := h.Remove(2, 1); b != (Block{Key: 999, Tiers: 2}) || after != 2 {
		t.Errorf("%+v %d", b, after)
	}
	add(3, 103, 1, 0)
	add(4, 104, 1, 0)
	if _, ok := h.Add(5, 105, 1); ok {
		t.Error("more blocks than there is place for")
	}
	h.Remove(4, 1)
	add(5, 105, 1, 0) // in the place of a lost one
	if _, ok := h.Key(4); ok {
		t.Error("a lost block takes the place of another")
	}
	if had := h.Clear(); len(had) != 4 || h.Blocks() != 0 || h.Bytes() != 0 {
		t.Errorf("%+v", had)
	}
}

// Lost blocks do not pile up.
func TestHeldForgetsLostBlocks(t *testing.T) {
	h := NewHeld(1 << 20)
	for i := range uint64(4 * keptLost) {
		h.Add(i, i, 1)
		h.Remove(i, 1)
		if len(h.blocks) > keptLost+1 {
			t.Fatalf("%d blocks", len(h.blocks))
		}
	}
}

// A full map refuses blocks, and gives places of lost blocks away one by one.
func TestFullHeld(t *testing.T) { fullHeld(t, 1<<10, 100) }

// A full map does so without a delay.
func TestMeasureFullHeld(t *testing.T) {
	testutil.Measures(t)
	if took := fullHeld(t, 1<<18, 10_000); took > 5*time.Second {
		t.Errorf("%v", took)
	}
}

// fullHeld fills a map with limit blocks. Then it adds count more, which are refused, and replaces
// count of them. It returns the time of these two.
func fullHeld(t *testing.T, limit, count uint64) time.Duration {
	h := NewHeld(int(limit))
	for i := range limit {
		h.Add(i, i, 1)
	}
	began := time.Now()
	for i := range count {
		if _, ok := h.Add(limit+i, i, 1); ok {
			t.Fatal("more blocks than there is place for")
		}
	}
	for i := range count { // blocks come and go
		h.Remove(i, 1)
		if _, ok := h.Add(limit+i, limit+i, 1); !ok || len(h.blocks) != int(limit) {
			t.Fatalf("no place for block %d: %d of %d", i, len(h.blocks), limit)
		}
	}
	return time.Since(began)
}

// A block that is back outlives its loss; blocks can be removed from one tier as a whole.
func TestHeldForgetsOnlyLostBlocks(t *testing.T) {
	h := NewHeld(3)
	h.Add(1, 101, 3)
	h.Remove(1, 3)
	h.Add(1, 101, 3)
	h.Add(2, 102, 1)
	h.Remove(2, 1)
	h.Add(3, 103, 2)
	if _, ok := h.Add(4, 104, 1); !ok {
		t.Error("no place although one block is lost")
	}
	if k, ok := h.Key(1); !ok || k != 101 {
		t.Error("a block that is back is forgotten")
	}
	if had := h.Drop(1); len(had) != 2 || h.Blocks() != 2 {
		t.Errorf("%+v, %d remain", had, h.Blocks())
	}
	if b, after := h.Remove(1, 2); b.Tiers != 2 || after != 0 {
		t.Errorf("%+v: its other tier is gone", b)
	}
}

func BenchmarkKeys32k(b *testing.B) {
	p, tokens := NewPrefix(), count(32<<10)
	for b.Loop() {
		p.Keys(tokens, 16, 1<<20)
	}
}
