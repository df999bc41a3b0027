package gpu

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

func TestPackInEngine(t *testing.T) {
	p := gputest.NewPlatform(1)
	g := patient(gputest.Must(newGPUs(p, inEngine()))(t))
	r := rand.New(rand.NewPCG(1, 1))
	e := newFakeEngine(t, p, g, 0, 4<<20)
	e.start(g)
	if !e.opened() {
		t.Fatal("the engine takes no work")
	}
	for i := range 50 {
		if err := e.roundTrip(r, e.scattered(r, 5+r.IntN(200))); err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
	}
	if n := e.done.Load(); n != 100 {
		t.Errorf("%d kernels in the engine for 100 slots", n)
	}
	for i, w := range g.routes(nil) {
		if want := [][2]string{{"gpu0", "host"}, {"host", "gpu0"}}[i]; w.From != want[0] ||
			w.To != want[1] || len(w.Methods) != 1 ||
			w.Methods[0].Method != "engine" || w.Methods[0].Calls != 50 || w.Methods[0].Bytes == 0 ||
			w.Methods[0].Rate <= 0 {
			t.Errorf("what the executors did: %+v", w)
		}
	}
	if n := len(g.routes(nil)); n != 2 {
		t.Errorf("%d ways, want there and back", n)
	}
	var even []mem.Block // strided, backwards too
	for i := range uint64(64) {
		even = append(even, mem.Block{Region: e.region, Off: 2<<20 + i*512, Len: 256},
			mem.Block{Region: e.region, Off: 2<<20 - (i+1)*1024, Len: 64})
	}
	for i := range uint64(64) {
		even = append(even, mem.Block{Region: e.region, Off: 3<<20 - i*4096, Len: 4096})
	}
	if err := e.roundTrip(r, even); err != nil {
		t.Error(err)
	}
	// What kernels do not take, and what has a piece of somebody else.
	if err := e.roundTrip(r, []mem.Block{{Region: e.region, Off: 8, Len: 24}, {Region: e.region,
		Off: 64, Len: 8}}); err != nil {
		t.Error(err)
	}
	h, _ := p.Lend(0, 1<<20, 0)
	other := gputest.Must(g.Import(mem.NewID(), h.Append(nil), -1, 1<<20))(t)
	before := e.done.Load()
	mixed := append(e.scattered(r, 10), mem.Block{Region: other, Off: 0, Len: 64})
	if err := e.region.Device().Gather(make([]byte, 1<<20), mixed); err != nil {
		t.Error(err)
	}
	if e.done.Load() != before {
		t.Error("the engine was asked for blocks of another one")
	}
	other.Release()
	e.detach()
	if e.ended.Load() != 1 {
		t.Errorf("End was called %d times", e.ended.Load())
	}
	before = e.done.Load()
	if err := e.roundTrip(r, e.scattered(r, 50)); err != nil || e.done.Load() != before {
		t.Errorf("after detach: %v, %d kernels", err, e.done.Load()-before)
	}
	e.quit()
	e.region.Release()
	gputest.Must(0, g.Close())(t)
}

// crosswise are pages whose heads and tokens are in another order than the moved one: rows of rows.
func crosswise(r *mem.Region, pages uint64) (blocks []mem.Block) {
	for page := range pages {
		for token := range uint64(16) {
			for head := range uint64(8) {
				blocks = append(blocks, mem.Block{Region: r, Off: page*page*8192 + head*1024 +
					token*64, Len: 64})
			}
		}
	}
	return blocks
}

// TestEngineRows: an engine gets runs of rows if its shim supports them, else single rows.
func TestEngineRows(t *testing.T) {
	for minor, want := range []int32{0, 2 * 5} {
		p := gputest.NewPlatform(1)
		g := patient(gputest.Must(newGPUs(p, inEngine()))(t))
		e := newFakeEngine(t, p, g, 0, 1<<20)
		raw := make([]byte, board.WorkBytes)
		gputest.Must(board.InitWork(raw))(t)
		raw[board.OffWorkHeaderMinor] = byte(minor)
		e.work = gputest.Must(board.ParseWork(raw))(t)
		e.start(g)
		if !e.opened() {
			t.Fatal("the engine takes no work")
		}
		if err := e.roundTrip(rand.New(rand.NewPCG(1, 2)), crosswise(e.region, 5)); err != nil {
			t.Errorf("a shim of minor %d: %v", minor, err)
		}
		if e.done.Load() != 2 || e.grids.Load() != want {
			t.Errorf("a shim of minor %d: %d kernels, %d runs of rows, want 2 and %d", minor, e.done.Load(),
				e.grids.Load(), want)
		}
		e.detach()
		e.quit()
		e.region.Release()
		gputest.Must(0, g.Close())(t)
	}
}

// TestEngineOfManyRegions: regions of layers at equal distances in this process look like one run,
// which they are not in the engine.
func TestEngineOfManyRegions(t *testing.T) {
	p := gputest.NewPlatform(1)
	g := patient(gputest.Must(newGPUs(p, inEngine()))(t))
	e := newFakeEngine(t, p, g, 0, 1<<20)
	all := []*mem.Region{e.region}
	for range 5 {
		h, b := p.Lend(0, 1<<20, 0)
		e.more, e.caches = append(e.more, gputest.Must(g.Import(mem.NewID(), h.Append(nil), -1,
			1<<20))(t)), append(e.caches, b)
	}
	all = append(all, e.more...)
	e.start(g)
	if !e.opened() {
		t.Fatal("the engine takes no work")
	}
	caches := append([][]byte{e.cache}, e.caches...)
	r := rand.New(rand.NewPCG(6, 6))
	for _, layers := range [][]int{{0, 1, 2, 3, 4, 5}, {5, 4, 3, 2, 1, 0}, {0, 0, 0, 1, 2, 3, 3, 3}} {
		var blocks []mem.Block
		var want []byte
		for page := range uint64(8) {
			for i, layer := range layers {
				b := mem.Block{Region: all[layer], Off: (page*8 + uint64(i)) * 4096, Len: 512}
				if layers[0] != layers[1] {
					b.Off = page * 4096
				}
				for k := range b.Len {
					caches[layer][b.Off+k] = byte(r.Uint32())
				}
				blocks = append(blocks, b)
				want = append(want, caches[layer][b.Off:][:b.Len]...)
			}
		}
		before := e.done.Load()
		got := make([]byte, len(want))
		if err := e.region.Device().Gather(got, blocks); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("layers %d: gathered otherwise, %v", layers, err)
		}
		for i := range caches {
			clear(caches[i])
		}
		if err := e.region.Device().Scatter(blocks, got); err != nil {
			t.Fatal(err)
		}
		clear(got)
		if err := e.region.Device().Gather(got, blocks); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("layers %d: scattered otherwise, %v", layers, err)
		}
		if n := e.done.Load() - before; n != 3 {
			t.Errorf("layers %d: %d kernels in the engine for 3 slots", layers, n)
		}
	}
	e.detach()
	e.quit()
	for _, region := range all {
		region.Release()
	}
	gputest.Must(0, g.Close())(t)
}

// TestEngineRevoked: work that an engine does not take in time is done by another method and never
// by the engine, which gets no work for a while.
func TestEngineRevoked(t *testing.T) {
	p := gputest.NewPlatform(1)
	g := gputest.Must(newGPUs(p, inEngine()))(t)
	r := rand.New(rand.NewPCG(2, 2))
	e := newFakeEngine(t, p, g, 0, 1<<20)
	e.start(g)
	e.opened()
	e.mute.Store(true)
	if err := e.roundTrip(r, e.scattered(r, 50)); err != nil {
		t.Fatal(err)
	}
	n := (*e.region.Device().(*GPU).engines.Load())[0]
	if e.done.Load() != 0 || n.ready() {
		t.Errorf("%d kernels, rested: %v", e.done.Load(), !n.ready())
	}
	e.mute.Store(false)
	n.rest.Store(0)
	patient(g)
	if err := e.roundTrip(r, e.scattered(r, 50)); err != nil || e.done.Load() != 2 {
		t.Errorf("awake again: %v, %d kernels", err, e.done.Load())
	}
	e.detach()
	e.quit()
	e.region.Release()
	gputest.Must(0, g.Close())(t)
}

// TestEngineRevokeRaces: an engine takes work while it is revoked, in several slots at once, and
// every byte is right.
func TestEngineRevokeRaces(t *testing.T) {
	p := gputest.NewPlatform(1)
	g := gputest.Must(newGPUs(p, inEngine()))(t)
	e := newFakeEngine(t, p, g, 0, 4<<20)
	draw := rand.New(rand.NewPCG(3, 3)) // of the engine's goroutine
	e.before = func(slot int, _ uint64) bool {
		if slot != openSlot {
			start := time.Now()
			device.Poll(100*time.Microsecond, func() bool {
				return time.Since(start) > time.Duration(
					draw.Int64N(int64(workTimeout)))
			})
		}
		return true
	}
	e.start(g)
	e.opened()
	n := (*e.region.Device().(*GPU).engines.Load())[0]
	var wg sync.WaitGroup
	for k := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(4, uint64(k)))
			var mine []mem.Block // a quarter of the cache
			for i := range 64 {
				mine = append(mine, mem.Block{Region: e.region, Off: uint64(k)<<20 +
					uint64(i)*16384, Len: 4096})
			}
			for range 30 {
				n.rest.Store(0)
				r.Shuffle(len(mine), func(i, j int) { mine[i], mine[j] = mine[j], mine[i] })
				if err := e.roundTrip(r, mine); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if e.done.Load() == 0 {
		t.Error("the engine did nothing")
	}
	e.detach()
	e.quit()
	e.region.Release()
	gputest.Must(0, g.Close())(t)
}

func TestEngineRefuses(t *testing.T) {
	for _, why := range []uint32{board.WorkBad, board.WorkGpu} {
		for _, atOpen := range []bool{true, false} {
			p := gputest.NewPlatform(1)
			g := patient(gputest.Must(newGPUs(p, inEngine()))(t))
			r := rand.New(rand.NewPCG(5, 5))
			e := newFakeEngine(t, p, g, 0, 1<<20)
			asked := 0
			e.before = func(slot int, _ uint64) bool {
				if slot != openSlot || atOpen {
					asked++
					e.refuse = why
				}
				return true
			}
			e.start(g)
			e.opened()
			for range 3 {
				if err := e.roundTrip(r, e.scattered(r, 50)); err != nil {
					t.Error(err)
				}
			}
			e.detach()
			e.quit()
			if asked != 1 || e.done.Load() != 0 {
				t.Errorf("an engine that refuses was asked %d times", asked)
			}
			e.region.Release()
			gputest.Must(0, g.Close())(t)
		}
	}
}

// TestEngineDies: after the death of an engine during a kernel, the copy fails when the exit is
// proved, not before. The buffer is not used again, and other engines go on.
func TestEngineDies(t *testing.T) {
	p := gputest.NewPlatform(1)
	g := patient(gputest.Must(newGPUs(p, inEngine()))(t))
	r := rand.New(rand.NewPCG(6, 6))
	e, other := newFakeEngine(t, p, g, 0, 1<<20), newFakeEngine(t, p, g, 0, 1<<20)
	taken := make(chan struct{}, 1)
	e.before = func(slot int, _ uint64) bool {
		if slot != openSlot {
			taken <- struct{}{}
		}
		return slot == openSlot
	}
	e.start(g)
	other.start(g)
	e.opened()
	u := e.region.Device().(*GPU)
	result := make(chan error, 1)
	blocks := e.scattered(r, 50)
	go func() { result <- u.Gather(make([]byte, 1<<20), blocks) }()
	<-taken
	for range 20 { // long enough for every look
		if err := other.roundTrip(r, other.scattered(r, 50)); err != nil {
			t.Error(err)
		}
	}
	start := time.Now()
	device.Poll(time.Millisecond, func() bool { return time.Since(start) > 3*workExitLook })
	select {
	case err := <-result:
		t.Fatalf("the engine lives, and its slot returned: %v", err)
	default:
	}
	e.detach()
	if e.ended.Load() != 0 {
		t.Error("the board was let go in mid kernel")
	}
	e.exited.Store(true)
	if err := <-result; !errors.Is(err, errEngineGone) || !strings.Contains(err.Error(), "died") {
		t.Errorf("error %v", err)
	}
	if e.ended.Load() != 1 {
		t.Errorf("End was called %d times", e.ended.Load())
	}
	e.quit()
	lent := 0
	for range cap(u.slots) {
		h := <-u.slots
		if h.lent {
			lent++
		} else if h.dense >= u.staging && h.dense < u.staging+cuda.Ptr(u.stagingBytes()) {
			t.Error("the dead engine's buffer is used again")
		}
		u.slots <- h
	}
	if lent != cap(u.slots)-1 {
		t.Errorf("%d of %d slots are lent after one death", lent, cap(u.slots))
	}
	for range 20 { // the slot without a lent buffer, too
		if err := other.roundTrip(r, other.scattered(r, 50)); err != nil {
			t.Error(err)
		}
	}
	other.detach()
	other.quit()
	e.region.Release()
	other.region.Release()
	gputest.Must(0, g.Close())(t)
}

// TestEngineStops: an engine that stops during a kernel holds its slots, and others use the rest.
func TestEngineStops(t *testing.T) {
	p := gputest.NewPlatform(1)
	g := patient(gputest.Must(newGPUs(p, inEngine()))(t))
	r := rand.New(rand.NewPCG(7, 7))
	e, other := newFakeEngine(t, p, g, 0, 1<<20), newFakeEngine(t, p, g, 0, 1<<20)
	resume := make(chan struct{})
	e.before = func(slot int, _ uint64) bool {
		if slot != openSlot {
			<-resume
		}
		return true
	}
	e.start(g)
	other.start(g)
	e.opened()
	var wg sync.WaitGroup
	for range 8 {
		blocks := e.scattered(r, 20)
		wg.Go(func() {
			if err := e.region.Device().Gather(make([]byte, 1<<20), blocks); err != nil {
				t.Error(err)
			}
		})
	}
	for range 20 {
		if err := other.roundTrip(r, other.scattered(r, 50)); err != nil {
			t.Error(err)
		}
	}
	close(resume)
	wg.Wait()
	for _, x := range []*fakeEngine{e, other} {
		x.detach()
		x.quit()
		x.region.Release()
	}
	gputest.Must(0, g.Close())(t)
}

// TestEngineStopsAndWeClose: a sidecar can end beside an engine that has stopped during a kernel.
// Memory that the kernel may touch stays allocated.
func TestEngineStopsAndWeClose(t *testing.T) {
	p := gputest.NewPlatform(1)
	g := patient(gputest.Must(newGPUs(p, inEngine()))(t))
	g.closeTimeout = 50 * time.Millisecond
	e := newFakeEngine(t, p, g, 0, 1<<20)
	taken, resume := make(chan struct{}), make(chan struct{})
	e.before = func(slot int, _ uint64) bool {
		if slot != openSlot {
			close(taken)
			<-resume
		}
		return true
	}
	e.start(g)
	e.opened()
	blocks := e.scattered(rand.New(rand.NewPCG(9, 9)), 20)
	result := make(chan error, 1)
	go func() { result <- e.region.Device().Gather(make([]byte, 1<<20), blocks) }()
	<-taken
	if err := g.Close(); err == nil || !strings.Contains(err.Error(), "1 of 4 gathers") {
		t.Errorf("closed beside a kernel: %v", err)
	}
	u := e.region.Device().(*GPU)
	if p.Machine.At(u.staging, u.stagingBytes()) == nil {
		t.Error("the staging buffer was freed")
	}
	close(resume)
	if err := <-result; err != nil {
		t.Error(err)
	}
	e.detach()
	e.quit()
	e.region.Release()
	for _, d := range p.Devices[0] {
		gputest.Must(0, d.Close())(t)
	}
}

// TestEngineDetachRaces: boards come and go while slots look for one, and none is read after its
// release. The race detector would report it.
func TestEngineDetachRaces(t *testing.T) {
	p := gputest.NewPlatform(1)
	g := gputest.Must(newGPUs(p, inEngine()))(t)
	e := newFakeEngine(t, p, g, 0, 1<<20)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for k := range uint64(3) {
		blocks := e.scattered(rand.New(rand.NewPCG(8, k)), 8)
		wg.Go(func() {
			buf := make([]byte, 1<<16)
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := e.region.Device().Gather(buf, blocks); err != nil {
					t.Error(err)
				}
			}
		})
	}
	gone := make([]byte, board.WorkLists)
	for range 300 {
		memory := make([]byte, board.WorkBytes)
		work := gputest.Must(board.InitWork(memory))(t)
		detach := g.Attach(Engine{Work: work, Regions: []*mem.Region{e.region},
			Exited: func() bool { return false }, Ring: func() {}, End: func() { copy(memory, gone) }})
		start := time.Now() // nothing may pass between slots and us that would order them
		device.Poll(50*time.Microsecond, func() bool { return time.Since(start) > 300*time.Microsecond })
		detach()
	}
	close(stop)
	wg.Wait()
	e.region.Release()
	gputest.Must(0, g.Close())(t)
}

// TestEngineOfNoUse: a board that is of no use is released at once.
func TestEngineOfNoUse(t *testing.T) {
	p := gputest.NewPlatform(1)
	for _, cfg := range []Config{{Slots: 4, Buffers: 1, Method: policy.Pack}, {Slots: 4, Buffers: 1,
		Method: policy.Copy}, {Slots: workSpare, Buffers: 1, Method: policy.InEngine}} {
		g := gputest.Must(newGPUs(p, cfg))(t)
		e := newFakeEngine(t, p, g, 0, 1<<20)
		e.start(g)
		if e.detach != nil || e.ended.Load() != 1 {
			t.Errorf("%+v: attached", cfg)
		}
		e.quit()
		e.region.Release()
		gputest.Must(0, g.Close())(t)
	}
}
