package gpu

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// apart is up to n pieces of one size, none of which can be joined with its neighbor.
func apart(dst, src *mem.Region, size uint64, n int) (to, from []mem.Block) {
	for off := uint64(0); off+size <= copyBytes && len(to) < n; off += size + device.Align {
		to, from = append(to, mem.Block{Region: dst, Off: off, Len: size}),
			append(from, mem.Block{Region: src, Off: off, Len: size})
	}
	return to, from
}

// little is n random cells of a region on either side, in lengths that kernels can move, all equal
// or random.
func little(rng *rand.Rand, dst, src *mem.Region, n int, alike bool) (to, from []mem.Block) {
	const cell = 4 << 10
	a, z := rng.Perm(copyBytes / cell)[:n], rng.Perm(copyBytes / cell)[:n]
	for i := range n {
		size := uint64(cell - device.Align)
		if !alike {
			size = device.Align * (1 + rng.Uint64N(cell/device.Align-1))
		}
		to = append(to, mem.Block{Region: dst, Off: uint64(z[i] * cell), Len: size})
		from = append(from, mem.Block{Region: src, Off: uint64(a[i] * cell), Len: size})
	}
	return to, from
}

// TestMapped: small pieces arrive between a GPU and pinned memory, whatever their lengths and
// number, and no other byte changes. Several lists run at once, also in a slot without a dense
// buffer.
func TestMapped(t *testing.T) {
	for _, c := range []struct {
		n            int
		alike, empty bool
	}{{n: 1, alike: true}, {n: fewMapped}, {n: fewMapped + 1}, {n: 600, alike: true}, {n: 700},
		{n: 1000, alike: true, empty: true}} {
		for _, dir := range []device.Direction{device.HostToDevice, device.DeviceToHost} {
			t.Run(fmt.Sprintf("%+v, direction %d", c, dir), func(t *testing.T) {
				r := newCopyRig(t, 1)
				u := r.gpu[0].Device().(*GPU)
				if c.empty {
					for range cap(u.slots) {
						h := <-u.slots
						dense := h.dense
						h.dense = 0
						u.slots <- h
						defer func() { h.dense = dense }()
					}
				}
				rng := rand.New(rand.NewPCG(uint64(c.n), uint64(dir)))
				dst, src, db, sb := r.gpu[0], r.host, r.far[0], r.near
				if dir == device.DeviceToHost {
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

// TestMappedObeys: kernels are used on an idle GPU, or where the configuration asks for them. Under
// MPS they are never used; where the driver does not report MPS, only by configuration.
func TestMappedObeys(t *testing.T) {
	for _, c := range []struct {
		executor policy.CopyMethod
		mps      device.MPS
		want     map[string]bool // ways
	}{
		{policy.Auto, device.MPSOff, map[string]bool{PathPacked: true}}, {policy.Pack, device.MPSOff,
			map[string]bool{PathPacked: true}}, {policy.Copy, device.MPSOff,
			map[string]bool{PathStaged: true}},
		{policy.Auto, device.MPSOn,
			map[string]bool{PathStaged: true}}, {policy.Pack, device.MPSOn,
			map[string]bool{PathStaged: true}},
		{policy.Auto, device.MPSUnknown, map[string]bool{PathStaged: true}},
		{policy.Pack, device.MPSUnknown, map[string]bool{PathPacked: true}},
	} {
		t.Run(fmt.Sprintf("%s, MPS %s", c.executor, c.mps), func(t *testing.T) {
			cfg := small()
			cfg.Method = c.executor
			p := gputest.NewPlatform(1)
			p.Mps = c.mps
			r := rigOf(t, &separateContexts{Platform: p}, cfg)
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
			i := slices.IndexFunc(r.c.Routes(), func(w policy.RouteState) bool { return w.From == "pages" })
			if i < 0 || len(r.c.Routes()[i].Methods) != 1 || (r.c.Routes()[i].Methods[0].Method == "pack") !=
				c.want[PathPacked] {
				t.Errorf("ways %+v, want one from pages", r.c.Routes())
			}
			if got := r.c.Reaches(to, from); got != c.want[PathPacked] {
				t.Errorf("Reaches: %v", got)
			}
		})
	}
}

// long is pieces between host memory and a GPU, in different orders on the two sides: more than fit
// one list, and one piece longer than a slot.
func long(m *gputest.Machine, n int) (parts []device.Piece, host, far []byte) {
	const cell = 2 << 10
	rng := rand.New(rand.NewPCG(5, uint64(n)))
	size := uint64(n*cell + SlotBytes + 64<<10)
	at, to := m.Alloc(size), m.Alloc(size)
	order := rng.Perm(n)
	for i, k := range order {
		parts = append(parts, device.Piece{Host: at + cuda.Ptr(i*cell), Dev: to + cuda.Ptr(k*cell),
			Len: device.Align * (1 + rng.Uint64N(cell/device.Align))})
	}
	end := cuda.Ptr(n * cell)
	parts = append(parts, device.Piece{Host: at + end, Dev: to + end, Len: SlotBytes + 32<<10})
	host, far = m.At(at, size), m.At(to, size)
	noise := rand.NewChaCha8([32]byte{byte(n)})
	noise.Read(host)
	noise.Read(far)
	return parts, host, far
}

// TestMappedLong: lists of several slots arrive by kernels and by the copy engine, whether the
// driver accepts rows or not, and no other byte changes.
func TestMappedLong(t *testing.T) {
	const n = 2*mappedPieces + 500
	for _, how := range []policy.CopyMethod{policy.Pack, policy.Copy} {
		for _, dir := range []device.Direction{device.HostToDevice, device.DeviceToHost} {
			for _, noRows := range []bool{false, true} {
				t.Run(fmt.Sprint(how, " ", dir, " ", noRows), func(t *testing.T) {
					r := newCopyRig(t, 1)
					u := r.gpu[0].Device().(*GPU)
					u.dev.(*gputest.Device).NoRows = noRows
					parts, host, far := long(r.p.Machine, n)
					to, from := far, host
					at := func(p *device.Piece) (d, s uint64) {
						return uint64(p.Dev - parts[0].Dev), uint64(p.Host - parts[0].Host)
					}
					d0, s0 := uint64(0), uint64(0)
					for i := range parts { // where the first part lies in its allocation
						if parts[i].Dev < parts[0].Dev {
							d0 = max(d0, uint64(parts[0].Dev-parts[i].Dev))
						}
						if parts[i].Host < parts[0].Host {
							s0 = max(s0, uint64(parts[0].Host-parts[i].Host))
						}
					}
					if dir == device.DeviceToHost {
						to, from = host, far
					}
					want := bytes.Clone(to)
					for i := range parts {
						d, s := at(&parts[i])
						d, s = d+d0, s+s0
						if dir == device.DeviceToHost {
							d, s = s, d
						}
						copy(want[d:][:parts[i].Len], from[s:][:parts[i].Len])
					}
					if err := u.copyMapped(policy.NewIdleProbe(how, nil, nil), dir,
						slices.Clone(parts)); err != nil {
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

// TestMappedFails: a GPU that fails inside a list returns an error, nothing is in flight, and all
// slots are free.
func TestMappedFails(t *testing.T) {
	for _, how := range []policy.CopyMethod{policy.Pack, policy.Copy} {
		r := newCopyRig(t, 1)
		u := r.gpu[0].Device().(*GPU)
		parts, _, _ := long(r.p.Machine, 3*mappedPieces)
		parts[mappedPieces+7].Dev = 1 // not allocated
		if err := u.copyMapped(policy.NewIdleProbe(how, nil, nil), device.HostToDevice,
			parts); err == nil {
			t.Errorf("%s: a copy of unallocated memory succeeded", how)
		}
		if n := len(u.slots); n != cap(u.slots) {
			t.Errorf("%d of %d slots are there", n, cap(u.slots))
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

// BenchmarkMapped is the CPU time of small pieces above the driver.
func BenchmarkMapped(b *testing.B) {
	p := gputest.NewInertPlatform(1)
	g := gputest.Must(newGPUs(p, Config{Slots: 8, Buffers: 1, Method: policy.Pack}))(b)
	shape := fullShape()
	shape.window = 16 << 20
	c := newCopier(g, shape)
	const block, n = 2 << 10, 16 << 10
	far := gputest.Must(mem.NewDevice(mem.NewID(), mem.DeviceMemory{Device: gputest.Must(g.open(0))(b),
		Addr: 1 << 40, Size: 2 * n * block, FD: -1}))(b)
	host := gputest.Must(mem.NewAnonymous("host", 2*n*block))(b)
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
