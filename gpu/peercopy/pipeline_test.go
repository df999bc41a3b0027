package peercopy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

type makePipeline func(m *gputest.Machine, minStage, maxStage uint64) (p *Pipeline, src,
	dst *gputest.Device, err error)

// pipelines are one between two GPUs, and one within a GPU, which then is both src and dst.
var pipelines = []struct {
	name string
	make makePipeline
}{
	{"between two", func(m *gputest.Machine, minStage, maxStage uint64) (*Pipeline, *gputest.Device,
		*gputest.Device, error) {
		src, dst := m.Device(), m.Device()
		p, err := NewSized(minStage, maxStage, src, dst)
		return p, src, dst, err
	}},
	{"within one", func(m *gputest.Machine, minStage, maxStage uint64) (*Pipeline, *gputest.Device,
		*gputest.Device, error) {
		dev := m.Device()
		p, err := newWithin(minStage, maxStage, dev)
		return p, dev, dev, err
	}},
}

// TestPeerContent: random moves, scattered and strided, aligned or not, small and large, equal a
// plain copy, and no byte beside them changes.
func TestPeerContent(t *testing.T) {
	for _, c := range pipelines {
		for seed := range uint64(12) {
			t.Run(fmt.Sprint(c.name, ", ", seed), func(t *testing.T) {
				testContent(t, seed, c.make)
			})
		}
	}
}

func testContent(t *testing.T, seed uint64, pipeline makePipeline) {
	rng := rand.New(rand.NewPCG(seed, 1))
	m := gputest.NewMachine()
	p, src, dst, err := pipeline(m, 16<<10, 128<<10)
	if err != nil {
		t.Fatal(err)
	}
	const pool, cell = 8 << 20, 64 << 10 // every move has a cell of its own on both sides
	from, to := m.Alloc(pool), m.Alloc(pool)
	sb, db := m.At(from, pool), m.At(to, pool)
	noise := rand.NewChaCha8([32]byte{byte(seed)})
	noise.Read(sb)
	noise.Read(db)
	for range 3 {
		want := bytes.Clone(db)
		var moves []Move
		a, b := rng.Perm(pool/cell), rng.Perm(pool/cell)
		uniform := rng.IntN(3) == 0
		for i := range 1 + rng.IntN(pool/cell) {
			mv := Move{Src: from + cuda.Ptr(a[i]*cell), Dst: to + cuda.Ptr(b[i]*cell)}
			kind := rng.IntN(3)
			if uniform && rng.IntN(40) > 0 {
				kind = 3
			}
			switch kind {
			case 3: // blocks of one size, as in usual caches
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
			t.Fatalf("%v", err)
		}
		if !bytes.Equal(db, want) {
			t.Fatal("content differs")
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
	if src.Allocated+dst.Allocated != 0 {
		t.Errorf("%d allocations leaked", src.Allocated+dst.Allocated)
	}
}

// TestPeerFails: Run returns the error, and nothing of the pipeline writes afterwards.
func TestPeerFails(t *testing.T) {
	for _, c := range pipelines {
		t.Run(c.name, func(t *testing.T) { testFails(t, c.make) })
	}
}

func testFails(t *testing.T, pipeline makePipeline) {
	m := gputest.NewMachine()
	p, src, _, err := pipeline(m, 16<<10, 64<<10)
	if err != nil {
		t.Fatal(err)
	}
	const n = 1 << 20
	from, to := m.Alloc(n), m.Alloc(n)
	src.FailAfter = 7
	err = p.Run([]Move{{Src: from, Dst: to, SrcStride: 4096, DstStride: 4096, Len: 4096,
		Count: n / 4096}})
	if !errors.Is(err, gputest.ErrBroken) {
		t.Fatalf("Run: %v, want the device's error", err)
	}
	clear(m.At(to, n)) // the race detector sees a late write
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// pattern is n moves of 4 KiB blocks between two regions.
func pattern(rng *rand.Rand, from, to cuda.Ptr, n int) []Move {
	moves := make([]Move, n)
	for i, k := range rng.Perm(n) {
		moves[i] = Move{Src: from + cuda.Ptr(k*4096), Dst: to + cuda.Ptr(k*4096), Len: 4096, Count: 1}
		if k%7 == 0 { // by the link alone
			moves[i].Len = 4090
		}
	}
	return moves
}

// TestPeerRunsOverlap: runs of several callers overlap, and the bytes of each are in place when it
// returns.
func TestPeerRunsOverlap(t *testing.T) {
	for _, c := range pipelines {
		t.Run(c.name, func(t *testing.T) { testRunsOverlap(t, c.make) })
	}
}

func testRunsOverlap(t *testing.T, pipeline makePipeline) {
	m := gputest.NewMachine()
	p, _, _, err := pipeline(m, 16<<10, 64<<10)
	if err != nil {
		t.Fatal(err)
	}
	const callers, rounds, n = Runs + 3, 20, 100
	var wg sync.WaitGroup
	for c := range uint64(callers) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(c, 2))
			noise := rand.NewChaCha8([32]byte{byte(c)})
			from, to := m.Alloc(n*4096), m.Alloc(n*4096)
			sb, db := m.At(from, n*4096), m.At(to, n*4096)
			for range rounds {
				noise.Read(sb)
				clear(db)
				moves := pattern(rng, from, to, n)
				if err := p.Run(moves); err != nil {
					t.Error(err)
					return
				}
				for _, mv := range moves {
					if a, b := sb[mv.Src-from:][:mv.Len], db[mv.Dst-to:][:mv.Len]; !bytes.Equal(a, b) {
						t.Errorf("caller %d: the block at %#x differs", c, mv.Src-from)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// TestPeerIssuesBehindAnother: a run issues its stages before another run has ended. Close waits
// for both.
func TestPeerIssuesBehindAnother(t *testing.T) {
	m := gputest.NewMachine()
	src, dst := m.Device(), m.Device()
	p, err := NewSized(16<<10, 64<<10, src, dst)
	if err != nil {
		t.Fatal(err)
	}
	last := map[device.Event]bool{} // that a run records
	for range Runs {
		e := <-p.free
		last[e.done] = true
		p.free <- e
	}
	issued := make(chan struct{}, 2)
	dst.Recorded = func(e device.Event) {
		if last[e] {
			issued <- struct{}{}
		}
	}
	src.Gate = make(chan struct{}) // nothing is copied before it opens
	from, to := m.Alloc(1<<16), m.Alloc(1<<16)
	ends := make(chan error, 3)
	for i := range cuda.Ptr(2) {
		go func() {
			ends <- p.Run([]Move{{Src: from + i<<15, Dst: to + i<<15, SrcStride: 4096, DstStride: 4096,
				Len: 4096, Count: 8}})
		}()
	}
	for range 2 {
		select {
		case <-issued: // one that waits for the other never does
		case err := <-ends:
			t.Fatalf("a run ended before a byte was copied: %v", err)
		}
	}
	go func() { ends <- p.Close() }()
	select {
	case err := <-ends:
		t.Errorf("something ended before a byte was copied: %v", err)
	default:
	}
	close(src.Gate)
	for range cap(ends) {
		if err := <-ends; err != nil {
			t.Error(err)
		}
	}
}

// TestPeerFailsForAll: an error of the device is returned by every run whose bytes did not arrive.
func TestPeerFailsForAll(t *testing.T) {
	for i := range uint64(60) {
		m, seed := gputest.NewMachine(), i/2
		p, src, _, err := pipelines[i%2].make(m, 16<<10, 64<<10)
		if err != nil {
			t.Fatal(err)
		}
		src.FailAfter = int(3 + seed)
		var wg sync.WaitGroup
		for c := range uint64(4) {
			wg.Go(func() {
				const n = 40
				rng := rand.New(rand.NewPCG(c, seed))
				from, to := m.Alloc(n*4096), m.Alloc(n*4096)
				sb, db := m.At(from, n*4096), m.At(to, n*4096)
				rand.NewChaCha8([32]byte{byte(c)}).Read(sb)
				moves := pattern(rng, from, to, n)
				err := p.Run(moves)
				if err != nil && !errors.Is(err, gputest.ErrBroken) {
					t.Errorf("seed %d: %v", seed, err)
				}
				for _, mv := range moves {
					if err == nil && !bytes.Equal(sb[mv.Src-from:][:mv.Len], db[mv.Dst-to:][:mv.Len]) {
						t.Errorf("seed %d, caller %d: success, and the block at %#x differs", seed, c, mv.Src-from)
						return
					}
				}
				clear(db) // the race detector sees a late write
			})
		}
		wg.Wait()
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}

// BenchmarkFillUniform: the list of single blocks is filled at the rate of the link, without
// allocation.
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

// TestStageRows: pages whose heads and tokens are in different orders on the two sides are one run
// per page on either side, also where a stage ends within a row.
func TestStageRows(t *testing.T) {
	const pages, heads, tokens, size = 9, 8, 16, 64
	var moves []Move
	for page := range cuda.Ptr(pages) {
		from, to := 1<<30+page*page*1<<20, 1<<40+(100-page*page)*1<<20
		for token := range cuda.Ptr(tokens) {
			moves = append(moves, Move{Src: from + token*size, Dst: to + token*heads*size,
				SrcStride: tokens * size, DstStride: size, Len: size, Count: heads})
		}
	}
	// The receiver's rows touch, so that they have equal distances; a row that is alike and lies
	// elsewhere begins another run.
	for _, stage := range []uint64{1 << 20, 5 * heads * size, 5*heads*size + 3*size} {
		var b stageBuffer
		for side := range b.runs {
			b.runs[side] = make([]byte, listBytes)
		}
		b.dense = [2]cuda.Ptr{1 << 50, 1 << 51}
		var got, want [][2]uint64
		for _, m := range moves {
			for k := range m.Count {
				want = append(want, [2]uint64{uint64(m.Src) + k*m.SrcStride, uint64(m.Dst) + k*m.DstStride})
			}
		}
		runs := 0
		for cur := (cursor{}); cur.move < len(moves); {
			n, bytes := b.fillRuns(moves, &cur, stage)
			at := len(got)
			got = append(got, make([][2]uint64, bytes/size)...)
			for side := range n {
				runs += n[side]
				le, piece := binary.LittleEndian, uint32(0)
				for i := range n[side] {
					r, first := b.runs[side][i*device.RunBytes:], b.runs[side][firstAt+i*4:]
					if le.Uint32(first) != piece || le.Uint64(r[24:]) != uint64(b.dense[side])+uint64(
						piece)*size || le.Uint32(r[32:]) != size {
						t.Fatalf("stages of %d: run %d begins with piece %d and not %d, or elsewhere", stage, i,
							le.Uint32(first), piece)
					}
					for ; piece < le.Uint32(first[4:]); piece++ {
						k, row := uint64(piece-le.Uint32(first)), uint64(le.Uint32(r[36:]))
						got[at+int(piece)][side] = le.Uint64(r) + k/row*le.Uint64(r[16:]) + k%row*le.Uint64(r[8:])
					}
				}
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("stages of %d: other pieces than the moves have", stage)
		}
		if stage == 1<<20 && runs != 2*pages {
			t.Errorf("%d runs for %d pages on two sides", runs, pages)
		}
	}
}

// TestMovesAreCut: within a GPU, long pieces are cut, so that no thread block moves more than
// withinPiece at a time, and a stage ends where its size is reached.
func TestMovesAreCut(t *testing.T) {
	moves := []Move{
		{Src: 1 << 30, Dst: 1 << 40, Len: 3*withinPiece + 48, Count: 1},
		{Src: 2 << 30, Dst: 2 << 40, SrcStride: 4096, DstStride: 8192, Len: 2048, Count: 10},
		{Src: 3 << 30, Dst: 3 << 40, SrcStride: 1 << 20, DstStride: 2 << 20, Len: withinPiece + 16,
			Count: 2},
	}
	b := stageBuffer{runs: [2][]byte{make([]byte, listBytes)}}
	var got []Move
	var ends []int
	for cur := (cursor{}); cur.move < len(moves); {
		n, pieces := b.fillMoves(moves, &cur, 3*withinPiece+48+3*2048), uint32(0)
		le := binary.LittleEndian
		for i := range n {
			e := b.runs[0][i*device.MoveBytes:]
			m := Move{Src: cuda.Ptr(le.Uint64(e)), Dst: cuda.Ptr(le.Uint64(e[8:])),
				SrcStride: le.Uint64(e[16:]), DstStride: le.Uint64(e[24:]),
				Len: uint64(le.Uint32(e[32:])), Count: uint64(le.Uint32(e[36:]))}
			if first := le.Uint32(b.runs[0][firstAt+i*4:]); first != pieces {
				t.Errorf("%d pieces before entry %d, want %d", first, i, pieces)
			}
			pieces += uint32(m.Count)
			got = append(got, m)
		}
		if all := le.Uint32(b.runs[0][firstAt+n*4:]); all != pieces {
			t.Errorf("%d pieces in all, want %d", all, pieces)
		}
		ends = append(ends, len(got))
	}
	const part = withinPiece
	want := []Move{
		{Src: 1 << 30, Dst: 1 << 40, SrcStride: part, DstStride: part, Len: part, Count: 3},
		{Src: 1<<30 + 3*part, Dst: 1<<40 + 3*part, Len: 48, Count: 1},
		{Src: 2 << 30, Dst: 2 << 40, SrcStride: 4096, DstStride: 8192, Len: 2048, Count: 3},
		{Src: 2<<30 + 3*4096, Dst: 2<<40 + 3*8192, SrcStride: 4096, DstStride: 8192, Len: 2048, Count: 7},
		{Src: 3 << 30, Dst: 3 << 40, SrcStride: part, DstStride: part, Len: part, Count: 1},
		{Src: 3<<30 + part, Dst: 3<<40 + part, Len: 16, Count: 1},
		{Src: 3<<30 + 1<<20, Dst: 3<<40 + 2<<20, SrcStride: part, DstStride: part, Len: part, Count: 1},
		{Src: 3<<30 + 1<<20 + part, Dst: 3<<40 + 2<<20 + part, Len: 16, Count: 1},
	}
	if !slices.Equal(got, want) || !slices.Equal(ends, []int{3, 8}) {
		t.Errorf("moves %+v, want %+v; stages end at %v", got, want, ends)
	}
}
