package gpu

import (
	"fmt"
	"os"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// ExportDMABuf makes a dma-buf descriptor of the pages around [addr, addr+n), which the caller
// owns. The range begins off bytes inside it.
func (u *GPU) ExportDMABuf(addr, n uint64) (fd int, off uint64, err error) {
	x, ok := u.card.(device.Exporter)
	if !ok {
		return -1, 0, fmt.Errorf("gpu: GPU %d exports no dma-buf: %w", u.index, cuda.ErrNotSupported)
	}
	page := uint64(os.Getpagesize())
	first, end := addr&^(page-1), (addr+n+page-1)&^(page-1)
	if fd, err = x.ExportDMABuf(cuda.Ptr(first), end-first); err != nil {
		return -1, 0, fmt.Errorf("gpu: dma-buf of GPU %d: %w", u.index, err)
	}
	return fd, addr - first, nil
}

// NICWrites returns how bytes of a NIC become visible to kernels: without action (nil), or by flush
// after the NIC's completion. The error: in no way.
func (u *GPU) NICWrites() (flush func() error, err error) {
	x, ok := u.card.(device.Exporter)
	if !ok {
		return nil, fmt.Errorf("gpu: GPU %d: %w", u.index, cuda.ErrNotSupported)
	}
	order, err := x.Attribute(cuda.GPUDirectRDMAWriteOrdering)
	if err != nil {
		return nil, fmt.Errorf("gpu: GPU %d: %w", u.index, err)
	}
	if order >= cuda.WritesOrderedForOwner {
		return nil, nil
	}
	options, err := x.Attribute(cuda.GPUDirectRDMAFlushOptions)
	if err != nil {
		return nil, fmt.Errorf("gpu: GPU %d: %w", u.index, err)
	}
	if options&cuda.FlushByHost == 0 {
		return nil, fmt.Errorf("gpu: GPU %d does not order writes of NICs (%d), and the host cannot "+
			"flush them (options %d): %w", u.index, order, options,
			cuda.ErrNotSupported)
	}
	return x.FlushRDMAWrites, nil
}
