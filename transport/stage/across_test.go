package stage

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/cuda"
	"github.com/kvspray/kvspray/internal/mem"
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

// TestAcrossObeys: kernels have the GPU to themselves, or it is who is told to be.
func TestAcrossObeys(t *testing.T) {
	for _, c := range []struct {
		executor Executor
		want     map[string]bool // ways
	}{{Auto, map[string]bool{PathPacked: true}}, {Pack, map[string]bool{PathPacked: true}}, {Copy, map[string]bool{PathStaged: true}},
		{InEngine, map[string]bool{PathStaged: true}}} {
		t.Run(c.executor.String(), func(t *testing.T) {
			cfg := small()
			cfg.Executor = c.executor
			r := rigOf(t, &contexts{fakePlatform: newFakePlatform(1)}, cfg)
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

// TestAcrossFails: a GPU that fails is an error, with nothing in flight, and the hops are there again.
func TestAcrossFails(t *testing.T) {
	r := newCopyRig(t, 1)
	u := r.gpu[0].Device().(*GPU)
	to, from := little(rand.New(rand.NewPCG(2, 2)), r.gpu[0], r.host, 900, true)
	r.reach(t, to, from)
	parts := make([]Part, 0, len(to))
	for i := range to {
		parts = append(parts, Part{Host: 1, Dev: 1, Len: to[i].Len}) // nobody's
	}
	if err := u.across(Pack, HostToDevice, parts); err == nil {
		t.Error("what is nobody's memory was copied")
	}
	if n := len(u.hops); n != cap(u.hops) {
		t.Errorf("%d of %d hops are there", n, cap(u.hops))
	}
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
	k := newKnocker(Auto)
	at, busy, knocks := time.Unix(1000, 0), false, 0
	now := func() time.Time { return at }
	enter := func() bool { return k.enter(now, func() bool { knocks++; return !busy }) }
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
	waits := make(chan bool)
	go func() { waits <- enter() }()
	for range 4 {
		select {
		case <-waits:
			t.Error("it did not wait for those inside")
		default:
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
	for name, move := range map[string]func() error{
		"copy": func() error { _, err := c.Copy(lists[0], lists[1]); return err },
		"lane": func() error {
			if !c.Reaches(lists[0], lists[1]) {
				return errNotReady
			}
			return c.Carry(lists[0], lists[1])
		},
	} {
		if err := move(); err != nil { // pins
			b.Fatal(err)
		}
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := move(); err != nil {
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
