package gpu

import (
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// All names all GPUs of the host.
const All = "all"

// Use opens GPUs before memory of them is imported, so that this process's memory on them is
// allocated. Each name is a number of the driver, a UUID as nvidia-smi prints it, or All.
func (g *GPUs) Use(names []string) error { return g.use(names, func(*GPU) {}) }

// Relay opens GPUs as Use does, and lets copies of other GPUs use their links, whether or not an
// engine lends memory of them.
func (g *GPUs) Relay(names []string) error {
	return g.use(names, func(u *GPU) { u.mayRelay.Store(true) })
}

func (g *GPUs) use(names []string, opened func(*GPU)) error {
	for _, name := range names {
		which, err := g.named(name)
		if err != nil {
			return err
		}
		for _, i := range which {
			u, err := g.open(i)
			if err != nil {
				return fmt.Errorf("gpu: %w", err)
			}
			opened(u)
		}
	}
	return nil
}

func (g *GPUs) named(name string) ([]int, error) {
	if name == All {
		all := make([]int, len(g.ids))
		for i := range all {
			all[i] = i
		}
		return all, nil
	}
	if i, err := strconv.Atoi(name); err == nil {
		if i < 0 || i >= len(g.ids) {
			return nil, fmt.Errorf("gpu: no GPU %d: the driver lists %d", i, len(g.ids))
		}
		return []int{i}, nil
	}
	_, digits, _ := strings.Cut(name, "-")
	if id, err := hex.DecodeString(strings.ReplaceAll(digits, "-", "")); err == nil &&
		len(id) == len(g.ids[0]) {
		if i := slices.Index(g.ids, [16]byte(id)); i >= 0 {
			return []int{i}, nil
		}
	}
	return nil, fmt.Errorf("gpu: no GPU %q among %d: name one that nvidia-smi -L lists in this "+
		"container", name, len(g.ids))
}

// Import makes a region of size bytes of another process's GPU memory. handle is an encoded
// device.Handle, fd its descriptor or -1. On success the region owns fd, on an error the caller.
func (g *GPUs) Import(id mem.ID, handle []byte, fd int, size uint64) (*mem.Region, error) {
	h, err := device.ParseHandle(handle)
	if err != nil {
		return nil, err
	}
	if size == 0 || size > h.Alloc-h.Off {
		return nil, fmt.Errorf("gpu: region %s: %d bytes at offset %d of an allocation of %d: register "+
			"what was allocated", id, size, h.Off, h.Alloc)
	}
	if (h.Kind == device.HandleFD) != (fd >= 0) {
		return nil, fmt.Errorf("gpu: region %s: descriptor %d with a GPU handle of kind %d: kind 2 "+
			"needs one, kind 1 has none", id, fd, h.Kind)
	}
	gpu, err := g.find(h.GPU)
	if err != nil {
		return nil, fmt.Errorf("gpu: region %s: %w", id, err)
	}
	p, n, err := gpu.card.Import(&h, fd)
	if err != nil {
		return nil, fmt.Errorf("gpu: region %s: import from GPU %d: %w; the owner must be alive, "+
			"must have another process id in its own PID namespace than this sidecar "+
			"(shareProcessNamespace in a pod), and must use the same MPS server, if any", id, gpu.index, err)
	}
	undo := func() {
		if err := gpu.card.Unimport(&h, p, n); err != nil {
			g.cfg.Log.Warn("gpu memory not unmapped", "gpu", gpu.index, "region", id.String(), "err", err)
		}
	}
	if h.Off >= n || size > n-h.Off {
		undo()
		return nil, fmt.Errorf("gpu: region %s: [%d, +%d) of an allocation that has %d bytes", id,
			h.Off, size, n)
	}
	gpu.mayRelay.Store(true)
	r, err := mem.NewDevice(id, mem.DeviceMemory{Device: gpu, Addr: uint64(p) + h.Off, Size: size,
		Handle: handle, FD: fd, Free: undo})
	if err != nil {
		undo()
		return nil, err
	}
	return r, nil
}

// find opens the GPU of a UUID at its first use.
func (g *GPUs) find(id [16]byte) (*GPU, error) {
	for i := range g.ids {
		if g.ids[i] == id {
			return g.open(i)
		}
	}
	return nil, fmt.Errorf("no GPU of UUID %x among %d: give this sidecar the engine's GPUs "+
		"(NVIDIA_VISIBLE_DEVICES, the pod's resources)", id, len(g.ids))
}
