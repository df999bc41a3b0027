package chunks

import (
	"math/rand/v2"
	"testing"

	"github.com/kvspray/kvspray/transfer"
)

// The record of each chunk begins as what follows from the sets.
func TestDetail(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		n := 1 + rng.Uint32N(300)
		s := New(n)
		for range rng.IntN(20) {
			r := transfer.Range{First: rng.Uint32N(n), Count: 1 + rng.Uint32N(40)}
			r.Count = min(r.Count, n-r.First)
			s.seen.Add(r)
			s.fresh.Add(r)
			r = s.fresh.Take(rng.Uint32N(60))
			r.Count = min(r.Count, rng.Uint32N(60))
			s.got.Add(r)
		}
		want := make([]Record, n)
		for c := range want {
			want[c], _, _, _ = s.State(uint32(c))
		}
		s.Detail()
		for c := range want {
			if s.records[c] != want[c] {
				t.Fatalf("chunk %d of %d: %+v, want %+v", c, n, s.records[c], want[c])
			}
		}
	}
}

// The first hedge, failure or doubted lane of a transfer of 4 GiB.
func BenchmarkDetail(b *testing.B) {
	const n = 4 << 30 / transfer.ChunkBytes
	s := New(n)
	s.seen.Add(transfer.Range{Count: n})
	s.got.Add(transfer.Range{Count: n - n/16})
	for b.Loop() {
		s.records = nil
		s.Detail()
	}
}
