package transfer

import (
	"math/bits"
	"sync/atomic"
)

// Bitmap has the chunks of a space that have landed. A commit is a full bitmap and not a count of
// bytes: duplicates must not add up. Safe for concurrent use. Each part of a grant has one of its
// own.
type Bitmap struct {
	words []atomic.Uint64
	n     uint32
	set   atomic.Uint32
}

// NewBitmap returns a clear bitmap of n chunks.
func NewBitmap(n uint32) *Bitmap {
	return &Bitmap{words: make([]atomic.Uint64, (uint64(n)+63)/64), n: n}
}

// Len is the number of chunks.
func (b *Bitmap) Len() uint32 { return b.n }

// Set marks chunks r and returns how many of them were not marked before. Chunks outside the bitmap
// are ignored.
func (b *Bitmap) Set(r Range) uint32 {
	first, end := clip(r, b.n)
	var added uint32
	for first < end {
		w := first / 64
		lo := first % 64
		span := min(64-lo, end-first)
		mask := ^uint64(0) >> (64 - span) << lo
		old := b.words[w].Or(mask)
		added += uint32(bits.OnesCount64(mask &^ old))
		first += span
	}
	if added > 0 {
		b.set.Add(added)
	}
	return added
}

// Has reports whether chunk c is marked.
func (b *Bitmap) Has(c uint32) bool {
	return c < b.n && b.words[c/64].Load()&(1<<(c%64)) != 0
}

// Count is how many chunks are marked. A chunk is counted after it is marked: a Count of Len means
// that all are.
func (b *Bitmap) Count() uint32 { return b.set.Load() }

// Full reports whether every chunk is marked.
func (b *Bitmap) Full() bool { return b.set.Load() == b.n }

// Shares is the share of marked chunks in each of len(into) equal parts, in percent, rounded down.
func (b *Bitmap) Shares(into []uint8) {
	n := uint64(len(into))
	for i := range n {
		first, end := uint64(b.n)*i/n, uint64(b.n)*(i+1)/n
		var set uint64
		for c := first; c < end; {
			w, lo := c/64, c%64
			span := min(64-lo, end-c)
			mask := ^uint64(0) >> (64 - span) << lo
			set += uint64(bits.OnesCount64(b.words[w].Load() & mask))
			c += span
		}
		into[i] = 100
		if end > first {
			into[i] = uint8(100 * set / (end - first))
		}
	}
}

// Missing yields the runs of unmarked chunks, in order.
func (b *Bitmap) Missing() func(yield func(Range) bool) {
	return func(yield func(Range) bool) {
		for c := b.next(0, false); c < b.n; {
			end := b.next(c, true)
			if !yield(Range{First: c, Count: end - c}) {
				return
			}
			c = b.next(end, false)
		}
	}
}

// next is the first chunk from c on whose mark is want, or n.
func (b *Bitmap) next(c uint32, want bool) uint32 {
	for c < b.n {
		w := b.words[c/64].Load()
		if !want {
			w = ^w
		}
		if w = w >> (c % 64) << (c % 64); w != 0 {
			return min(b.n, c/64*64+uint32(bits.TrailingZeros64(w)))
		}
		c = (c/64 + 1) * 64
	}
	return b.n
}

// clip returns the bounds of r cut to n chunks, whatever r holds.
func clip(r Range, n uint32) (first, end uint32) {
	first = min(r.First, n)
	return first, first + min(r.Count, n-first)
}
