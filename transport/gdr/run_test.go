package gdr

import (
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvspray/kvspray/internal/verbs"
	"github.com/kvspray/kvspray/internal/verbs/fake"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// spansOf makes the spans of runs, one by one.
func spansOf(runs []run) (all []span) {
	for _, r := range runs {
		for range r.count {
			all = append(all, r.span)
			r.addr += r.stride
		}
	}
	return all
}

// randomSpans lie anywhere and evenly, forwards and backwards, with gaps that have landed between them.
func randomSpans(rng *rand.Rand, longest int) (all []span) {
	for range 1 + rng.IntN(12) {
		s := span{addr: 1<<40 + rng.Uint64N(1<<30), len: 1 + uint32(rng.IntN(longest)), key: 1 + uint32(rng.IntN(3))}
		stride := uint64(s.len) + rng.Uint64N(4096)
		switch rng.IntN(4) {
		case 0:
			s.addr, s.key, stride = 0, 0, 0
		case 1:
			stride = -stride
		}
		n := 1
		if rng.IntN(2) == 0 {
			n += rng.IntN(40)
		}
		for range n {
			all = append(all, s)
			s.addr += stride
		}
	}
	return all
}

// A GO names the spans that it was made of, to a peer that knows runs and to one that does not; even ones take two cells.
func TestCellsRoundTrip(t *testing.T) {
	for seed := range uint64(500) {
		rng := rand.New(rand.NewPCG(seed, 7))
		spans := randomSpans(rng, 4096)
		for _, known := range []bool{true, false} {
			b := appendCells(nil, spans, known)
			runs, err := appendRuns(nil, b)
			if err != nil || !slices.Equal(spansOf(runs), spans) {
				t.Fatalf("seed %d, runs %v: %v, or other spans", seed, known, err)
			}
			if !known && len(b) != cellBytes*len(spans) || len(b) > cellBytes*len(spans) {
				t.Fatalf("seed %d, runs %v: %d bytes for %d spans", seed, known, len(b), len(spans))
			}
			if totalRuns(runs) != total(spans) {
				t.Fatalf("seed %d: %d bytes, want %d", seed, totalRuns(runs), total(spans))
			}
		}
	}
	even := make([]span, 2048)
	for i := range even {
		even[i] = span{addr: 1<<40 + uint64(i)*4096, len: 512, key: 9}
	}
	if b := appendCells(nil, even, true); len(b) != 2*cellBytes {
		t.Errorf("%d bytes for spans at equal distances", len(b))
	}
}

// What a GO may not say is refused as it is read.
func TestMalformedCells(t *testing.T) {
	even := appendCells(nil, []span{{1, 16, 3}, {33, 16, 3}, {65, 16, 3}}, true)
	change := func(at int, v uint32) []byte {
		b := slices.Clone(even)
		binary.LittleEndian.PutUint32(b[at:], v)
		return b
	}
	for name, b := range map[string][]byte{
		"cut off":            even[:cellBytes],
		"of one":             change(cellBytes+8, 1),
		"of none":            change(cellBytes+8, 0),
		"reserved bytes":     change(cellBytes+12, 1),
		"no length":          change(8, runFlag),
		"more than may be":   change(cellBytes+8, maxSpans+1),
		"far more":           change(cellBytes+8, math.MaxUint32),
		"more, both of them": append(change(cellBytes+8, maxSpans), even...),
	} {
		if _, err := appendRuns(nil, b); !errors.Is(err, errFrame) {
			t.Errorf("a run %s: %v", name, err)
		}
	}
}

// What is posted covers what the GO names, byte for byte, from the source's spans in their order, whatever room the queue has.
func TestPlanExpandsRuns(t *testing.T) {
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(seed, 8))
		dst := randomSpans(rng, 60)
		runs, err := appendRuns(nil, appendCells(nil, dst, true))
		if err != nil {
			t.Fatal(err)
		}
		s := sending{dst: runs, to: runs[0].span}
		for left := total(dst); left > 0; {
			n := min(left, 1+rng.Uint64N(130))
			s.src = append(s.src, span{addr: 1<<50 + rng.Uint64N(1<<30), len: uint32(n), key: 77})
			left -= n
		}
		type move struct{ from, to uint64 }
		var want, got []move
		k, off := 0, uint32(0)
		for _, d := range dst {
			for i := range d.len {
				if !d.skip() {
					want = append(want, move{s.src[k].addr + uint64(off), d.addr + uint64(i)})
				}
				if off++; off == s.src[k].len {
					k, off = k+1, 0
				}
			}
		}
		s.src = slices.Clone(s.src)
		works := make([]verbs.Work, 1+rng.IntN(30))
		posted := uint64(0)
		for s.di < len(s.dst) {
			n := s.plan(works, posted, 1+rng.Uint64N(50))
			for i, w := range works[:n] {
				if w.ID != posted+uint64(i)+1 || w.Op != verbs.Write || w.LocalKey != 77 || w.RemoteKey == 0 {
					t.Fatalf("seed %d: %+v", seed, w)
				}
				for b := range uint64(w.Len) {
					got = append(got, move{w.LocalAddr + b, w.RemoteAddr + b})
				}
			}
			posted += uint64(n)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("seed %d: %d bytes are written otherwise than %d are named", seed, len(got), len(want))
		}
	}
}

// Even memory arrives, also from and to a sidecar that knows no runs.
func TestEvenMemory(t *testing.T) {
	even := transporttest.Shape{Chunks: 24, BlockBytes: 2 << 10, TailBytes: 4096}
	for _, c := range []struct {
		name     string
		src, dst wire.Versions
	}{{"both know runs", frames, frames}, {"the source is older", wire.Lanes, frames}, {"the destination is older", frames, wire.Lanes}} {
		t.Run(c.name, func(t *testing.T) {
			f := fake.New()
			t.Cleanup(f.Serve())
			next := []wire.Versions{c.src, c.dst}
			p := transporttest.NewPair(t, func(testing.TB) transport.Backend {
				cfg := config(f)
				cfg.versions, next = next[0], next[1:]
				return New(cfg)
			})
			a, b := p.Dial()
			if got := b.(*lane).runs; got != (c.src == c.dst) {
				t.Fatalf("the destination sends runs: %v", got)
			}
			src, dst := transporttest.NewMemory(t, even), transporttest.NewMemory(t, even)
			src.Write(5)
			bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
			bind.Sink.Seed.Store(5)                                               // Landed compares every chunk
			for _, r := range []transfer.Range{{First: 3, Count: 4}, src.All()} { // a part first: the rest finds it landed
				if res := p.A.MoveWait(a, bind.Origin, r, 1); res.Outcome != transfer.Landed {
					t.Fatalf("%s %s: %v", res.Outcome, res.Reason, res.Err)
				}
			}
			if !bind.Sink.Full() {
				t.Fatal("not full")
			}
			bind.End(t)
			dst.GapsIntact(t)
		})
	}
}

// FuzzCells: whatever a receiver sends, what is accepted is bounded, and its spans survive the round trip.
func FuzzCells(f *testing.F) {
	f.Add(appendCells(nil, []span{{1, 16, 3}, {33, 16, 3}, {65, 16, 3}, {0, 5, 0}, {7, 8, 9}}, true))
	f.Add(appendCells(nil, []span{{1 << 63, 16, 3}, {0, 16, 3}, {1 << 63, 16, 3}}, true))
	f.Fuzz(func(t *testing.T, b []byte) {
		runs, err := appendRuns(nil, b)
		if err != nil {
			return
		}
		spans := spansOf(runs)
		if len(spans) > maxSpans || total(spans) != totalRuns(runs) {
			t.Fatalf("%d spans of %d bytes, said to be %d", len(spans), total(spans), totalRuns(runs))
		}
		again, err := appendRuns(nil, appendCells(nil, spans, true))
		if err != nil || !slices.Equal(spansOf(again), spans) {
			t.Fatalf("the spans do not survive the round trip: %v", err)
		}
	})
}
