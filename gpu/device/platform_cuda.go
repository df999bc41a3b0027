//go:build cgo

package device

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// cudaPlatform is the GPUs of the CUDA driver.
type cudaPlatform struct {
	devices []cuda.Device
	blocks  func(model string) int // thread blocks of the kernels; 0: one per multiprocessor
	version string                 // of the kernel's driver
}

// driverVersion has the driver's version, also inside containers.
const driverVersion = "/sys/module/nvidia/version"

// OpenHost opens the CUDA driver. blocks returns the measured number of thread blocks of the pack
// kernels for a model of GPU; 0: one per multiprocessor.
func OpenHost(blocks func(model string) int) (Platform, error) {
	d, err := cuda.Open()
	if err != nil {
		return nil, err
	}
	version, err := os.ReadFile(driverVersion)
	if err != nil {
		version = []byte("unknown")
	}
	return cudaPlatform{d.Devices, blocks, strings.TrimSpace(string(version))}, nil
}

func (p cudaPlatform) Model(i int) string {
	name, err := p.devices[i].Name()
	if err != nil {
		return ""
	}
	return name + ", driver " + p.version
}

func (p cudaPlatform) UUIDs() ([][16]byte, error) {
	ids := make([][16]byte, 0, len(p.devices))
	for _, d := range p.devices {
		id, err := d.UUID()
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, nil
}

func (p cudaPlatform) Open(i int) (Card, error) {
	c, err := p.devices[i].Retain()
	if err != nil {
		return nil, err
	}
	return cudaCard{c, p.blocks(p.Model(i))}, nil
}

func (p cudaPlatform) CanAccess(from, to int) (bool, error) {
	return p.devices[from].CanAccess(p.devices[to])
}

// cudaCard is a retained context.
type cudaCard struct {
	c          *cuda.Context
	packBlocks int // 0: one per multiprocessor
}

func (d cudaCard) NewPacker() (Packer, error) {
	p, err := CUDA(d.c)
	if s, ok := p.(PackSizer); ok && err == nil && d.packBlocks > 0 {
		s.SetPackBlocks(d.packBlocks)
	}
	return p, err
}

func (d cudaCard) Reach(other Card) error { return d.c.EnablePeer(other.(cudaCard).c) }

func (d cudaCard) Register(b []byte) (cuda.Ptr, error) { return d.c.Register(b) }

func (d cudaCard) RegisterReadOnly(b []byte) (cuda.Ptr, error) { return d.c.RegisterReadOnly(b) }

func (d cudaCard) Unregister(b []byte) error { return d.c.Unregister(b) }

func (d cudaCard) PCI() (string, error) {
	pci, err := d.c.Device.PCI()
	return strings.ToLower(pci), err // the driver writes capitals
}

// Free is the free memory of the GPU, for all processes.
func (d cudaCard) Free() (uint64, error) {
	free, _, err := d.c.MemInfo()
	return free, err
}

func (d cudaCard) Close() error { return d.c.Release() }

func (d cudaCard) ExportDMABuf(p cuda.Ptr, n uint64) (int, error) { return d.c.ExportDMABuf(p, n) }

func (d cudaCard) Attribute(a cuda.Attribute) (int, error) { return d.c.Device.Attribute(a) }

func (d cudaCard) FlushRDMAWrites() error { return d.c.FlushRDMAWrites() }

func (d cudaCard) Import(h *Handle, fd int) (cuda.Ptr, uint64, error) {
	if h.Kind == HandleFD {
		p, err := d.c.ImportFD(fd, h.Alloc)
		return p, h.Alloc, err
	}
	p, err := d.c.OpenIPC(h.IPC)
	if err != nil {
		return 0, 0, err
	}
	// The length comes from the driver, not from the owner: a copy beyond the end would break the
	// context and every copy on it.
	base, n, err := d.c.AddressRange(p)
	if err == nil && base != p {
		err = fmt.Errorf("the driver has it at %#x, mapped at %#x", uint64(base), uint64(p))
	}
	if err != nil {
		return 0, 0, errors.Join(err, d.c.CloseIPC(p))
	}
	return p, n, nil
}

func (d cudaCard) Unimport(h *Handle, p cuda.Ptr, bytes uint64) error {
	if h.Kind == HandleFD {
		return d.c.CloseImport(p, bytes)
	}
	return d.c.CloseIPC(p)
}
