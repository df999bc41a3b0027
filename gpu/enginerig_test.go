package gpu

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// fakeEngine is a worker with a cache on a GPU, and its shim's thread. It sees the machine's memory
// in the engine's context and, like the shim, accepts only what is in its own regions.
type fakeEngine struct {
	t       testing.TB
	m       *gputest.Machine
	cache   []byte
	region  *mem.Region
	host    *mem.Region   // registered before it
	more    []*mem.Region // and after it
	caches  [][]byte      // of those
	work    *board.Work
	staging cuda.Ptr
	detach  func()

	bell   chan struct{}
	stop   chan struct{}
	wg     sync.WaitGroup
	exited atomic.Bool
	ended  atomic.Int32
	done   atomic.Int32 // kernels
	grids  atomic.Int32 // runs of several rows
	mute   atomic.Bool  // takes nothing

	// before is called for each slot that was taken. False: it is never finished.
	before func(slot int, seq uint64) bool
	refuse uint32
}

func newFakeEngine(t testing.TB, p *gputest.Platform, g *GPUs, gpu int, size uint64) *fakeEngine {
	t.Helper()
	e := &fakeEngine{t: t, m: p.Machine, bell: make(chan struct{}, 1), stop: make(chan struct{})}
	h, b := p.Lend(gpu, size, 0)
	e.cache = b
	e.region = gputest.Must(g.Import(mem.NewID(), h.Append(nil), -1, size))(t)
	e.work = gputest.Must(board.InitWork(make([]byte, board.WorkBytes)))(t)
	return e
}

// start attaches the engine and serves its board.
func (e *fakeEngine) start(g *GPUs) {
	e.wg.Go(e.serve)
	e.host = gputest.Must(mem.NewAnonymous("host", 4096))(e.t)
	e.detach = g.Attach(Engine{Work: e.work, Regions: append([]*mem.Region{e.host, e.region},
		e.more...), Exited: e.exited.Load, End: func() { e.ended.Add(1) }, Ring: func() {
		select {
		case e.bell <- struct{}{}:
		default:
		}
	}})
}

func (e *fakeEngine) quit() {
	close(e.stop)
	e.wg.Wait()
	e.host.Release()
}

func (e *fakeEngine) serve() {
	for {
		e.work.Sleep()
		any := false
		for slot := range board.WorkSlots {
			if e.mute.Load() && slot != openSlot {
				continue
			}
			seq, q, ok := e.work.Take(slot)
			if !ok {
				continue
			}
			any = true
			if e.before != nil && !e.before(slot, seq) {
				continue
			}
			e.work.Finish(slot, seq, e.do(slot, q))
		}
		if any {
			continue
		}
		select {
		case <-e.bell:
		case <-e.stop:
			return
		}
	}
}

func (e *fakeEngine) do(slot int, q board.WorkRequest) uint32 {
	if e.refuse != 0 {
		return e.refuse
	}
	if q.Op == board.WorkOpen {
		h := e.work.Handle(slot)
		for i := range 8 {
			e.staging |= cuda.Ptr(h[i]) << (8 * i)
		}
		if e.m.At(e.staging, q.Bytes) == nil {
			return board.WorkBad
		}
		return 0
	}
	dense := e.m.At(e.staging+cuda.Ptr(q.Dense), q.Bytes)
	for i := 0; i < int(q.Runs); {
		var r board.WorkRun
		if r, i = e.work.Run(slot, i); r.Rows > 1 {
			e.grids.Add(1)
		}
		if r.Region < 1 || r.Region > 1+len(e.caches) {
			return board.WorkBad
		}
		cache := append([][]byte{e.cache}, e.caches...)[r.Region-1]
		for k := range uint64(r.Count) * uint64(r.Rows) {
			at := r.Off + k/uint64(r.Count)*r.Outer + k%uint64(r.Count)*r.Stride
			if at > uint64(len(cache)) || uint64(r.Len) > uint64(len(cache))-at || len(dense) < int(r.Len) {
				return board.WorkBad
			}
			if q.Op == board.WorkPack {
				copy(dense[:r.Len], cache[at:])
			} else {
				copy(cache[at:], dense[:r.Len])
			}
			dense = dense[r.Len:]
		}
	}
	if len(dense) != 0 {
		return board.WorkBad
	}
	e.done.Add(1)
	return 0
}

// scattered is n blocks of random length that do not overlap.
func (e *fakeEngine) scattered(r *rand.Rand, n int) (blocks []mem.Block) {
	for _, i := range r.Perm(len(e.cache) / 4096)[:n] {
		blocks = append(blocks, mem.Block{Region: e.region, Off: uint64(i) * 4096,
			Len: 16 * (1 + r.Uint64N(256))})
	}
	return blocks
}

// roundTrip gathers blocks and scatters them over zeroes.
func (e *fakeEngine) roundTrip(r *rand.Rand, blocks []mem.Block) error {
	var want []byte
	for _, b := range blocks {
		p := e.cache[b.Off:][:b.Len]
		for i := range p {
			p[i] = byte(r.Uint32())
		}
		want = append(want, p...)
	}
	u := e.region.Device().(*GPU)
	got := make([]byte, len(want))
	if err := u.Gather(got, blocks); err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return errors.New("what was gathered differs")
	}
	for _, b := range blocks {
		clear(e.cache[b.Off:][:b.Len])
	}
	if err := u.Scatter(blocks, got); err != nil {
		return err
	}
	for _, b := range blocks {
		if !bytes.Equal(e.cache[b.Off:][:b.Len], want[:b.Len]) {
			return errors.New("what was scattered differs")
		}
		want = want[b.Len:]
	}
	return nil
}

// opened waits until the engine takes work, or refuses it for good.
func (e *fakeEngine) opened() bool {
	n := (*e.region.Device().(*GPU).engines.Load())[0]
	device.Poll(time.Millisecond, func() bool {
		n.ready()
		return n.state.Load() != engineOpening
	})
	return n.state.Load() == engineReady
}

func inEngine() Config {
	return Config{Slots: 4, Buffers: 4, PeerStage: 64 << 10, Method: policy.InEngine}
}

// patient is for tests that do not depend on short timeouts.
func patient(g *GPUs) *GPUs {
	g.workTimeout = time.Minute
	return g
}
