package device

import (
	"fmt"
	"os"

	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// ExportPages makes a dma-buf descriptor of the pages around [p, p+n), which the caller owns. The
// range begins off bytes inside it.
func ExportPages(x Exporter, p cuda.Ptr, n uint64) (fd int, off uint64, err error) {
	page := uint64(os.Getpagesize())
	first, end := uint64(p)&^(page-1), (uint64(p)+n+page-1)&^(page-1)
	if fd, err = x.ExportDMABuf(cuda.Ptr(first), end-first); err != nil {
		return -1, 0, err
	}
	return fd, uint64(p) - first, nil
}

// NICWrites returns how bytes of a NIC become visible to kernels: without action (nil), or by flush
// after the NIC's completion. The error: in no way.
func NICWrites(x Exporter) (flush func() error, err error) {
	order, err := x.Attribute(cuda.GPUDirectRDMAWriteOrdering)
	if err != nil {
		return nil, err
	}
	if order >= cuda.WritesOrderedForOwner {
		return nil, nil
	}
	options, err := x.Attribute(cuda.GPUDirectRDMAFlushOptions)
	if err != nil {
		return nil, err
	}
	if options&cuda.FlushByHost == 0 {
		return nil, fmt.Errorf("the GPU does not order writes of NICs (%d), and the host cannot flush "+
			"them (options %d): %w", order, options, cuda.ErrNotSupported)
	}
	return x.FlushRDMAWrites, nil
}
