package transporttest

import (
	"fmt"
	"runtime"
	"strconv"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

func yield() { runtime.Gosched() }

// wrapped is a full slot of chunks over a smaller memory, so that a benchmark never lands a chunk
// twice.
type wrapped struct{ *Memory }

func (w wrapped) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	n := w.Chunks()
	for c := r.First; c < r.End(); c++ {
		dst = append(dst, w.blocks[c%n]...)
	}
	return dst, nil
}

func (w wrapped) Bytes(r transfer.Range) (b uint64, err error) {
	n := w.Chunks()
	for c := r.First; c < r.End(); c++ {
		b += w.length[c%n]
	}
	return b, nil
}

// Mover pushes slices through one lane with a window. For benchmarks and allocation tests.
type Mover struct {
	tb       testing.TB
	pair     *Pair
	lane     transport.Lane
	src, dst wrapped
	bind     *Bind
	gen      transfer.Gen
	next     uint32
	batch    []transport.Slice
	done     chan transfer.Outcome
}

// NewMover opens a lane of a fresh pair over memory of shape s.
func NewMover(tb testing.TB, f Factory, s Shape) *Mover {
	tb.Helper()
	m := &Mover{tb: tb, pair: NewPair(tb, f), src: wrapped{NewMemory(tb, s)},
		dst:   wrapped{NewMemory(tb, s)},
		batch: make([]transport.Slice, 1), done: make(chan transfer.Outcome, 1024)}
	m.pair.A.direct = func(res []transport.Result) {
		for i := range res {
			m.done <- res[i].Outcome
		}
	}
	m.src.Write(1)
	m.lane, _ = m.pair.Dial()
	m.rebind()
	return m
}

func (m *Mover) rebind() {
	if m.bind != nil {
		m.bind.End(m.tb)
	}
	m.gen++
	m.next = 0
	m.bind = NewBind(m.tb, m.pair.A, m.pair.B, m.src.Memory, m.dst.Memory, 1, m.gen)
	m.pair.B.mu.Lock() // which guards the lookup by lanes
	m.bind.Grant.Memory = m.dst
	m.bind.Grant.Landed = func(transport.Lane, transfer.Range, uint32) {}
	m.bind.Grant.Receipt.Reset(transfer.MaxSlotChunks)
	m.pair.B.mu.Unlock()
	m.pair.A.mu.Lock()
	m.bind.Origin.Memory = m.src
	m.pair.A.mu.Unlock()
}

// Move moves `slices` slices of `chunks` chunks with a window and waits for all of them.
func (m *Mover) Move(slices int, chunks uint32, window int) {
	if err := m.Try(slices, chunks, window); err != nil {
		m.tb.Fatal(err)
	}
}

// Try is Move for a lane that may be lost: after an error the mover is unusable.
func (m *Mover) Try(slices int, chunks uint32, window int) error {
	open := 0
	for i := 0; i < slices || open > 0; {
		if i < slices && open < window {
			if m.next+chunks > transfer.MaxSlotChunks {
				if open > 0 {
					if err := m.wait(); err != nil {
						return err
					}
					open--
					continue
				}
				m.rebind()
			}
			m.batch[0] = transport.Slice{Origin: m.bind.Origin, Range: transfer.Range{First: m.next,
				Count: chunks}, Attempt: 1}
			m.next += chunks
			if err := m.lane.Move(m.batch); err != nil {
				return err
			}
			i++
			open++
			continue
		}
		if err := m.wait(); err != nil {
			return err
		}
		open--
	}
	return nil
}

func (m *Mover) wait() error {
	if o := <-m.done; o != transfer.Landed {
		return fmt.Errorf("a slice ended %s", o)
	}
	return nil
}

// LetsCollectorIn fails the test if a lane at full speed, with slices of chunks, delays the garbage
// collector. See testutil.LetsCollectorIn.
func (m *Mover) LetsCollectorIn(chunks uint32) {
	m.tb.Helper()
	testutil.LetsCollectorInWhile(m.tb, func() { m.Move(16, chunks, 4) })
}

// Benchmark measures one lane in one process: the latency of one small slice, and throughput with a
// window of slices.
func Benchmark(b *testing.B, f Factory) {
	b.Run("latency/4KiB", func(b *testing.B) {
		m := NewMover(b, f, Shape{Chunks: 64, BlockBytes: 4 << 10})
		for c := range m.src.length { // one block a chunk
			for _, w := range []wrapped{m.src, m.dst} {
				w.length[c], w.blocks[c] = 4<<10, w.blocks[c][:1]
			}
		}
		b.ReportAllocs()
		for b.Loop() {
			m.Move(1, 1, 1)
		}
	})
	for _, block := range []int{4 << 10, 16 << 10, 64 << 10} {
		b.Run("stream/"+strconv.Itoa(block>>10)+"KiB", func(b *testing.B) {
			m := NewMover(b, f, Shape{Chunks: 1024, BlockBytes: block, Shuffle: true})
			slice := m.pair.A.Backend.Caps().SliceBytes
			b.SetBytes(64 << 20)
			b.ReportAllocs()
			for b.Loop() {
				m.Move((64<<20)/slice, uint32(slice/transfer.ChunkBytes), min(4, m.lane.MaxInFlight()))
			}
		})
	}
}
