package transporttest

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
)

// Device is a mem.Device over host memory: memory that a backend may reach only through it stays
// visible to the test. It lends few buffers, yields in the middle of copies, and counts lent
// buffers.
type Device struct {
	mu     sync.Mutex
	memory map[uint64][]byte // by address
	next   uint64

	lent  chan []byte
	Fail  atomic.Bool  // every call fails
	Calls atomic.Int64 // gathers, scatters and moves
}

const (
	deviceBuffers     = 8
	deviceBufferBytes = 1 << 20
	yieldEvery        = 16 // blocks
)

// NewDevice makes a device without memory. At the end of the test every lent buffer must be back.
func NewDevice(tb testing.TB) *Device {
	d := &Device{memory: map[uint64][]byte{}, next: 1 << 32, lent: make(chan []byte, deviceBuffers)}
	for range deviceBuffers {
		d.lent <- make([]byte, deviceBufferBytes)
	}
	tb.Cleanup(func() {
		if n := deviceBuffers - len(d.lent); n != 0 {
			tb.Errorf("%d buffers of the device were not returned", n)
		}
	})
	return d
}

// Region makes a region of the device over b.
func (d *Device) Region(b []byte) (*mem.Region, error) {
	d.mu.Lock()
	addr := d.next
	d.next += uint64(len(b)) + 1<<20
	d.memory[addr] = b
	d.mu.Unlock()
	return d.Import(mem.NewID(), fmt.Appendf(nil, "%d", addr), -1, uint64(len(b)))
}

// Put puts b at an address of the device.
func (d *Device) Put(addr uint64, b []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.memory[addr] = b
}

// Import makes a region from another region's handle: another process's view of it.
func (d *Device) Import(id mem.ID, handle []byte, fd int, size uint64) (*mem.Region, error) {
	var addr uint64
	if _, err := fmt.Sscanf(string(handle), "%d", &addr); err != nil || fd >= 0 {
		return nil, fmt.Errorf("transporttest: handle %q with descriptor %d: %w", handle, fd, err)
	}
	d.mu.Lock()
	n := uint64(len(d.memory[addr]))
	d.mu.Unlock()
	if n < size {
		return nil, fmt.Errorf("transporttest: %d bytes of an allocation of %d", size, n)
	}
	return mem.NewDevice(id, mem.DeviceMemory{Device: d, Addr: addr, Size: size,
		Handle: handle, FD: -1})
}

// at is the memory of a block of any kind.
func (d *Device) at(b mem.Block) ([]byte, error) {
	if err := b.Region.Check(b.Off, b.Len); err != nil {
		return nil, err
	}
	if b.Region.Device() == nil {
		p, ok := b.Bytes()
		if !ok {
			return nil, errors.New("transporttest: the device reaches no memory of another process")
		}
		return p, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.memory[b.Region.Base()][b.Off:][:b.Len], nil
}

var errDevice = errors.New("transporttest: the device has failed")

func (d *Device) walk(blocks []mem.Block, p []byte, f func(block, p []byte)) error {
	d.Calls.Add(1)
	if d.Fail.Load() {
		return errDevice
	}
	for i, b := range blocks {
		m, err := d.at(b)
		if err != nil {
			return err
		}
		if len(m) > len(p) {
			return mem.ErrBounds
		}
		f(m, p[:len(m)])
		p = p[len(m):]
		if i%yieldEvery == 0 {
			runtime.Gosched()
		}
	}
	return nil
}

// Gather implements mem.Device.
func (d *Device) Gather(dst []byte, blocks []mem.Block) error {
	return d.walk(blocks, dst, func(m, p []byte) { copy(p, m) })
}

// Scatter implements mem.Device.
func (d *Device) Scatter(blocks []mem.Block, src []byte) error {
	return d.walk(blocks, src, func(m, p []byte) { copy(m, p) })
}

// Move implements mem.Device.
func (d *Device) Move(dst, src []mem.Block) error {
	var n uint64
	for _, b := range src {
		n += b.Len
	}
	buf := make([]byte, n)
	if err := d.Gather(buf, src); err != nil {
		return err
	}
	return d.Scatter(dst, buf)
}

// Lend implements mem.Device.
func (d *Device) Lend() []byte {
	select {
	case b := <-d.lent:
		return b
	default:
		return nil
	}
}

// Return implements mem.Device.
func (d *Device) Return(b []byte) { d.lent <- b[:deviceBufferBytes] }

// LendBytes implements mem.Device.
func (d *Device) LendBytes() int { return deviceBufferBytes }

// onDevice is the device of the running suite's memory. Suites do not run in parallel.
var onDevice atomic.Pointer[Device]

// ConformanceOnDevice runs the contract suite with both ends' memory on devices. f receives the
// device before it makes each backend: backends that import memory need it.
func ConformanceOnDevice(t *testing.T, f func(tb testing.TB, d *Device) Factory) {
	d := NewDevice(t)
	onDevice.Store(d)
	defer onDevice.Store(nil)
	Conformance(t, f(t, d))
	t.Run("Device fails", func(t *testing.T) { testDeviceFails(t, f(t, d), d) })
	if d.Calls.Load() == 0 {
		t.Error("nothing of the suite went through the device")
	}
}

// A failing device costs slices, not lanes: slices in that time do not land, and land once the
// device works again.
func testDeviceFails(t *testing.T, f Factory, d *Device) {
	leaktest.Check(t)
	p := NewPair(t, f)
	l, _ := p.Dial()
	src, dst := NewMemory(t, shapes[2]), NewMemory(t, shapes[2])
	src.Write(1)
	b := NewBind(t, p.A, p.B, src, dst, 1, 1)
	b.Dest.Seed.Store(1)
	d.Fail.Store(true)
	res := p.A.MoveWait(l, b.Origin, src.All(), 1)
	d.Fail.Store(false)
	if res.Outcome == transfer.Landed || res.Reason != transfer.ReasonMemory ||
		b.Dest.count.Load() != 0 {
		t.Fatalf("with a device that fails: %s, %s, %d chunks landed", res.Outcome, res.Reason,
			b.Dest.count.Load())
	}
	if res := p.A.MoveWait(l, b.Origin, src.All(), 2); res.Outcome != transfer.Landed ||
		!b.Dest.Full() {
		t.Fatalf("once it works again: %s, %s: %v", res.Outcome, res.Reason, res.Err)
	}
	dst.GapsIntact(t)
}
