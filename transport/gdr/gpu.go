package gdr

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/mem"
	"github.com/kvspray/kvspray/internal/verbs"
	"github.com/kvspray/kvspray/transport"
)

// GPU is a mem.Device whose memory a NIC may reach by itself. A Device that is none is staged through host memory by other transports.
type GPU interface {
	mem.Device
	// ExportDMABuf makes a dma-buf of [addr, addr+n) of the GPU's memory in this process, or of what lies around it: the range begins
	// off bytes into it. The descriptor is the caller's.
	ExportDMABuf(addr, n uint64) (fd int, off uint64, err error)
	// NICWrites says how writes of a NIC become visible to the engine's kernels on the GPU: nil where the platform orders them, else by
	// flush, after the NIC's completion. An error: not at all, and nothing may be written by a NIC.
	NICWrites() (flush func() error, err error)
}

// registerGPU registers memory of a GPU: by dma-buf, which takes nothing but kernel and driver, else by the driver's own module. Both are
// tried, since nothing else says for certain what works.
func (e *key) registerGPU(g GPU, remote bool) (err error) {
	e.gpu = true
	r := e.name.region
	if remote {
		if e.flush, err = g.NICWrites(); err != nil {
			return fmt.Errorf("memory of a GPU that does not show what a NIC has written: %w: %w", transport.ErrNotSupported, err)
		}
	}
	fd, off, err := g.ExportDMABuf(r.Base(), r.Size())
	if err == nil {
		err = e.inParts(func(at, n uint64) (verbs.Memory, error) { return e.domain.RegisterDMABuf(fd, off+at, n, remote) })
		_ = unix.Close(fd) // what was registered keeps the memory
		if err == nil {
			return nil
		}
	}
	// Some parts may have been made.
	for len(e.parts) > 0 {
		last := len(e.parts) - 1
		if cerr := e.parts[last].Close(); cerr != nil {
			return errors.Join(err, cerr)
		}
		e.parts = e.parts[:last]
	}
	perr := e.inParts(func(at, n uint64) (verbs.Memory, error) { return e.domain.RegisterPeer(r.Base()+at, n, remote) })
	if perr == nil {
		return nil
	}
	why := fmt.Errorf("memory of a GPU: neither by dma-buf (%w) nor by peermem (%w)", err, perr)
	if errors.Is(perr, verbs.ErrNotSupported) {
		return fmt.Errorf("%w: %w", transport.ErrNotSupported, why)
	}
	return why
}
