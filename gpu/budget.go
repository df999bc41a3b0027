package gpu

import (
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/kvspray/kvspray/gpu/peercopy"
)

// PipelineBytes is what one direction between two GPUs takes on each of them, and twice on one GPU that is both.
func PipelineBytes(maxStage uint64) uint64 { return PeerPipelines * peercopy.Bytes(maxStage) }

// budget bounds the memory that this process allocates on one GPU. The context is the driver's, and comes on top.
type budget struct {
	limit     uint64
	staging   atomic.Uint64 // changed under GPUs.mu, or before the GPU is shared
	pipelines atomic.Uint64
}

func (b *budget) taken() uint64 { return b.staging.Load() + b.pipelines.Load() }

// fits reports whether n more bytes may be allocated.
func (b *budget) fits(n uint64) error {
	if taken := b.taken(); n > b.limit || taken > b.limit-n {
		return fmt.Errorf("%d MiB more beside %d MiB exceed the limit of %d MiB: raise transports.gpu.memory, or lower transports.gpu.stage",
			n>>20, taken>>20, b.limit>>20)
	}
	return nil
}

// MemoryState is what this process holds of one GPU. Free is what the whole GPU has left, 0 where the driver does not tell.
type MemoryState struct {
	GPU                      int
	Staging, Pipelines       uint64 // allocated by us
	Limit, Free, PinnedBytes uint64 // PinnedBytes: host memory
}

// Memory is what is held of each GPU in use.
func (g *GPUs) Memory() (out []MemoryState) {
	g.mu.Lock()
	gpus := slices.Collect(maps.Values(g.gpus))
	closed := g.closed
	g.mu.Unlock()
	if closed {
		return nil
	}
	slices.SortFunc(gpus, func(a, b *GPU) int { return a.index - b.index })
	for _, u := range gpus {
		s := MemoryState{GPU: u.index, Staging: u.budget.staging.Load(), Pipelines: u.budget.pipelines.Load(), Limit: u.budget.limit,
			PinnedBytes: uint64(len(u.arena))}
		// Not under the lock: a driver that hangs would keep whoever moves bytes, too.
		if c, ok := u.card.(interface{ Free() (uint64, error) }); ok {
			if free, err := c.Free(); err == nil {
				s.Free = free
			}
		}
		out = append(out, s)
	}
	return out
}
