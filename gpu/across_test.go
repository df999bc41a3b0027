package gpu

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// apart is n pieces of so many bytes, none of which can be joined with its neighbour, in as much as is there.
func apart(dst, src *mem.Region, size uint64, n int) (to, from []mem.Block) {
	for off := uint64(0); off+size <= copyBytes && len(to) < n; off += size + packAlign {
		to, from = append(to, mem.Block{Region: dst, Off: off, Len: size}), append(from, mem.Block{Region: src, Off: off, Len: size})
	}
	return to, from
}

// little is n random cells of a region on either side, in lengths that kernels take: all alike, or random.
func little(rng *rand.Rand, dst, src *mem.Region, n int, alike bool) (to, from []mem.Block) {
	const cell = 4 << 10
	a, z := rng.Perm(copyBytes / cell)[:n], rng.Perm(copyBytes / cell)[:n]
	for i := range n {
		size := uint64(cell - packAlign)
		if !alike {
			size = packAlign * (1 + rng.Uint64N(cell/packAlign-1))
		}
		to = append(to, mem.Block{Region: dst, Off: uint64(z[i] * cell), Len: size})
		from = append(from, mem.Block{Region: src, Off: uint64(a[i] * cell), Len: size})
	}
	return to, from
}

// TestAcross: small pieces arrive byte by byte between a GPU and pinned memory, whatever their lengths and however many, and nothing else
// is touched. Several lists go at once, and a hop without a dense buffer moves them, too.
func TestAcross(t *testing.T) {
	for _, c := range []struct {
		n            int
		alike, empty bool
	}{{n: 1, alike: true}, {n: fewAcross}, {n: fewAcross + 1}, {n: 600, alike: true}, {n: 700}, {n: 1000, alike: true, empty: true}} {
		for _, dir := range []Direction{HostToDevice, DeviceToHost} {
			t.Run(fmt.Sprintf("%+v, direction %d", c, dir), func(t *testing.T) {
				r := newCopyRig(t, 1)
				u := r.gpu[0].Device().(*GPU)
				if c.empty {
					for range cap(u.hops) {
						h := <-u.hops
						dense := h.dense
						h.dense = 0
						u.hops <- h
						defer func() { h.dense = dense }()
					}
				}
				rng := rand.New(rand.NewPCG(uint64(c.n), uint64(dir)))
				dst, src, db, sb := r.gpu[0], r.host, r.far[0], r.near
				if dir == DeviceToHost {
					dst, src, db, sb = src, dst, sb, db
				}
				want := bytes.Clone(db)
				to, from := little(rng, dst, src, c.n, c.alike)
				for i := range to {
					copy(want[to[i].Off:][:to[i].Len], sb[from[i].Off:])
				}
				r.reach(t, to, from)
				var wg sync.WaitGroup
				for part := range 3 {
					wg.Go(func() {
						var a, b []mem.Block
						for i := part; i < len(to); i += 3 {
							a, b = append(a, to[i]), append(b, from[i])
						}
						if len(a) > 0 {
							if err := r.c.Carry(a, b); err != nil {
								t.Error(err)
							}
						}
					})
				}
				wg.Wait()
				if !bytes.Equal(db, want) {
					t.Fatal("content differs")
				}
				if len(r.c.State()) != 0 {
					t.Error("paths were made, which small pieces do not need")
				}
			})
		}
	}
}

// TestAcrossObeys: kernels have the GPU to themselves, or it is who is told to be. Under MPS nobody can hear whether they have, and no word of a
// configuration makes them take it from an engine; where the driver does not know, a word does.
func TestAcrossObeys(t *testing.T) {
	for _, c := range []struct {
		executor Executor
		mps      MPS
		want     map[string]bool // ways
	}{
		{Auto, MPSOff, map[string]bool{PathPacked: true}}, {Pack, MPSOff, map[string]bool{PathPacked: true}}, {Copy, MPSOff, map[string]bool{PathStaged: true}},
		{InEngine, MPSOff, map[string]bool{PathStaged: true}}, {Auto, MPSOn, map[string]bool{PathStaged: true}}, {Pack, MPSOn, map[string]bool{PathStaged: true}},
		{Auto, MPSUnknown, map[string]bool{PathStaged: true}}, {Pack, MPSUnknown, map[string]bool{PathPacked: true}},
	} {
		t.Run(fmt.Sprintf("%s, MPS %s", c.executor, c.mps), func(t *testing.T) {
			cfg := small()
			cfg.Executor = c.executor
			p := newFakePlatform(1)
			p.mps = c.mps
			r := rigOf(t, &contexts{fakePlatform: p}, cfg)
			to, from := little(rand.New(rand.NewPCG(1, 1)), r.gpu[0], r.host, 64, true)
			seen := map[string]bool{}
			for range 4 {
				path, err := r.c.Copy(to, from)
				if err != nil {
					t.Fatal(err)
				}
				seen[path] = true
			}
			if fmt.Sprint(seen) != fmt.Sprint(c.want) {
				t.Errorf("went the ways %v, want %v", seen, c.want)
			}
			i := slices.IndexFunc(r.c.Ways(), func(w WayState) bool { return w.From == "pages" })
			if i < 0 || len(r.c.Ways()[i].Executors) != 1 || (r.c.Ways()[i].Executors[0].Executor == "pack") != c.want[PathPacked] {
				t.Errorf("ways %+v, want one from pages", r.c.Ways())
			}
			if got := r.c.Reaches(to, from); got != c.want[PathPacked] {
				t.Errorf("lanes are told %v", got)
			}
		})
	}
}

// long is parts between host memory and a GPU of a machine, in an order of their own on either side: more than a hop's list takes, and one that is
// longer than a hop.
func long(m *fakeMachine, n int) (parts []Part, host, far []byte) {
	const cell = 2 << 10
	rng := rand.New(rand.NewPCG(5, uint64(n)))
	size := uint64(n*cell + HopBytes + 64<<10)
	at, to := m.alloc(size), m.alloc(size)
	order := rng.Perm(n)
	for i, k := range order {
		parts = append(parts, Part{Host: at + cuda.Ptr(i*cell), Dev: to + cuda.Ptr(k*cell), Len: packAlign * (1 + rng.Uint64N(cell/packAlign))})
	}
	end := cuda.Ptr(n * cell)
	parts = append(parts, Part{Host: at + end, Dev: to + end, Len: HopBytes + 32<<10})
	host, far = m.at(at, size), m.at(to, size)
	noise := rand.NewChaCha8([32]byte{byte(n)})
	noise.Read(host)
	noise.Read(far)
	return parts, host, far
}

// TestAcrossLong: lists of several hops arrive byte by byte, by kernels and by the copy engine, whether that takes rows or not, and nothing beside them
// is touched.
func TestAcrossLong(t *testing.T) {
	const n = 2*acrossPieces + 500
	for _, how := range []Executor{Pack, Copy} {
		for _, dir := range []Direction{HostToDevice, DeviceToHost} {
			for _, noRows := range []bool{false, true} {
				t.Run(fmt.Sprint(how, " ", dir, " ", noRows), func(t *testing.T) {
					r := newCopyRig(t, 1)
					u := r.gpu[0].Device().(*GPU)
					u.dev.(*fakeDevice).noRows = noRows
					parts, host, far := long(r.p.m, n)
					to, from := far, host
					at := func(p *Part) (d, s uint64) { return uint64(p.Dev - parts[0].Dev), uint64(p.Host - parts[0].Host) }
					d0, s0 := uint64(0), uint64(0)
					for i := range parts { // where the first part lies in its allocation
						if parts[i].Dev < parts[0].Dev {
							d0 = max(d0, uint64(parts[0].Dev-parts[i].Dev))
						}
						if parts[i].Host < parts[0].Host {
							s0 = max(s0, uint64(parts[0].Host-parts[i].Host))
						}
					}
					if dir == DeviceToHost {
						to, from = host, far
					}
					want := bytes.Clone(to)
					for i := range parts {
						d, s := at(&parts[i])
						d, s = d+d0, s+s0
						if dir == DeviceToHost {
							d, s = s, d
						}
						copy(want[d:][:parts[i].Len], from[s:][:parts[i].Len])
					}
					if err := u.across(newKnocker(how, nil, nil), dir, slices.Clone(parts)); err != nil {
						t.Fatal(err)
					}
					if !bytes.Equal(to, want) {
						t.Fatal("content differs")
					}
				})
			}
		}
	}
}

// TestAcrossKnocks: a knock wants nothing that those have who wait for it.
func TestAcrossKnocks(t *testing.T) {
	r := newCopyRig(t, 1)
	u := r.gpu[0].Device().(*GPU)
	k := r.c.knockerOf(u)
	ended := make(chan error, 2*cap(u.hops))
	for range cap(ended) {
		parts, _, _ := long(r.p.m, 2*acrossPieces)
		go func() { ended <- u.across(k, HostToDevice, parts) }()
	}
	for range cap(ended) {
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Fatal("they wait for each other")
		}
	}
}

// TestKnockWaits: beside an engine a knock comes back when the engine leaves a moment. Nobody waits for that, neither lists nor another knock, but the end does.
func TestKnockWaits(t *testing.T) {
	r := newCopyRig(t, 1)
	r.c.shape.idle = time.Millisecond
	u := r.gpu[0].Device().(*GPU)
	q := u.door.queue.(*fakeQueue)
	leave := make(chan struct{})
	q.work <- func() { <-leave } // the engine
	var knocks atomic.Int32
	q.d.recorded = func(e Event) {
		if e == u.door.back {
			knocks.Add(1)
		}
	}
	to, from := little(rand.New(rand.NewPCG(1, 1)), r.gpu[0], r.host, 64, true)
	if path, err := r.c.Copy(to, from); path != PathStaged || err != nil {
		t.Errorf("beside an engine: %s, %v", path, err)
	}
	if u.idle(patience) || knocks.Load() != 1 {
		t.Errorf("%d knocks, and the first one waits", knocks.Load())
	}
	close(leave)
	for end := time.Now().Add(patience); !u.idle(patience); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatal("the engine has left")
		}
	}
	if knocks.Load() != 2 {
		t.Errorf("%d knocks, of which one waited", knocks.Load())
	}
}

// TestKnockLate: who is kept from looking finds a knock back that waited for the engine. That is no word of a free GPU.
func TestKnockLate(t *testing.T) {
	r := newCopyRig(t, 1)
	u := r.gpu[0].Device().(*GPU)
	back := u.door.back.(*fakeEvent)
	if back.late = time.Millisecond; u.idle(back.late) {
		t.Error("back, but not in time")
	}
	if back.late = 0; !u.idle(patience) {
		t.Error("back in time")
	}
}

// TestCloseKnocks: the end of a GPU waits for a knock that the engine keeps waiting, but not for ever, and nobody knocks after it.
func TestCloseKnocks(t *testing.T) {
	p := newFakePlatform(1)
	g := must(newGPUs(p, small()))(t)
	g.closePatience = 50 * time.Millisecond
	h, _ := p.lend(0, 8192, 4096)
	region := must(g.Import(mem.NewID(), h.Append(nil), -1, 4096))(t)
	u := region.Device().(*GPU)
	leave := make(chan struct{})
	u.door.queue.(*fakeQueue).work <- func() { <-leave }
	if u.idle(time.Millisecond) {
		t.Error("beside an engine")
	}
	region.Release()
	if err := g.Close(); err == nil || !strings.Contains(err.Error(), "does nothing") {
		t.Errorf("closed over a kernel that has not run: %v", err)
	}
	close(leave)
	if !u.door.quiet(nil) || u.idle(patience) {
		t.Error("a knock after the end")
	}
	for _, d := range p.devices[0] {
		must(0, d.Close())(t)
	}
}

// TestAcrossFails: a GPU that fails in the middle of a list is an error, with nothing in flight, and the hops are there again.
func TestAcrossFails(t *testing.T) {
	for _, how := range []Executor{Pack, Copy} {
		r := newCopyRig(t, 1)
		u := r.gpu[0].Device().(*GPU)
		parts, _, _ := long(r.p.m, 3*acrossPieces)
		parts[acrossPieces+7].Dev = 1 // nobody's
		if err := u.across(newKnocker(how, nil, nil), HostToDevice, parts); err == nil {
			t.Errorf("%s: what is nobody's memory was copied", how)
		}
		if n := len(u.hops); n != cap(u.hops) {
			t.Errorf("%d of %d hops are there", n, cap(u.hops))
		}
	}
	r := newCopyRig(t, 1)
	to, from := little(rand.New(rand.NewPCG(2, 2)), r.gpu[0], r.host, 900, true)
	r.reach(t, to, from)
	if err := r.c.Forget([]*mem.Region{r.host}); err != nil {
		t.Fatal(err)
	}
	if err := r.c.Carry(to, from); !errors.Is(err, errNotReady) {
		t.Errorf("memory that is not pinned: %v", err)
	}
}

// TestKnocks: lists go by kernels while nobody else computes, which is asked before the first and now and then; while somebody does it is asked
// less and less often. What comes while all are to end waits for that.
func TestKnocks(t *testing.T) {
	at, busy, knocks := time.Unix(1000, 0), false, 0
	waiting := make(chan struct{}, 64) // somebody has looked at the time
	k := newKnocker(Auto, func() time.Time {
		select {
		case waiting <- struct{}{}:
		default:
		}
		return at
	}, func() bool { knocks++; return !busy })
	enter := func() bool { return k.enter() }
	list := func(gap time.Duration) bool {
		at = at.Add(gap)
		ok := enter()
		if ok {
			k.leave()
		}
		return ok
	}
	for range 1000 {
		if !list(100 * time.Microsecond) {
			t.Fatal("nobody else computes")
		}
	}
	if knocks < 90 || knocks > 101 {
		t.Errorf("%d knocks in a tenth of a second, want one a millisecond", knocks)
	}
	busy, knocks = true, 0
	entered := 0
	for range 100000 {
		if list(100 * time.Microsecond) {
			entered++
		}
	}
	if entered > 10 || knocks == 0 || knocks > 12 {
		t.Errorf("beside an engine %d lists went by kernels, and %d times in ten seconds was asked", entered, knocks)
	}
	busy = false
	at = at.Add(knockLast)
	if !list(0) {
		t.Error("the engine is gone")
	}
	// While lists follow each other without a pause all of them end once in knockEvery.
	knocks = 0
	if at = at.Add(knockGood); !enter() {
		t.Fatal("the first one does not enter")
	}
	for range 3 {
		if at = at.Add(knockEvery / 4); !enter() {
			t.Fatal("another one does not enter")
		}
	}
	if knocks != 1 {
		t.Errorf("%d knocks with lists inside", knocks)
	}
	at = at.Add(knockEvery)
	for len(waiting) > 0 {
		<-waiting
	}
	waits := make(chan bool, 1)
	go func() { waits <- enter() }()
	<-waiting
	k.mu.Lock() // it looks with this held, and waits without
	inside := k.inside
	k.mu.Unlock()
	if inside != 4 {
		t.Errorf("%d are inside", inside)
	}
	for range 4 {
		if len(waits) > 0 || knocks != 1 {
			t.Error("it did not wait for those inside")
		}
		k.leave()
	}
	if !<-waits || knocks != 2 {
		t.Errorf("refused, or %d knocks", knocks)
	}
}

// BenchmarkAcross is what small pieces between a GPU and pinned memory cost the CPU beside the driver.
func BenchmarkAcross(b *testing.B) {
	p := &still{*newFakePlatform(1)}
	g := must(newGPUs(p, Config{Hops: 8, Buffers: 1, Executor: Pack}))(b)
	shape := fullShape()
	shape.window = 16 << 20
	c := newCopier(g, shape)
	const block, n = 2 << 10, 16 << 10
	far := must(mem.NewDevice(mem.NewID(), mem.DeviceMemory{Device: must(g.open(0))(b), Addr: 1 << 40, Size: 2 * n * block, FD: -1}))(b)
	host := must(mem.NewAnonymous("host", 2*n*block))(b)
	lists := [2][]mem.Block{}
	for i, r := range []*mem.Region{far, host} {
		for _, at := range rand.New(rand.NewPCG(uint64(i), 1)).Perm(2 * n)[:n] {
			lists[i] = append(lists[i], mem.Block{Region: r, Off: uint64(at) * block, Len: block})
		}
	}
	for _, way := range []struct {
		name string
		move func() error
	}{
		{"copy", func() error { _, err := c.Copy(lists[0], lists[1]); return err }}, // pins
		{"lane", func() error {
			if !c.Reaches(lists[0], lists[1]) {
				return errNotReady
			}
			return c.Carry(lists[0], lists[1])
		}},
	} {
		if err := way.move(); err != nil {
			b.Fatal(err)
		}
		b.Run(way.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := way.move(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/block")
		})
	}
}

// TestPairs: every piece is moved once, in rows that a copy engine takes, and few are left alone where blocks lie anywhere.
func TestPairs(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 3))
	for _, c := range []struct {
		name  string
		n     int
		size  uint64
		space uint64 // of the GPU, over which the pieces lie
		most  int    // alone
	}{{"one", 1, 16 << 10, 1 << 30, 1}, {"two", 2, 16 << 10, 1 << 30, 2}, {"a slice", 64, 16 << 10, 1 << 30, 24}, {"a hop of small ones", 4096, 2 << 10, 1 << 30, 256},
		{"a large cache", 4096, 2 << 10, 8 << 30, 256}, {"large ones", 32, pairBelow, 1 << 30, 32}} {
		t.Run(c.name, func(t *testing.T) {
			var dst, src []cuda.Ptr
			var n []uint64
			for i, at := range rng.Perm(int(c.space / c.size))[:c.n] {
				dst, src = append(dst, 1<<40+cuda.Ptr(uint64(at)*c.size)), append(src, 1<<20+cuda.Ptr(uint64(i)*c.size))
				n = append(n, c.size)
			}
			rows, alone := pairs(nil, nil, dst, src, n)
			got := map[[2]uint64]int{}
			for _, r := range rows {
				if r.Height != 2 || r.Width != c.size || min(r.DstPitch, r.SrcPitch) < r.Width || max(r.DstPitch, r.SrcPitch) > cuda.MaxPitch {
					t.Fatalf("rows %+v", r)
				}
				for k := range r.Height {
					got[[2]uint64{r.Dst + k*r.DstPitch, r.Src + k*r.SrcPitch}]++
				}
			}
			for _, i := range alone {
				got[[2]uint64{uint64(dst[i]), uint64(src[i])}]++
			}
			for i := range dst {
				if got[[2]uint64{uint64(dst[i]), uint64(src[i])}] != 1 {
					t.Fatalf("piece %d is moved %d times", i, got[[2]uint64{uint64(dst[i]), uint64(src[i])}])
				}
			}
			if len(got) != c.n || len(alone) > c.most {
				t.Errorf("%d of %d moved, %d of them alone (at most %d)", len(got), c.n, len(alone), c.most)
			}
			t.Logf("%d alone of %d", len(alone), c.n)
		})
	}
}

func BenchmarkPairs(b *testing.B) {
	var dst, src []cuda.Ptr
	var n []uint64
	for i, at := range rand.New(rand.NewPCG(3, 3)).Perm(1 << 16)[:64] {
		dst, src, n = append(dst, 1<<40+cuda.Ptr(at)<<14), append(src, 1<<20+cuda.Ptr(i)<<14), append(n, 16<<10)
	}
	var rows []cuda.Rows
	var alone []int
	for b.Loop() {
		rows, alone = pairs(rows[:0], alone[:0], dst, src, n)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/64, "ns/block")
}

// TestChooserTogether: what several calls move together is one rate, and their ends, which come in a bunch, are not that many wins.
func TestChooserTogether(t *testing.T) {
	const bytes, each = 1 << 20, 800 * time.Microsecond
	start := time.Unix(1000, 0)
	for _, fixed := range []Executor{Auto, Pack} {
		c := newChooser(fixed, 0)
		c.took(Copy, bytes, start, start.Add(100*time.Microsecond))
		at := start.Add(time.Second)
		for range 40 {
			for i := range 8 {
				c.took(Pack, bytes, at, at.Add(each+time.Duration(i)*time.Microsecond))
			}
			at = at.Add(each + 8*time.Microsecond)
		}
		if per := c.cost[Pack] * bytes; per < float64(each)/16 || per > float64(each)/2 {
			t.Errorf("%s: eight calls that take %s together take %s each", fixed, each, time.Duration(per))
		}
	}
	// In favour is what costs less, whoever is tried: a little less is not enough for kernels, and a little more is for copies.
	for _, x := range []struct {
		best, other Executor
		rate        float64 // of the other one beside the one in favour
		wins        bool
	}{{Copy, Pack, 1.2, false}, {Copy, Pack, 1.3, true}, {Pack, Copy, 0.9, true}, {Pack, Copy, 0.7, false}, {Pack, InEngine, 1.1, true}, {Pack, InEngine, 0.9, false}} {
		c := newChooser(Auto, kernelPrice)
		now := start
		call := func(e Executor, rate float64) {
			from := now
			now = now.Add(time.Duration(float64(100*time.Microsecond) / rate))
			c.took(e, bytes, from, now)
		}
		for _, e := range []Executor{Pack, Copy, InEngine} {
			call(e, map[bool]float64{true: 1, false: 0.1}[e == x.best])
		}
		c.pick(now, true)
		for i := range probeWins {
			if e, _ := c.pick(now, true); c.best != x.best {
				t.Fatalf("%+v: %s is in favour after %d tries, and %s was picked", x, c.best, i, e)
			}
			call(x.other, x.rate)
		}
		if c.pick(now, true); (c.best == x.other) != x.wins {
			t.Errorf("%+v: %s is in favour", x, c.best)
		}
	}
}
