package gpu

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/gpu/peercopy"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// TestStridedRuns: blocks at equal distances, forwards and backwards, are listed as strided runs,
// other blocks are not, and all bytes are where single copies would put them.
func TestStridedRuns(t *testing.T) {
	p := gputest.NewPlatform(1)
	cfg := small()
	cfg.Method = policy.Pack
	g := gputest.Must(newGPUs(p, cfg))(t)
	const size = 1 << 20
	lent, b := p.Lend(0, size, 0)
	r := gputest.Must(g.Import(mem.NewID(), lent.Append(nil), -1, size))(t)
	u := r.Device().(*GPU)
	rand.NewChaCha8([32]byte{5}).Read(b)
	var blocks []mem.Block
	add := func(off, n uint64) { blocks = append(blocks, mem.Block{Region: r, Off: off, Len: n}) }
	runs := 0
	for i := range uint64(100) { // every other cell of 256 bytes
		add(i*512, 256)
	}
	runs++
	add(600000, 48)
	add(600000-16384, 48) // two are no run
	runs += 2
	for i := range uint64(100) { // backwards, as long as the ones after them
		add(900000&^15-i*1024, 512)
	}
	runs++
	for i := range uint64(50) {
		add(700000&^15+i*512, 512) // one after the other
	}
	runs++
	for i := range uint64(16) { // heads of tokens, in the order of tokens of heads
		for k := range uint64(8) {
			add(300000&^15+i*64+k*2048, 64)
		}
	}
	runs++
	for i := range uint64(8) { // rows backwards, and their pieces forwards
		for k := range uint64(5) {
			add(500000&^15-i*4096+k*32, 16)
		}
	}
	runs++
	h := <-u.slots
	h.pieces = h.pieces[:0]
	var want []byte
	for _, x := range blocks {
		h.pieces = append(h.pieces, mem.Block{Off: r.Base() + x.Off, Len: x.Len})
		want = append(want, b[x.Off:][:x.Len]...)
	}
	if got := h.runs(runs); got != runs {
		t.Errorf("%d runs for %d blocks: want %d", got, len(blocks), runs)
	}
	if got := h.runs(runs - 1); got != 0 {
		t.Errorf("%d runs where %d are too many", got, runs)
	}
	u.slots <- h
	got := make([]byte, len(want))
	if err := u.Gather(got, blocks); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("what was gathered differs")
	}
	clear(b)
	if err := u.Scatter(blocks, got); err != nil {
		t.Fatal(err)
	}
	for i, x := range blocks {
		if !bytes.Equal(b[x.Off:][:x.Len], want[:x.Len]) {
			t.Fatalf("block %d differs where it was scattered to", i)
		}
		want = want[x.Len:]
	}
	r.Release()
	gputest.Must(0, g.Close())(t)
}

// TestBatcherGathersRuns: pieces at equal distances on both sides are one run, others are single,
// in order and without loss.
func TestBatcherGathersRuns(t *testing.T) {
	p := gputest.NewPlatform(2)
	g := gputest.Must(newGPUs(p, small()))(t)
	defer g.Close()
	const size = 4 << 20
	var r [2]*mem.Region
	for i := range r {
		h, _ := p.Lend(i, size, 0)
		r[i] = gputest.Must(g.Import(mem.NewID(), h.Append(nil), -1, size))(t)
		defer r[i].Release()
	}
	rng := rand.New(rand.NewPCG(3, 4))
	var src, dst []mem.Block
	add := func(s, d, n uint64) {
		src, dst = append(src, mem.Block{Region: r[0], Off: s, Len: n}),
			append(dst, mem.Block{Region: r[1], Off: d, Len: n})
	}
	for i := range uint64(512) { // heads outside to tokens outside
		add(i*4096, i*1024, 512)
	}
	for i := range uint64(100) { // from the end to the start
		add(size-(i+1)*2048, 1<<20+i*2048, 2048)
	}
	for range 200 {
		add(rng.Uint64N(size/16-256)*16, rng.Uint64N(size/16-256)*16, 2048)
	}
	add(0, 0, 512<<10)
	add(512<<10, 512<<10, 512<<10)
	add(1<<20, 1<<20, 512<<10) // large ones go by themselves
	w := batcher{gpus: g}
	at := 0
	if err := w.walk(dst, src); err != nil {
		t.Fatal(err)
	}
	for _, m := range w.list {
		for range m.Count {
			want := peercopy.Move{Src: cuda.Ptr(r[0].Base() + src[at].Off), Dst: cuda.Ptr(r[1].Base() +
				dst[at].Off), Len: src[at].Len}
			if m.Src != want.Src || m.Dst != want.Dst || m.Len != want.Len {
				t.Fatalf("piece %d is %+v, want %+v", at, m, want)
			}
			m.Src, m.Dst = m.Src+cuda.Ptr(m.SrcStride), m.Dst+cuda.Ptr(m.DstStride)
			at++
		}
	}
	if at != len(src) || len(w.list) != 1+1+200+3 {
		t.Errorf("%d pieces in %d moves: want %d in 205", at, len(w.list), len(src))
	}
}

// BenchmarkMove is the CPU time of a move between two GPUs above the driver: 64 MiB in blocks of 16
// KiB, scattered or at equal distances.
func BenchmarkMove(b *testing.B) {
	for _, even := range []bool{false, true} {
		b.Run(fmt.Sprintf("even=%v", even), func(b *testing.B) {
			p := gputest.NewInertPlatform(2)
			g := gputest.Must(newGPUs(p, Config{Slots: 1, Buffers: 1, PeerStage: 16 << 20,
				Method: policy.Pack}))(b)
			const block, n = 16 << 10, 4096
			var lists [2][]mem.Block
			for i := range lists {
				r, err := mem.NewDevice(mem.NewID(), mem.DeviceMemory{Device: gputest.Must(g.open(i))(b),
					Addr: 1 << 40, Size: 4 * n * block, FD: -1})
				if err != nil {
					b.Fatal(err)
				}
				for k, at := range rand.New(rand.NewPCG(uint64(i), 1)).Perm(4 * n)[:n] {
					if even {
						at = k * 2
					}
					lists[i] = append(lists[i], mem.Block{Region: r, Off: uint64(at) * block, Len: block})
				}
			}
			dev := mem.DeviceOf(lists[0])
			b.ReportAllocs()
			for b.Loop() {
				if err := dev.Move(lists[1], lists[0]); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/block")
		})
	}
}
