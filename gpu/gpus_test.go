package gpu

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

func small() Config { return Config{Slots: 3, Buffers: 4, PeerStage: 64 << 10} }

// TestGPUsMove: random blocks between host memory, two regions of one GPU and one of another equal
// a plain copy with every method, and no other byte changes.
func TestGPUsMove(t *testing.T) {
	for _, c := range []struct {
		how   policy.CopyMethod
		apart bool
	}{{policy.Auto, false}, {policy.Pack, false}, {policy.Copy, false}, {policy.Auto, true}} {
		t.Run(fmt.Sprintf("%s,apart=%v", c.how, c.apart), func(t *testing.T) {
			p := gputest.NewPlatform(2)
			p.Apart = c.apart
			cfg := small()
			cfg.Method = c.how
			g := gputest.Must(newGPUs(p, cfg))(t)
			const size = 3 << 20
			type place struct {
				r *mem.Region
				b []byte
			}
			var places []place
			for _, gpu := range []int{0, 0, 1} {
				h, b := p.Lend(gpu, size+8192, 4096)
				places = append(places, place{gputest.Must(g.Import(mem.NewID(), h.Append(nil), -1, size))(t),
					b[:size]})
			}
			if pci := places[2].r.Device().(*GPU).PCI(); pci != "0000:1c:00.0" {
				t.Errorf("memory of GPU 1 is at %s, want 0000:1c:00.0", pci)
			}
			host := gputest.Must(mem.NewAnonymous("test", size))(t)
			hb, _ := host.Bytes()
			if c.how == policy.Pack { // and once with the host's memory pinned
				unpin := gputest.Must(g.Pin(hb))(t)
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
			if p.Mapped != 0 {
				t.Errorf("%d imports are left", p.Mapped)
			}
			if err := g.Close(); err != nil {
				t.Error(err)
			}
			for i := range p.Devices {
				for _, d := range p.Devices[i] {
					if d.Allocated != 0 {
						t.Errorf("GPU %d: %d allocations leaked", i, d.Allocated)
					}
				}
			}
		})
	}
}

// TestGPUsRefuse: wrong input of an engine returns an error that names it, maps nothing, and leaves
// other memory usable.
func TestGPUsRefuse(t *testing.T) {
	p := gputest.NewPlatform(2)
	g := gputest.Must(newGPUs(p, small()))(t)
	defer g.Close()
	good, _ := p.Lend(0, 1<<20, 0)
	enc := func(f func(h *device.Handle)) []byte {
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
		{"kind", enc(func(h *device.Handle) { h.Kind = 9 }), -1, 4096, "kind"},
		{"offset beyond the allocation", enc(func(h *device.Handle) { h.Off = 1 << 20 }), -1,
			4096, "offset"},
		{"length beyond the allocation", good.Append(nil), -1, 1<<20 + 1, "register what was allocated"},
		{"offset and length wrap", enc(func(h *device.Handle) { h.Off = 1<<20 - 1 }), -1,
			1<<64 - 1, "offset"},
		{"another host's GPU", enc(func(h *device.Handle) { h.GPU = gputest.UUID(7) }), -1, 4096,
			"NVIDIA_VISIBLE_DEVICES"},
		{"freed or foreign", enc(func(h *device.Handle) { h.IPC[5] ^= 1 }), -1, 4096, "must be alive"},
		{"the same process id in two namespaces", enc(func(h *device.Handle) { h.IPC[5] ^= 1 }), -1,
			4096, "shareProcessNamespace"},
		{"a lie about the allocation", enc(func(h *device.Handle) { h.Alloc = 1 << 30; h.Off = 1 << 20 }),
			-1, 4096, "that has 1048576 bytes"},
		{"descriptor too much", good.Append(nil), 0, 4096, "descriptor"},
		{"descriptor missing", enc(func(h *device.Handle) { h.Kind = device.HandleFD }), -1, 4096,
			"descriptor"},
	} {
		r, err := g.Import(mem.NewID(), c.handle, c.fd, c.size)
		if err == nil {
			r.Release()
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", c.name, err, c.want)
		}
	}
	if p.Mapped != 0 {
		t.Errorf("%d imports are left", p.Mapped)
	}
	p.Broken[1] = true
	bad, _ := p.Lend(1, 1<<20, 0)
	if _, err := g.Import(mem.NewID(), bad.Append(nil), -1, 4096); !errors.Is(err, gputest.ErrBroken) {
		t.Errorf("a GPU that cannot be opened: %v", err)
	}
	r := gputest.Must(g.Import(mem.NewID(), good.Append(nil), -1, 4096))(t)
	if err := r.WriteAt(make([]byte, 4096), 0); err != nil {
		t.Errorf("the other GPU: %v", err)
	}
	r.Release()
}

// TestGPUFalls: a GPU that fails breaks its own copies, and none of another GPU.
func TestGPUFalls(t *testing.T) {
	p := gputest.NewPlatform(2)
	g := gputest.Must(newGPUs(p, small()))(t)
	defer g.Close()
	var r [2]*mem.Region
	for i := range r {
		h, _ := p.Lend(i, 1<<20, 0)
		r[i] = gputest.Must(g.Import(mem.NewID(), h.Append(nil), -1, 1<<20))(t)
		defer r[i].Release()
	}
	for _, d := range p.Devices[0] {
		d.Mu.Lock()
		d.FailAfter = 0
		d.Mu.Unlock()
	}
	buf := make([]byte, 256<<10)
	if err := r[0].ReadAt(buf, 0); !errors.Is(err, gputest.ErrBroken) ||
		!strings.Contains(err.Error(), "GPU 0") {
		t.Errorf("a fallen GPU: %v", err)
	}
	if err := r[1].ReadAt(buf, 0); err != nil {
		t.Errorf("its neighbour: %v", err)
	}
}

// callsOf is the number of calls of a method.
func callsOf(c *policy.Policy, e policy.CopyMethod) uint64 {
	for _, w := range c.State(nil, "", "") {
		for _, x := range w.Methods {
			if x.Method == e.String() {
				return x.Calls
			}
		}
	}
	return 0
}
