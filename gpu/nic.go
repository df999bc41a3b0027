package gpu

import (
	"fmt"

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
	if fd, off, err = device.ExportPages(x, cuda.Ptr(addr), n); err != nil {
		return -1, 0, fmt.Errorf("gpu: dma-buf of GPU %d: %w", u.index, err)
	}
	return fd, off, nil
}

// NICWrites returns how bytes of a NIC become visible to kernels: without action (nil), or by flush
// after the NIC's completion. The error: in no way.
func (u *GPU) NICWrites() (flush func() error, err error) {
	x, ok := u.card.(device.Exporter)
	if !ok {
		return nil, fmt.Errorf("gpu: GPU %d: %w", u.index, cuda.ErrNotSupported)
	}
	if flush, err = device.NICWrites(x); err != nil {
		return nil, fmt.Errorf("gpu: GPU %d: %w", u.index, err)
	}
	return flush, nil
}
