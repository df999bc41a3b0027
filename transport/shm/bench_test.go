package shm

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
)

// BenchmarkRatio alternates moves with the same copies done by as many goroutines without any lane,
// and reports the ratio of the medians: the machine's mood is in both.
func BenchmarkRatio(b *testing.B) {
	for _, each := range []uint64{4 << 10, 16 << 10, 64 << 10, 1 << 20} {
		b.Run(byteName(each), func(b *testing.B) {
			const n = 128 << 20
			p := newPair(b, Config{Workers: 2})
			from, to := newMemory(b, n, each, 1), newMemory(b, n, each, 2)
			from.fill(1)
			b.SetBytes(n)
			var moves, copies []time.Duration
			for i := transfer.Slot(0); b.Loop(); i++ {
				o, g := p.bind(b, i, from, to)
				start := time.Now()
				p.move(b, o, from.space, sliceBytes/transfer.ChunkBytes, p.lane)
				moves = append(moves, time.Since(start))
				g.Revoke()
				start = time.Now()
				plainCopy(from, to, p.dst.b.cfg.Workers)
				copies = append(copies, time.Since(start))
			}
			b.ReportMetric(float64(median(copies))/float64(median(moves)), "of-plain")
			b.ReportMetric(n/median(moves).Seconds()/1e9, "GB/s")
		})
	}
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

func plainCopy(from, to *memory, workers int) {
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := w * len(from.blocks) / workers; i < (w+1)*len(from.blocks)/workers; i++ {
				x, _ := to.blocks[i].Bytes()
				y, _ := from.blocks[i].Bytes()
				mem.Copy(x, y)
			}
		})
	}
	wg.Wait()
}

func BenchmarkRoundTrip4KiB(b *testing.B) {
	p := newPair(b, Config{Workers: 2})
	from, to := newMemory(b, 4096, 4096, 1), newMemory(b, 4096, 4096, 2)
	for i := uint32(0); b.Loop(); i++ {
		o, _ := p.bind(b, transfer.Slot(i), from, to)
		p.move(b, o, from.space, 16, p.lane)
	}
}

func byteName(n uint64) string {
	if n >= 1<<20 {
		return "1MiB"
	}
	return map[uint64]string{4 << 10: "4KiB", 16 << 10: "16KiB", 64 << 10: "64KiB"}[n]
}
