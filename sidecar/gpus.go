package sidecar

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"

	"github.com/kvspray/kvspray/gpu"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/sys/topo"
)

// gpus opens the CUDA driver when the first engine or peer lends memory of a GPU, or at the start
// where GPUs are named: the sidecar of CPU engines never loads it.
type gpus struct {
	cfg  gpu.Config
	load func(gpu.Config) (*gpu.GPUs, error) // gpu.New, or what a test has instead
	// of opened; nil where a test has put something else there
	copier atomic.Pointer[gpu.Copier]

	mu     sync.Mutex // protects all below
	opened importer
	closed bool
}

// importer makes regions of memory that others have lent: *gpu.GPUs, or what a test has instead of
// a GPU.
type importer interface {
	Import(id mem.ID, handle []byte, fd int, size uint64) (*mem.Region, error)
	Close() error
}

// newGPUs returns nil where GPUs are switched off.
func newGPUs(c *config.Config, log *slog.Logger) (*gpus, error) {
	t := c.Transports.GPU
	if t.Enabled == config.Off {
		return nil, nil
	}
	how, err := policy.ParseCopyMethod(t.CopyMethod)
	if err != nil {
		return nil, fmt.Errorf("sidecar: transports.gpu.copy_method: %w", err)
	}
	table, err := gpuTable(c, log)
	if err != nil {
		return nil, err
	}
	return &gpus{load: gpu.New, cfg: gpu.Config{Method: how, Table: table, Buffers: t.Buffers,
		PeerStage: uint64(t.Stage), Memory: uint64(t.Memory), RelayRank: relayRank(log), Log: log}}, nil
}

// start opens the GPUs of transports.gpu.open and transports.gpu.relays.
func (g *gpus) start(c config.GPU) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, part := range []struct {
		key   string
		names []string
		use   func(*gpu.GPUs, []string) error
	}{
		{"transports.gpu.open", c.Open, (*gpu.GPUs).Use},
		{"transports.gpu.relays", c.Relays, (*gpu.GPUs).Relay},
	} {
		if len(part.names) == 0 {
			continue
		}
		err := g.openLocked()
		if opened, ok := g.opened.(*gpu.GPUs); ok && err == nil {
			err = part.use(opened, part.names)
		}
		if err != nil {
			return fmt.Errorf("sidecar: %s: %v: %w; correct it, or leave it out: a GPU is then opened "+
				"when an engine lends memory of it", part.key, part.names, err)
		}
	}
	return nil
}

// relayRank returns a gpu.Config.RelayRank from the host's PCI devices, which are read at the first
// use.
func relayRank(log *slog.Logger) func(target, relay string) int {
	discover := sync.OnceValue(func() *topo.Host {
		h, err := topo.Discover(topo.Options{})
		if err != nil {
			log.Warn("relays are not ranked: the host's PCI devices cannot be read", "err", err)
			return &topo.Host{}
		}
		return h
	})
	return func(target, relay string) int { return rankOf(discover(), target, relay) }
}

// rankOf: a relay of the same NUMA node reads host memory without the link between the nodes. A
// relay behind the target's own PCIe switch shares the switch's link to the host, and adds little.
func rankOf(h *topo.Host, target, relay string) int {
	t, r := h.GPU(target), h.GPU(relay)
	if t == nil || r == nil {
		return 0
	}
	switch topo.Between(t.Seat, r.Seat) {
	case topo.System:
		return 1
	case topo.Switches:
		return 2
	case topo.Switch:
		return 3
	}
	return 0
}

// openLocked loads the driver.
func (g *gpus) openLocked() error {
	if g.opened != nil {
		return nil
	}
	// A failure is not kept: a driver that was being loaded is there the next time.
	opened, err := g.load(g.cfg)
	if err != nil {
		return err
	}
	g.opened = opened
	g.copier.Store(gpu.NewCopier(opened))
	return nil
}

// Import makes a region of GPU memory; it owns fd once it has succeeded.
func (g *gpus) Import(id mem.ID, handle []byte, fd int, size uint64) (*mem.Region, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, net.ErrClosed
	}
	if err := g.openLocked(); err != nil {
		return nil, err
	}
	return g.opened.Import(id, handle, fd, size)
}

// copy moves the bytes of src, block by block, to dst, of which one is a GPU's, and names the way
// that they took.
func (g *gpus) copy(dst, src []mem.Block) (path string, err error) {
	g.mu.Lock()
	c, closed := g.copier.Load(), g.closed
	g.mu.Unlock()
	switch {
	case closed:
		return "", net.ErrClosed
	case c != nil:
		return c.Copy(dst, src)
	}
	d := mem.DeviceOf(dst)
	if d == nil {
		d = mem.DeviceOf(src)
	}
	return gpu.PathStaged, d.Move(dst, src)
}

// pin prepares a copy, which takes long the first time, until ctx ends.
func (g *gpus) pin(ctx context.Context, dst, src []mem.Block) {
	if c := g.copier.Load(); c != nil {
		c.Pin(ctx, dst, src)
	}
}

// links is what copies between host memory and GPUs; nil: nothing does. While a GPU is being opened
// lanes do not wait here.
func (g *gpus) links() *gpu.Copier {
	if g == nil {
		return nil
	}
	return g.copier.Load()
}

// Reaches implements shm.Links.
func (g *gpus) Reaches(dst, src []mem.Block) bool {
	c := g.links()
	return c != nil && c.Reaches(dst, src)
}

// Carry implements shm.Links.
func (g *gpus) Carry(dst, src []mem.Block) error {
	c := g.links()
	if c == nil {
		return net.ErrClosed
	}
	return c.Carry(dst, src)
}

// linkStates is what is known of each link between host memory and a GPU.
func (g *gpus) linkStates() []gpu.PathState {
	c := g.links()
	if c == nil {
		return []gpu.PathState{}
	}
	return c.State()
}

// memory is what this process holds of each GPU.
func (g *gpus) memory() []gpu.MemoryState {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	opened, _ := g.opened.(*gpu.GPUs)
	g.mu.Unlock()
	if opened == nil {
		return nil
	}
	return opened.Memory()
}

// executorStates is what each executor has done on each way from and to a GPU.
func (g *gpus) executorStates() []policy.RouteState {
	c := g.links()
	if c == nil {
		return []policy.RouteState{}
	}
	return c.Routes()
}

// Forget releases what GPUs hold for regions that end.
func (g *gpus) Forget(regions []*mem.Region) {
	c := g.links()
	if c == nil {
		return
	}
	if err := c.Forget(regions); err != nil {
		g.cfg.Log.Warn("host memory not unpinned", "err", err)
	}
}

// inUse reports whether memory of a GPU has been lent.
func (g *gpus) inUse() bool {
	if g == nil {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.opened != nil
}

// Close gives the GPUs back, after everything that moves their memory has ended.
func (g *gpus) Close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	if g.opened == nil {
		return nil
	}
	var err error
	if c := g.copier.Load(); c != nil {
		err = c.Close()
	}
	return errors.Join(err, g.opened.Close())
}
