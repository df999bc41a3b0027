package stage

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"net"
	"testing"

	"github.com/kvspray/kvspray/internal/cuda"
)

// Random scattered and strided moves, aligned or not, small and large, equal a plain copy; nothing beside them is touched.
func TestPeerContent(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		m := newFakeMachine()
		src, dst := m.device(), m.device()
		p, err := newPeer(16<<10, 128<<10, src, dst)
		if err != nil {
			t.Fatal(err)
		}
		const pool = 8 << 20
		from, to := m.alloc(pool), m.alloc(pool)
		sb, db := m.at(from, pool), m.at(to, pool)
		noise := rand.NewChaCha8([32]byte{byte(seed)})
		noise.Read(sb)
		noise.Read(db)
		for range 3 {
			want := bytes.Clone(db)
			var moves []Move
			const cell = 32 << 10 // every move has a cell of its own on both sides
			a, b := rng.Perm(pool/cell), rng.Perm(pool/cell)
			uniform := rng.IntN(3) == 0
			for i := range 1 + rng.IntN(200) {
				mv := Move{Src: from + cuda.Ptr(a[i]*cell), Dst: to + cuda.Ptr(b[i]*cell)}
				kind := rng.IntN(3)
				if uniform && rng.IntN(40) > 0 {
					kind = 3
				}
				switch kind {
				case 3: // blocks of one size, as most caches are
					mv.Len, mv.Count = 4096, 1
					if rng.IntN(4) == 0 { // some of which happen to lie evenly, in either direction
						mv.Count, mv.SrcStride, mv.DstStride = 3+rng.Uint64N(4), 4096, 4112
						if rng.IntN(2) == 0 {
							mv.Src += cuda.Ptr((mv.Count - 1) * 4096)
							mv.SrcStride = -mv.SrcStride
						}
					}
				case 0: // one block
					mv.Len, mv.Count = 16*(1+rng.Uint64N(cell/16)), 1
				case 1: // strided
					mv.Len, mv.Count = 16*(1+rng.Uint64N(32)), 1+rng.Uint64N(30)
					mv.SrcStride, mv.DstStride = mv.Len+16*rng.Uint64N(16), mv.Len+16*rng.Uint64N(16)
				default: // unaligned
					mv.Len, mv.Count = 1+rng.Uint64N(1000), 1+rng.Uint64N(4)
					mv.SrcStride, mv.DstStride = mv.Len+rng.Uint64N(9), mv.Len+rng.Uint64N(9)
					mv.Src += cuda.Ptr(rng.Uint64N(16))
				}
				for k := range mv.Count {
					s, d := uint64(mv.Src-from)+k*mv.SrcStride, uint64(mv.Dst-to)+k*mv.DstStride
					copy(want[d:d+mv.Len], sb[s:s+mv.Len])
				}
				moves = append(moves, mv)
			}
			if err := p.Run(moves); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if !bytes.Equal(db, want) {
				t.Fatalf("seed %d: content differs", seed)
			}
		}
		if err := p.Run([]Move{{Len: 16}}); err == nil {
			t.Error("a move of no pieces was accepted")
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if err := p.Run(nil); !errors.Is(err, net.ErrClosed) {
			t.Errorf("Run after Close: %v", err)
		}
		if src.allocated+dst.allocated != 0 {
			t.Errorf("%d allocations leaked", src.allocated+dst.allocated)
		}
	}
}

// An error comes back, and nothing of the pipeline writes after it did.
func TestPeerFails(t *testing.T) {
	m := newFakeMachine()
	src, dst := m.device(), m.device()
	p, err := newPeer(16<<10, 64<<10, src, dst)
	if err != nil {
		t.Fatal(err)
	}
	const n = 1 << 20
	from, to := m.alloc(n), m.alloc(n)
	src.failAfter = 7
	err = p.Run([]Move{{Src: from, Dst: to, SrcStride: 4096, DstStride: 4096, Len: 4096, Count: n / 4096}})
	if !errors.Is(err, errFake) {
		t.Fatalf("Run: %v, want the device's error", err)
	}
	clear(m.at(to, n)) // the race detector sees a late write
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// The list of single blocks is filled at the pace of the link; nothing is allocated for it.
func BenchmarkFillUniform(b *testing.B) {
	moves := make([]Move, 32<<10)
	for i := range moves {
		moves[i] = Move{Src: cuda.Ptr(i * 4096), Dst: cuda.Ptr(i * 8192), Len: 2048, Count: 1}
	}
	var buf stageBuffer
	buf.runs[0], buf.runs[1] = make([]byte, listBytes), make([]byte, listBytes)
	b.ReportAllocs()
	for b.Loop() {
		var cur cursor
		if n, _ := buf.fillUniform(moves, &cur, MaxStage); n != len(moves) {
			b.Fatal(n)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(moves)), "ns/block")
}
