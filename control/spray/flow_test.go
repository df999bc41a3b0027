// SPDX-License-Identifier: Apache-2.0

package spray

import (
	"math/rand/v2"
	"testing"

	"github.com/kvspray/kvspray/transfer"
)

// state is what is known of a chunk, kept or not.
func (f *Flow) state(c uint32) (k chunk) {
	switch {
	case f.chunks != nil:
		return f.chunks[c]
	case f.seen.Contains(c) && !f.fresh.Contains(c):
		k.attempt = 1
		if !f.got.Contains(c) {
			k.copies = 1
		}
	}
	return k
}

// What is kept of each chunk begins as what follows from the sets.
func TestDetail(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		n := 1 + rng.Uint32N(300)
		f := &Flow{fresh: transfer.NewRangeSet(n), seen: transfer.NewRangeSet(n),
			got: transfer.NewRangeSet(n)}
		for range rng.IntN(20) {
			r := transfer.Range{First: rng.Uint32N(n), Count: 1 + rng.Uint32N(40)}
			r.Count = min(r.Count, n-r.First)
			f.seen.Add(r)
			f.fresh.Add(r)
			r = f.fresh.Take(rng.Uint32N(60))
			r.Count = min(r.Count, rng.Uint32N(60))
			f.got.Add(r)
		}
		want := make([]chunk, n)
		for c := range want {
			want[c] = f.state(uint32(c))
		}
		f.detail()
		for c := range want {
			if f.chunks[c] != want[c] {
				t.Fatalf("chunk %d of %d: %+v, want %+v", c, n, f.chunks[c], want[c])
			}
		}
	}
}

// The first hedge, failure or doubted lane of a transfer of 4 GiB.
func BenchmarkDetail(b *testing.B) {
	const n = 4 << 30 / transfer.ChunkBytes
	f := &Flow{fresh: transfer.NewRangeSet(n), seen: transfer.NewRangeSet(n),
		got: transfer.NewRangeSet(n)}
	f.seen.Add(transfer.Range{Count: n})
	f.got.Add(transfer.Range{Count: n - n/16})
	for b.Loop() {
		f.chunks = nil
		f.detail()
	}
}
