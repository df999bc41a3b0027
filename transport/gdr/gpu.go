package gdr

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/transport"
)

// GPU is a mem.Device whose memory a NIC can reach directly. Other transports stage other Devices
// through host memory.
type GPU interface {
	mem.Device
	// ExportDMABuf makes a dma-buf of [addr, addr+n) of the GPU's memory in this process, or of a
	// larger range: the requested range begins off bytes into it. The caller owns the descriptor.
	ExportDMABuf(addr, n uint64) (fd int, off uint64, err error)
	// NICWrites returns how writes of a NIC become visible to the engine's kernels on the GPU: nil
	// if the platform orders them, else a flush to call after the NIC's completion. An error means
	// that they do not, and no NIC may write.
	NICWrites() (flush func() error, err error)
}

// registerGPU registers GPU memory: by dma-buf, which needs only kernel and driver, else by the
// driver's peermem module. It tries both, because no query is reliable.
func (e *key) registerGPU(g GPU, remote bool) (err error) {
	e.gpu = true
	r := e.name.region
	if remote {
		if e.flush, err = g.NICWrites(); err != nil {
			return fmt.Errorf("memory of a GPU on which a NIC's writes do not become visible: %w: %w",
				transport.ErrNotSupported, err)
		}
	}
	fd, off, err := g.ExportDMABuf(r.Base(), r.Size())
	if err == nil {
		err = e.inParts(func(at, n uint64) (verbs.Memory, error) {
			return e.domain.RegisterDMABuf(fd, off+at, n, remote)
		})
		_ = unix.Close(fd) // the registration keeps the memory
		if err == nil {
			return nil
		}
	}
	// Some parts may exist already.
	for len(e.parts) > 0 {
		last := len(e.parts) - 1
		if cerr := e.parts[last].Close(); cerr != nil {
			return errors.Join(err, cerr)
		}
		e.parts = e.parts[:last]
	}
	perr := e.inParts(func(at, n uint64) (verbs.Memory,
		error) {
		return e.domain.RegisterPeer(r.Base()+at, n, remote)
	})
	if perr == nil {
		return nil
	}
	why := fmt.Errorf("memory of a GPU: neither by dma-buf (%w) nor by peermem (%w)", err, perr)
	if errors.Is(perr, verbs.ErrNotSupported) {
		return fmt.Errorf("%w: %w", transport.ErrNotSupported, why)
	}
	return why
}
