package gpu

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

func (p *separateContexts) Model(i int) string {
	if p.models == nil {
		return ""
	}
	return p.models[i]
}

func (c *contextCard) NewPacker() (device.Packer, error) {
	d, err := c.Card.NewPacker()
	if err != nil || c.p.models == nil {
		return d, err
	}
	return &sizedDevice{d.(*gputest.Device), 8, &c.p.asked}, nil
}

// separateContexts is a Platform on which memory of another process has a different address in the
// context of each GPU, as on real ones. A copy by the wrong address is out of bounds.
type separateContexts struct {
	*gputest.Platform
	noRegister bool          // host memory cannot be locked
	slow       chan struct{} // to lock host memory waits for it; nil: it does not
	slowUnmap  chan struct{} // ... and to unmap an engine's memory
	lends      []lease       // of GPUs
	models     []string
	asked      []int // thread blocks that packers were set to
}

// lease is memory that an engine has lent, and its GPU.
type lease struct {
	at  cuda.Ptr
	n   uint64
	gpu int
}

func (p *separateContexts) lend(i int, alloc, off uint64) (device.Handle, []byte) {
	h, b := p.Platform.Lend(i, alloc, off)
	p.Machine.Mu.Lock()
	defer p.Machine.Mu.Unlock()
	p.lends = append(p.lends, lease{cuda.Ptr(binary.LittleEndian.Uint64(h.IPC[:])), alloc, i})
	return h, b
}

// elsewhere reports whether at is memory of another GPU, by the address that is valid only in its
// own context.
func (p *separateContexts) elsewhere(gpu int, at cuda.Ptr) bool {
	p.Machine.Mu.Lock()
	defer p.Machine.Mu.Unlock()
	return slices.ContainsFunc(p.lends, func(l lease) bool {
		return l.gpu != gpu && at >= l.at &&
			at < l.at+cuda.Ptr(l.n)
	})
}

type contextCard struct {
	*gputest.Card
	p *separateContexts
}

func (p *separateContexts) Open(i int) (device.Card, error) {
	return &contextCard{&gputest.Card{Platform: p.Platform, Index: i}, p}, nil
}

func (c *contextCard) Register(b []byte) (cuda.Ptr, error) {
	if c.p.noRegister {
		return 0, gputest.ErrBroken
	}
	if c.p.slow != nil {
		<-c.p.slow
	}
	return c.Card.Register(b)
}

func (c *contextCard) RegisterReadOnly(b []byte) (cuda.Ptr, error) { return c.Register(b) }

func (c *contextCard) Import(h *device.Handle, fd int) (cuda.Ptr, uint64, error) {
	p, n, err := c.Card.Import(h, fd)
	if err != nil || h.GPU == gputest.UUID(c.Index) {
		return p, n, err
	}
	b := c.p.Machine.At(p, n)
	at := c.p.Machine.Alloc(n)
	c.p.Machine.Mu.Lock()
	defer c.p.Machine.Mu.Unlock()
	c.p.Machine.Mem[at] = b
	return at, n, nil
}

func (c *contextCard) Unimport(h *device.Handle, p cuda.Ptr, n uint64) error {
	if c.p.slowUnmap != nil {
		<-c.p.slowUnmap
	}
	if h.GPU != gputest.UUID(c.Index) {
		c.p.Machine.Mu.Lock()
		delete(c.p.Machine.Mem, p)
		c.p.Machine.Mu.Unlock()
	}
	return c.Card.Unimport(h, p, n)
}

// copyRig is regions of several GPUs and of the host, and a Copier of small shape.
type copyRig struct {
	p    *separateContexts
	g    *GPUs
	c    *Copier
	gpu  []*mem.Region
	far  [][]byte // what is behind gpu
	host *mem.Region
	near []byte
}

const (
	copyBytes = 4<<20 + 4096
	patience  = 20 * time.Second

	rigMin, rigMax = 32 << 10, 256 << 10 // bytes of a chunk
)

func newCopyRig(t *testing.T, gpus int) *copyRig {
	t.Helper()
	return rigOf(t, &separateContexts{Platform: gputest.NewPlatform(gpus)}, small())
}

func rigOf(t *testing.T, p *separateContexts, cfg Config) *copyRig {
	t.Helper()
	r := &copyRig{p: p}
	gpus := p.Count
	r.g = gputest.Must(newGPUs(r.p, cfg))(t)
	r.g.idleLimit = patience
	r.c = newCopier(r.g, copierShape{rigMin, rigMax, 4 * rigMin, 2 * rigMin, 1 << 20, 64 << 10})
	for i := range gpus {
		h, b := r.p.lend(i, copyBytes+8192, 4096)
		r.gpu = append(r.gpu, gputest.Must(r.g.Import(mem.NewID(), h.Append(nil), -1, copyBytes))(t))
		r.far = append(r.far, b[:copyBytes])
	}
	r.host = gputest.Must(mem.NewAnonymous("host", copyBytes))(t)
	r.near, _ = r.host.Bytes()
	noise := rand.NewChaCha8([32]byte{byte(gpus)})
	for _, b := range append(r.far, r.near) {
		noise.Read(b)
	}
	t.Cleanup(func() {
		if err := r.c.Close(); err != nil {
			t.Error(err)
		}
		r.host.Release()
		for _, q := range r.gpu {
			q.Release()
		}
		if err := r.g.Close(); err != nil {
			t.Error(err)
		}
		if r.p.Mapped != 0 {
			t.Errorf("%d imports are left", r.p.Mapped)
		}
		for i := range r.p.Devices {
			for _, d := range r.p.Devices[i] {
				if d.Allocated != 0 {
					t.Errorf("GPU %d: %d allocations leaked", i, d.Allocated)
				}
			}
		}
	})
	return r
}

// threshold makes the paths to a GPU and sets their threshold.
func (r *copyRig) threshold(t *testing.T, gpu int, n uint64) *paths {
	t.Helper()
	p := gputest.Must(r.c.path(r.gpu[gpu].Device().(*GPU)))(t)
	defer p.mu.RUnlock()
	for i, d := range p.m.Devices() {
		at := gpu
		if i > 0 {
			at = p.relays[i-1].index
		}
		d.(*gputest.Device).Foreign = func(x cuda.Ptr) bool { return r.p.elsewhere(at, x) }
	}
	p.m.SetThreshold(n)
	return p
}

// copies is the number of copies of a link's device.
func copies(d *gputest.Device) int {
	d.Mu.Lock()
	defer d.Mu.Unlock()
	return d.Copies
}

// whole is one block of n bytes at off on both sides.
func whole(dst, src *mem.Region, off, n uint64) (to, from []mem.Block) {
	return []mem.Block{{Region: dst, Off: off, Len: n}}, []mem.Block{{Region: src, Off: off, Len: n}}
}

// settle returns when nothing is being prepared.
func (r *copyRig) settle(t *testing.T) {
	t.Helper()
	until(t, "everything wanted is made", func() bool {
		r.c.mu.Lock()
		defer r.c.mu.Unlock()
		return !r.c.preparations.runs
	})
}

// reach calls Reaches until it returns true.
func (r *copyRig) reach(t *testing.T, to, from []mem.Block) {
	t.Helper()
	until(t, "links reach it", func() bool { return r.c.Reaches(to, from) })
	r.settle(t)
}
