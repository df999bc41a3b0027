package gpu

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// fakePlatform has GPUs whose UUID is their number, and engines' allocations whose IPC handle is their address.
type fakePlatform struct {
	m       *fakeMachine
	n       int
	apart   bool // no peer access
	mps     MPS  // of its packers
	devices [][]*fakeDevice
	mu      sync.Mutex
	mapped  int
	fail    map[int]bool // GPUs off the bus
}

func newFakePlatform(n int) *fakePlatform {
	return &fakePlatform{m: newFakeMachine(), n: n, devices: make([][]*fakeDevice, n), fail: map[int]bool{}, mps: MPSOff}
}

func uuid(i int) [16]byte { return [16]byte{byte(i + 1)} }

func (p *fakePlatform) UUIDs() (ids [][16]byte, _ error) {
	for i := range p.n {
		ids = append(ids, uuid(i))
	}
	return ids, nil
}

func (p *fakePlatform) CanAccess(int, int) (bool, error) { return !p.apart, nil }

func (p *fakePlatform) Open(i int) (card, error) { return &fakeCard{p, i}, nil }

type fakeCard struct {
	p *fakePlatform
	i int
}

func (c *fakeCard) NewPacker() (Packer, error) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if c.p.fail[c.i] {
		return nil, errFake
	}
	d := c.p.m.device()
	d.mps = c.p.mps
	c.p.devices[c.i] = append(c.p.devices[c.i], d)
	return d, nil
}

func (c *fakeCard) Reach(card) error { return nil }

// Export names an allocation by its address.
func (c *fakeCard) Export(p cuda.Ptr) (h cuda.IPCHandle, err error) {
	binary.LittleEndian.PutUint64(h[:], uint64(p))
	return h, nil
}

func (c *fakeCard) Close() error { return nil }

func (c *fakeCard) PCI() (string, error) { return fmt.Sprintf("0000:%02x:00.0", 0x1b+c.i), nil }

// Register puts b at an address of the fake machine.
func (c *fakeCard) Register(b []byte) (cuda.Ptr, error) {
	p := c.p.m.alloc(1)
	c.p.m.mu.Lock()
	defer c.p.m.mu.Unlock()
	c.p.m.mem[p] = b
	c.p.m.next += cuda.Ptr(len(b))
	return p, nil
}

func (c *fakeCard) Unregister(b []byte) error {
	c.p.m.mu.Lock()
	defer c.p.m.mu.Unlock()
	for p, m := range c.p.m.mem {
		if len(m) > 0 && &m[0] == &b[0] {
			delete(c.p.m.mem, p)
			return nil
		}
	}
	return errors.New("fake: not registered")
}

func (c *fakeCard) Import(h *Handle, _ int) (cuda.Ptr, uint64, error) {
	p := cuda.Ptr(binary.LittleEndian.Uint64(h.IPC[:]))
	c.p.m.mu.Lock()
	b, ok := c.p.m.mem[p]
	c.p.m.mu.Unlock()
	if !ok {
		return 0, 0, errors.New("fake: invalid handle")
	}
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	c.p.mapped++
	return p, uint64(len(b)), nil
}

func (c *fakeCard) Unimport(*Handle, cuda.Ptr, uint64) error {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	c.p.mapped--
	return nil
}

// lend allocates memory of GPU i and returns a part of it as an engine would name it.
func (p *fakePlatform) lend(i int, alloc, off uint64) (Handle, []byte) {
	ptr := p.m.alloc(alloc)
	h := Handle{Kind: HandleIPC, GPU: uuid(i), Off: off, Alloc: alloc}
	binary.LittleEndian.PutUint64(h.IPC[:], uint64(ptr))
	return h, p.m.at(ptr, alloc)[off:]
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(tb testing.TB) T {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
		return v
	}
}

func small() Config { return Config{Hops: 3, Buffers: 4, PeerStage: 64 << 10} }

// Random blocks between host memory, two regions of one GPU and one of another equal a plain copy, whatever the executor, and no
// byte beside them changes.
func TestGPUsMove(t *testing.T) {
	for _, c := range []struct {
		how   Executor
		apart bool
	}{{Auto, false}, {Pack, false}, {Copy, false}, {Auto, true}} {
		t.Run(fmt.Sprintf("%s,apart=%v", c.how, c.apart), func(t *testing.T) {
			p := newFakePlatform(2)
			p.apart = c.apart
			cfg := small()
			cfg.Executor = c.how
			g := must(newGPUs(p, cfg))(t)
			const size = 3 << 20
			type place struct {
				r *mem.Region
				b []byte
			}
			var places []place
			for _, gpu := range []int{0, 0, 1} {
				h, b := p.lend(gpu, size+8192, 4096)
				places = append(places, place{must(g.Import(mem.NewID(), h.Append(nil), -1, size))(t), b[:size]})
			}
			if pci := places[2].r.Device().(*GPU).PCI(); pci != "0000:1c:00.0" {
				t.Errorf("memory of GPU 1 is said to be at %s", pci)
			}
			host := must(mem.NewAnonymous("test", size))(t)
			hb, _ := host.Bytes()
			if c.how == Pack { // and once with the host's memory pinned
				unpin := must(g.Pin(hb))(t)
				defer func() {
					if err := unpin(); err != nil {
						t.Error(err)
					}
				}()
			}
			places = append(places, place{host, hb})
			rng := rand.New(rand.NewPCG(7, uint64(c.how)))
			noise := rand.NewChaCha8([32]byte{byte(c.how)})
			for _, q := range places {
				noise.Read(q.b)
			}
			const cell = 24 << 10
			for range 12 {
				s, d := places[rng.IntN(4)], places[rng.IntN(4)]
				if s.r == d.r {
					continue
				}
				want := bytes.Clone(d.b)
				a, z := rng.Perm(size/cell), rng.Perm(size/cell)
				alike := rng.IntN(2) == 0
				if alike { // one after the other on both sides, in either direction, so that they make runs
					slices.Sort(a)
					slices.Sort(z)
					if rng.IntN(2) == 0 {
						slices.Reverse(z)
					}
				}
				n := 1 + rng.IntN(size/cell)
				var from, to []mem.Block
				var flat []byte
				for i := range n {
					k, shift := uint64(1+rng.IntN(cell-16)), uint64(rng.IntN(16))
					if rng.IntN(3) > 0 || alike && rng.IntN(8) > 0 {
						k, shift = cell&^15, 0
					}
					f := mem.Block{Region: s.r, Off: uint64(a[i]*cell) + shift, Len: k}
					e := mem.Block{Region: d.r, Off: uint64(z[i]*cell) + shift, Len: k}
					from, to = append(from, f), append(to, e)
					copy(want[e.Off:][:k], s.b[f.Off:][:k])
					flat = append(flat, s.b[f.Off:][:k]...)
				}
				if s.r.Device() == nil && d.r.Device() == nil {
					continue
				}
				dev := mem.DeviceOf(from)
				if dev == nil {
					dev = mem.DeviceOf(to)
				}
				if err := dev.Move(to, from); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(d.b, want) {
					t.Fatal("content differs after Move")
				}
				got := make([]byte, len(flat))
				if err := mem.Gather(got, from); err != nil || !bytes.Equal(got, flat) {
					t.Fatalf("Gather: %v, or content differs", err)
				}
				noise.Read(flat)
				if lent := places[0].r.Device().Lend(); lent != nil && len(flat) <= len(lent) {
					copy(lent, flat)
					if err := mem.Scatter(to, lent[:len(flat)]); err != nil {
						t.Fatal(err)
					}
					places[0].r.Device().Return(lent)
				} else if err := mem.Scatter(to, flat); err != nil {
					t.Fatal(err)
				}
				if err := mem.Gather(got, to); err != nil || !bytes.Equal(got, flat) {
					t.Fatalf("Scatter and Gather: %v, or content differs", err)
				}
			}
			for _, q := range places {
				q.r.Release()
			}
			if p.mapped != 0 {
				t.Errorf("%d imports are left", p.mapped)
			}
			if err := g.Close(); err != nil {
				t.Error(err)
			}
			for i := range p.devices {
				for _, d := range p.devices[i] {
					if d.allocated != 0 {
						t.Errorf("GPU %d: %d allocations leaked", i, d.allocated)
					}
				}
			}
		})
	}
}

// What an engine may say wrongly is refused in words, maps nothing, and leaves other memory usable.
func TestGPUsRefuse(t *testing.T) {
	p := newFakePlatform(2)
	g := must(newGPUs(p, small()))(t)
	defer g.Close()
	good, _ := p.lend(0, 1<<20, 0)
	enc := func(f func(h *Handle)) []byte {
		h := good
		f(&h)
		return h.Append(nil)
	}
	for _, c := range []struct {
		name   string
		handle []byte
		fd     int
		size   uint64
		want   string
	}{
		{"short", good.Append(nil)[:50], -1, 4096, "want 104"},
		{"kind", enc(func(h *Handle) { h.Kind = 9 }), -1, 4096, "kind"},
		{"offset beyond the allocation", enc(func(h *Handle) { h.Off = 1 << 20 }), -1, 4096, "offset"},
		{"length beyond the allocation", good.Append(nil), -1, 1<<20 + 1, "register what was allocated"},
		{"offset and length wrap", enc(func(h *Handle) { h.Off = 1<<20 - 1 }), -1, 1<<64 - 1, "offset"},
		{"another host's GPU", enc(func(h *Handle) { h.GPU = uuid(7) }), -1, 4096, "NVIDIA_VISIBLE_DEVICES"},
		{"freed or foreign", enc(func(h *Handle) { h.IPC[5] ^= 1 }), -1, 4096, "must be alive"},
		{"a container with an IPC namespace of its own", enc(func(h *Handle) { h.IPC[5] ^= 1 }), -1, 4096, "one pod, or hostIPC"},
		{"a lie about the allocation", enc(func(h *Handle) { h.Alloc = 1 << 30; h.Off = 1 << 20 }), -1, 4096, "that has 1048576 bytes"},
		{"descriptor too much", good.Append(nil), 0, 4096, "descriptor"},
		{"descriptor missing", enc(func(h *Handle) { h.Kind = HandleFD }), -1, 4096, "descriptor"},
	} {
		r, err := g.Import(mem.NewID(), c.handle, c.fd, c.size)
		if err == nil {
			r.Release()
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want it to say %q", c.name, err, c.want)
		}
	}
	if p.mapped != 0 {
		t.Errorf("%d imports are left", p.mapped)
	}
	p.fail[1] = true
	bad, _ := p.lend(1, 1<<20, 0)
	if _, err := g.Import(mem.NewID(), bad.Append(nil), -1, 4096); !errors.Is(err, errFake) {
		t.Errorf("a GPU that cannot be opened: %v", err)
	}
	r := must(g.Import(mem.NewID(), good.Append(nil), -1, 4096))(t)
	if err := r.WriteAt(make([]byte, 4096), 0); err != nil {
		t.Errorf("the other GPU: %v", err)
	}
	r.Release()
}

// A GPU that falls off the bus fails its own copies, and nothing of another GPU.
func TestGPUFalls(t *testing.T) {
	p := newFakePlatform(2)
	g := must(newGPUs(p, small()))(t)
	defer g.Close()
	var r [2]*mem.Region
	for i := range r {
		h, _ := p.lend(i, 1<<20, 0)
		r[i] = must(g.Import(mem.NewID(), h.Append(nil), -1, 1<<20))(t)
		defer r[i].Release()
	}
	for _, d := range p.devices[0] {
		d.mu.Lock()
		d.failAfter = 0
		d.mu.Unlock()
	}
	buf := make([]byte, 256<<10)
	if err := r[0].ReadAt(buf, 0); !errors.Is(err, errFake) || !strings.Contains(err.Error(), "GPU 0") {
		t.Errorf("a fallen GPU: %v", err)
	}
	if err := r[1].ReadAt(buf, 0); err != nil {
		t.Errorf("its neighbour: %v", err)
	}
}

func TestChooser(t *testing.T) {
	var c chooser
	now := time.Unix(1000, 0)
	// count is how often pack is taken in calls for which the executors take so long.
	count := func(calls int, pack, copy time.Duration) (packs int) {
		for range calls {
			e, _ := c.pick(now, false)
			took := copy
			if e == Pack {
				took = pack
				packs++
			}
			start := now
			now = now.Add(took)
			c.took(e, 1<<20, start, now)
		}
		return packs
	}
	const us = time.Microsecond
	if n := count(10000, 30*us, 90*us); n < 9980 {
		t.Errorf("pack is three times as fast and was taken %d of 10000 times", n)
	}
	count(100, 3000*us, 90*us) // the engine is busy now
	if n := count(10000, 3000*us, 90*us); n > 10 {
		t.Errorf("pack waits for the engine, which pays for each, and was taken %d of 10000 times in a second", n)
	}
	count(25000, 30*us, 90*us) // and idle again: noticed at the next look
	if n := count(1000, 30*us, 90*us); n < 990 {
		t.Errorf("pack is fast again and was taken %d of 1000 times", n)
	}
	c.fixed = Pack
	if e, try := c.pick(now, true); e != Pack || try {
		t.Error("fixed is not")
	}
	for _, name := range []string{"auto", "pack", "copy", "engine"} {
		if e, err := ParseExecutor(name); err != nil || e.String() != name {
			t.Errorf("%s: %s, %v", name, e, err)
		}
	}
	if _, err := ParseExecutor("fast"); err == nil {
		t.Error("an unknown executor was accepted")
	}
}

// An executor that is only tried gets a small part of a batch, and the other one all the rest.
func TestTriedWithLittle(t *testing.T) {
	plat := newFakePlatform(2)
	g := must(newGPUs(plat, Config{Hops: 3, Buffers: 8, PeerStage: 1 << 20}))(t)
	const block, n = 16 << 10, 4 * probeBytes / (16 << 10)
	h0, src := plat.lend(0, n*block, 0)
	h1, dst := plat.lend(1, n*block, 0)
	from := must(g.Import(mem.NewID(), h0.Append(nil), -1, n*block))(t)
	to := must(g.Import(mem.NewID(), h1.Append(nil), -1, n*block))(t)
	rand.NewChaCha8([32]byte{1}).Read(src)
	var a, b []mem.Block
	for _, i := range rand.New(rand.NewPCG(1, 1)).Perm(n) {
		a = append(a, mem.Block{Region: from, Off: uint64(i) * block, Len: block})
		b = append(b, mem.Block{Region: to, Off: uint64(i) * block, Len: block})
	}
	u0, u1 := from.Device().(*GPU), to.Device().(*GPU)
	p := must(g.pair(u0, u1))(t)
	p.idle = nil // as where no probe works
	p.learn.took(Pack, 1<<20, time.Unix(1, 0), time.Unix(1, 1e6))
	crossed := func() (n uint64) { // what went over the link between the two
		for _, d := range plat.devices[0][1:] { // those of the pipelines
			d.mu.Lock()
			n += d.bytes
			d.mu.Unlock()
		}
		return n
	}
	// Copy is unknown, so it is tried; then the first is in favour.
	for _, all := range []bool{false, true} {
		clear(dst)
		before := crossed()
		if err := u1.Move(b, a); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(src, dst) {
			t.Fatal("content differs")
		}
		got := crossed() - before // lists of blocks too
		if most := uint64(n*block) * 21 / 20; all && got < n*block || !all && (got > most-probeBytes || got < n*block-probeBytes-block) {
			t.Errorf("%d bytes crossed the link of %d; all: %v", got, n*block, all)
		}
		p.learn = Decided(map[Executor]float64{Pack: 1, Copy: 2})
	}
	from.Release()
	to.Release()
	if err := g.Close(); err != nil {
		t.Error(err)
	}
}

// Blocks at equal distances, forwards and backwards, go to the kernels as strided runs; what stands between them does not, and every byte
// arrives where it would one by one.
func TestStridedRuns(t *testing.T) {
	p := newFakePlatform(1)
	cfg := small()
	cfg.Executor = Pack
	g := must(newGPUs(p, cfg))(t)
	const size = 1 << 20
	lent, b := p.lend(0, size, 0)
	r := must(g.Import(mem.NewID(), lent.Append(nil), -1, size))(t)
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
	h := <-u.hops
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
	u.hops <- h
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
	must(0, g.Close())(t)
}

// What a mover hands on: pieces at equal distances on both sides as one run, others by themselves, in order and to the last byte.
func TestMoverGathersRuns(t *testing.T) {
	p := newFakePlatform(2)
	g := must(newGPUs(p, small()))(t)
	defer g.Close()
	const size = 4 << 20
	var r [2]*mem.Region
	for i := range r {
		h, _ := p.lend(i, size, 0)
		r[i] = must(g.Import(mem.NewID(), h.Append(nil), -1, size))(t)
		defer r[i].Release()
	}
	rng := rand.New(rand.NewPCG(3, 4))
	var src, dst []mem.Block
	add := func(s, d, n uint64) {
		src, dst = append(src, mem.Block{Region: r[0], Off: s, Len: n}), append(dst, mem.Block{Region: r[1], Off: d, Len: n})
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
	w := mover{gpus: g}
	at := 0
	if err := w.walk(dst, src); err != nil {
		t.Fatal(err)
	}
	for _, m := range w.list {
		for range m.Count {
			want := Move{Src: cuda.Ptr(r[0].Base() + src[at].Off), Dst: cuda.Ptr(r[1].Base() + dst[at].Off), Len: src[at].Len}
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

// still is a platform whose work takes no time: what is left is listing it.
type still struct{ fakePlatform }

type stillCard struct{ fakeCard }

type stillPacker struct{ *fakeDevice }

type stillQueue struct{}

func (p *still) Open(i int) (card, error) { return &stillCard{fakeCard{&p.fakePlatform, i}}, nil }

func (c *stillCard) NewPacker() (Packer, error) { return stillPacker{c.p.m.device()}, nil }

func (stillPacker) NewQueue() (Queue, error)                                   { return stillQueue{}, nil }
func (stillPacker) Pack(Queue, cuda.Ptr, cuda.Ptr, int) error                  { return nil }
func (stillPacker) Unpack(Queue, cuda.Ptr, cuda.Ptr, int) error                { return nil }
func (stillPacker) PackUniform(Queue, cuda.Ptr, int, cuda.Ptr, uint64) error   { return nil }
func (stillPacker) UnpackUniform(Queue, cuda.Ptr, int, cuda.Ptr, uint64) error { return nil }
func (stillQueue) Copy(cuda.Ptr, cuda.Ptr, uint64) error                       { return nil }
func (stillQueue) CopyBatch([]cuda.Ptr, []cuda.Ptr, []uint64) error            { return nil }
func (stillQueue) CopyRows([]cuda.Rows) error                                  { return nil }
func (stillQueue) CopySync(cuda.Ptr, cuda.Ptr, uint64) error                   { return nil }
func (stillQueue) Record(Event) error                                          { return nil }
func (stillQueue) Wait(Event) error                                            { return nil }
func (stillQueue) Sync() error                                                 { return nil }

// BenchmarkMove is what a move between two GPUs costs the CPU beside the driver: 64 MiB in blocks of 16 KiB that lie anywhere, or evenly.
func BenchmarkMove(b *testing.B) {
	for _, even := range []bool{false, true} {
		b.Run(fmt.Sprintf("even=%v", even), func(b *testing.B) {
			p := &still{*newFakePlatform(2)}
			g := must(newGPUs(p, Config{Hops: 1, Buffers: 1, PeerStage: 16 << 20, Executor: Pack}))(b)
			const block, n = 16 << 10, 4096
			var lists [2][]mem.Block
			for i := range lists {
				r, err := mem.NewDevice(mem.NewID(), mem.DeviceMemory{Device: must(g.open(i))(b), Addr: 1 << 40, Size: 4 * n * block, FD: -1})
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

// callsOf is how often an executor moved something.
func callsOf(c *chooser, e Executor) uint64 {
	for _, w := range c.state(nil, "", "") {
		for _, x := range w.Executors {
			if x.Executor == e.String() {
				return x.Calls
			}
		}
	}
	return 0
}

// On idle GPUs kernels move blocks, whatever was learned beside engines, and nothing is learned. Beside
// an engine blocks within one GPU go through host memory, by copy engines alone: its steps would
// wait for the kernels. Between two GPUs the time decides.
func TestKernelsOnIdleGPUs(t *testing.T) {
	for _, c := range []struct {
		name    string
		to      int // the other GPU
		busy    int
		learned map[Executor]float64
		beside  Executor
	}{
		{"within one", 0, 0, map[Executor]float64{Pack: 1, Copy: 2}, Copy},
		{"source busy", 1, 0, map[Executor]float64{Pack: 2, Copy: 1}, Copy},
		{"destination busy", 1, 1, map[Executor]float64{Pack: 2, Copy: 1}, Copy},
		{"kernels are learned", 1, 0, map[Executor]float64{Pack: 1, Copy: 2}, Pack},
	} {
		t.Run(c.name, func(t *testing.T) {
			plat := newFakePlatform(2)
			g := must(newGPUs(plat, Config{Hops: 3, Buffers: 8, PeerStage: 1 << 20}))(t)
			const block, n = 16 << 10, 64
			h0, src := plat.lend(0, n*block, 0)
			h1, dst := plat.lend(c.to, n*block, 0)
			from := must(g.Import(mem.NewID(), h0.Append(nil), -1, n*block))(t)
			to := must(g.Import(mem.NewID(), h1.Append(nil), -1, n*block))(t)
			rand.NewChaCha8([32]byte{2}).Read(src)
			var a, b []mem.Block
			for _, i := range rand.New(rand.NewPCG(2, 2)).Perm(n) {
				a = append(a, mem.Block{Region: from, Off: uint64(i) * block, Len: block})
				b = append(b, mem.Block{Region: to, Off: uint64(i) * block, Len: block})
			}
			both := []*GPU{from.Device().(*GPU), to.Device().(*GPU)}
			busy := must(g.find(uuid(c.busy)))(t)
			p := must(g.pair(both[0], both[1]))(t)
			leave := make(chan struct{})
			busy.door.queue.(*fakeQueue).work <- func() { <-leave } // the engine
			for _, step := range []struct {
				what string
				wait time.Duration
				how  Executor
			}{{"beside an engine", time.Millisecond, c.beside}, {"idle", patience, Pack}} {
				g.knock = step.wait
				p.idle = g.pairProbe(both[0], both[1])
				p.learn = Decided(c.learned) // beside an engine
				if step.wait == patience {
					close(leave)
					for end := time.Now().Add(patience); !busy.idle(patience); runtime.Gosched() {
						if time.Now().After(end) {
							t.Fatal("the engine has left")
						}
					}
				}
				clear(dst)
				if err := both[1].Move(b, a); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(src, dst) {
					t.Errorf("%s: content differs", step.what)
				}
				for _, e := range []Executor{Pack, Copy, InEngine} {
					if moved := callsOf(p.learn, e) > 0; moved != (e == step.how) {
						t.Errorf("%s: %s moved blocks: %v", step.what, e, moved)
					}
				}
				if u := both[0]; c.to == 0 && callsOf(u.in, Pack)+callsOf(u.out, Pack) > 0 {
					t.Errorf("%s: a hop through host memory used a kernel", step.what)
				}
				if step.wait == patience {
					if w := p.learn.state(nil, "", "")[0].Executors[0]; w.Rate != 1e9/c.learned[step.how] {
						t.Errorf("%s: learned %v from it, before %v", step.what, w, c.learned)
					}
				}
			}
			from.Release()
			to.Release()
			if err := g.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// Only where the driver answers that MPS is off does the probe tell that a GPU is idle.
func TestProbesOfPairs(t *testing.T) {
	for _, c := range []struct {
		how    Executor
		mps    MPS
		probes bool
	}{{Auto, MPSOff, true}, {Auto, MPSOn, false}, {Auto, MPSUnknown, false}, {Pack, MPSOff, false}, {Copy, MPSOff, false}} {
		plat := newFakePlatform(2)
		plat.mps = c.mps
		g := must(newGPUs(plat, Config{Executor: c.how, Hops: 3, Buffers: 8, PeerStage: 1 << 20}))(t)
		one, other := must(g.find(uuid(0)))(t), must(g.find(uuid(1)))(t)
		for _, p := range []*pair{must(g.pair(one, one))(t), must(g.pair(one, other))(t)} {
			if (p.idle != nil) != c.probes {
				t.Errorf("%s, MPS %s, within one GPU %v: probed: %v", c.how, c.mps, p.within, p.idle != nil)
			}
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	}
}
