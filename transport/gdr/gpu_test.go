package gdr

import (
	"errors"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/sys/verbs/fake"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// gpu is a GPU over host memory, whose driver exports dma-bufs and gives the NIC its addresses
// as a test has it.
type gpu struct {
	*transporttest.Device
	f      *fake.Fabric
	memory []byte

	noExport  bool
	unbacked  bool // the NIC finds nothing behind its dma-bufs
	unordered bool // writes need a flush
	blind     error
	flushErr  atomic.Pointer[error]
	exports   atomic.Int64
	flushes   atomic.Int64
}

const gpuAddr = 0x7f0000002000

var errGPU = errors.New("gpu: no")

func (g *gpu) ExportDMABuf(addr, n uint64) (int, uint64, error) {
	if g.noExport {
		return -1, 0, errGPU
	}
	// any descriptor: the fabric has what is behind it
	fd, err := unix.MemfdCreate("gpu", unix.MFD_CLOEXEC)
	if err != nil {
		return -1, 0, err
	}
	g.f.DMABuf(fd, g.memory)
	if g.unbacked {
		g.f.DMABuf(fd, nil)
	}
	g.exports.Add(1)
	return fd, addr - gpuAddr, nil
}

func (g *gpu) NICWrites() (func() error, error) {
	if g.blind != nil {
		return nil, g.blind
	}
	if !g.unordered {
		return nil, nil
	}
	return func() error {
		g.flushes.Add(1)
		if e := g.flushErr.Load(); e != nil {
			return *e
		}
		return nil
	}, nil
}

// onGPU moves the blocks of a test's memory into a GPU's: the test sees the same bytes from the
// host.
func onGPU(t *testing.T, f *fake.Fabric, m *transporttest.Memory) *gpu {
	t.Helper()
	p, _ := m.Region.Bytes()
	g := &gpu{Device: transporttest.NewDevice(t), f: f, memory: p}
	g.Put(gpuAddr, p)
	r, err := mem.NewDevice(mem.NewID(), mem.DeviceMemory{Device: g, Addr: gpuAddr,
		Size: uint64(len(p)), FD: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Release)
	m.Replace(r)
	return g
}

// TestGPUMemory: memory of GPUs at both ends, which the NIC reaches or not. What it does not reach
// goes through host memory of that end.
func TestGPUMemory(t *testing.T) {
	for name, c := range map[string]struct {
		change   func(f *fake.Fabric, src, dst *gpu)
		gathered bool // at the source
		placed   bool // at the destination
	}{
		"dma-buf": {func(*fake.Fabric, *gpu, *gpu) {}, false, false},
		"dma-buf, and a flush after writes": {func(_ *fake.Fabric, _, dst *gpu) { dst.unordered = true },
			false, false},
		"peermem, since the driver exports nothing": {func(f *fake.Fabric, _, dst *gpu) {
			dst.noExport = true
			f.Peer(gpuAddr, dst.memory)
		}, false, false},
		"peermem, since the NIC takes no dma-buf": {func(f *fake.Fabric, _, dst *gpu) {
			dst.unbacked = true
			f.Peer(gpuAddr, dst.memory)
		}, false, false},
		"neither at the destination": {func(_ *fake.Fabric, _, dst *gpu) { dst.noExport = true },
			false, true},
		"neither at the source": {func(_ *fake.Fabric, src, _ *gpu) { src.noExport = true }, true, false},
		"neither at both ends": {func(_ *fake.Fabric, src, dst *gpu) {
			src.noExport, dst.noExport = true, true
		}, true, true},
		"a flush that is not needed": {func(_ *fake.Fabric, _, dst *gpu) {
			dst.noExport, dst.unordered = true, true
		}, false, true},
		"writes that never show": {func(_ *fake.Fabric, _, dst *gpu) { dst.blind = errGPU }, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			f, p, _, _ := oddPair(t, nil)
			small := transporttest.Shape{Chunks: 8, BlockBytes: 16 << 10, Shuffle: true}
			src, dst := transporttest.NewMemory(t, small), transporttest.NewMemory(t, small)
			src.Write(seedOld)
			from, to := onGPU(t, f, src), onGPU(t, f, dst)
			closeBefore(t, p)
			c.change(f, from, to)
			a, b := p.Dial()
			for _, l := range []*lane{a.(*lane), b.(*lane)} {
				l.dev.keys.part = 64 << 10 // as a device that limits one registration
			}
			bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
			bind.Dest.Seed.Store(seedOld)
			r := p.A.MoveWait(a, bind.Origin, src.All(), 1)
			if r.Outcome != transfer.Landed || !bind.Dest.Full() {
				t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
			}
			if n := to.flushes.Load(); (n > 0) != (to.unordered && !c.placed) {
				t.Errorf("%d flushes", n)
			}
			for _, l := range []*lane{a.(*lane), b.(*lane)} {
				if err := l.failure(); err != nil {
					t.Errorf("a lane ended: %v", err)
				}
			}
			if from.Calls.Load() > 0 != c.gathered || to.Calls.Load() > 0 != c.placed {
				t.Errorf("%d gathers, %d scatters", from.Calls.Load(), to.Calls.Load())
			}
			bind.End(t)
			dst.GapsIntact(t)
		})
	}
}

// TestGPUFlush: bytes that cannot be made visible have not landed, and what is small is not copied
// by the CPU as it is posted.
func TestGPUFlush(t *testing.T) {
	f, p, here, _ := oddPair(t, nil)
	small := transporttest.Shape{Chunks: 2, BlockBytes: 64, Shuffle: true}
	src, dst := transporttest.NewMemory(t, small), transporttest.NewMemory(t, small)
	src.Write(seedOld)
	onGPU(t, f, src)
	to := onGPU(t, f, dst)
	to.unordered = true
	to.flushErr.Store(&errGPU)
	a, _ := p.Dial()
	bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	bind.Dest.Seed.Store(seedOld)
	if r := p.A.MoveWait(a, bind.Origin, src.All(), 1); r.Outcome != transfer.Rejected ||
		r.Reason != transfer.ReasonMemory || bind.Dest.Full() {
		t.Errorf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	to.flushErr.Store(nil)
	if r := p.A.MoveWait(a, bind.Origin, src.All(), 2); r.Outcome != transfer.Landed ||
		!bind.Dest.Full() {
		t.Errorf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	if here.is(func(d *oddDevice) bool { return d.inlined != 0 }) {
		t.Error("the CPU copied bytes of a GPU's")
	}
	bind.End(t)
}
