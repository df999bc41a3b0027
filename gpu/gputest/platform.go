package gputest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// OnDevice is the number of allocations on GPU i. Host memory has addresses of the machine, too; it
// is recognized by its size.
func (p *Platform) OnDevice(i int) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range p.Devices[i] {
		n += d.Allocated
	}
	return n
}

// Platform is a device.Platform. The UUID of a GPU is its number, the IPC handle of an allocation
// its address.
type Platform struct {
	Machine *Machine
	Count   int
	Apart   bool       // no peer access
	Mps     device.MPS // of its packers
	Devices [][]*Device
	mu      sync.Mutex
	Mapped  int
	Broken  map[int]bool // GPUs that fail
}

// NewPlatform makes a platform of n GPUs.
func NewPlatform(n int) *Platform {
	return &Platform{Machine: NewMachine(), Count: n, Devices: make([][]*Device, n),
		Broken: map[int]bool{}, Mps: device.MPSOff}
}

// UUID is that of GPU i.
func UUID(i int) [16]byte { return [16]byte{byte(i + 1)} }

func (p *Platform) UUIDs() (ids [][16]byte, _ error) {
	for i := range p.Count {
		ids = append(ids, UUID(i))
	}
	return ids, nil
}

func (p *Platform) CanAccess(int, int) (bool, error) { return !p.Apart, nil }

func (p *Platform) Open(i int) (device.Card, error) { return &Card{p, i}, nil }

// Card is a device.Card of a Platform.
type Card struct {
	Platform *Platform
	Index    int
}

func (c *Card) NewPacker() (device.Packer, error) {
	c.Platform.mu.Lock()
	defer c.Platform.mu.Unlock()
	if c.Platform.Broken[c.Index] {
		return nil, ErrBroken
	}
	d := c.Platform.Machine.Device()
	d.mps = c.Platform.Mps
	c.Platform.Devices[c.Index] = append(c.Platform.Devices[c.Index], d)
	return d, nil
}

func (c *Card) Reach(device.Card) error { return nil }

func (c *Card) Close() error { return nil }

func (c *Card) PCI() (string, error) { return fmt.Sprintf("0000:%02x:00.0", 0x1b+c.Index), nil }

// Register puts b at an address of the machine.
func (c *Card) Register(b []byte) (cuda.Ptr, error) {
	p := c.Platform.Machine.Alloc(1)
	c.Platform.Machine.Mu.Lock()
	defer c.Platform.Machine.Mu.Unlock()
	c.Platform.Machine.Mem[p] = b
	c.Platform.Machine.Next += cuda.Ptr(len(b))
	return p, nil
}

func (c *Card) Unregister(b []byte) error {
	c.Platform.Machine.Mu.Lock()
	defer c.Platform.Machine.Mu.Unlock()
	for p, m := range c.Platform.Machine.Mem {
		if len(m) > 0 && &m[0] == &b[0] {
			delete(c.Platform.Machine.Mem, p)
			return nil
		}
	}
	return errors.New("fake: not registered")
}

func (c *Card) Import(h *device.Handle, _ int) (cuda.Ptr, uint64, error) {
	p := cuda.Ptr(binary.LittleEndian.Uint64(h.IPC[:]))
	c.Platform.Machine.Mu.Lock()
	b, ok := c.Platform.Machine.Mem[p]
	c.Platform.Machine.Mu.Unlock()
	if !ok {
		return 0, 0, errors.New("fake: invalid handle")
	}
	c.Platform.mu.Lock()
	defer c.Platform.mu.Unlock()
	c.Platform.Mapped++
	return p, uint64(len(b)), nil
}

func (c *Card) Unimport(*device.Handle, cuda.Ptr, uint64) error {
	c.Platform.mu.Lock()
	defer c.Platform.mu.Unlock()
	c.Platform.Mapped--
	return nil
}

// Lend allocates memory of GPU i and returns a part of it with its handle, as an engine would.
func (p *Platform) Lend(i int, alloc, off uint64) (device.Handle, []byte) {
	ptr := p.Machine.Alloc(alloc)
	h := device.Handle{Kind: device.HandleIPC, GPU: UUID(i), Off: off, Alloc: alloc}
	binary.LittleEndian.PutUint64(h.IPC[:], uint64(ptr))
	return h, p.Machine.At(ptr, alloc)[off:]
}

// Must returns a function that fails the test on err, or returns v.
func Must[T any](v T, err error) func(testing.TB) T {
	return func(tb testing.TB) T {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
		return v
	}
}
