package gpu

import (
	"fmt"
	"maps"
	"slices"
	"sync"
)

// purpose is what memory of a GPU is allocated for.
type purpose int

const (
	forStaging purpose = iota
	forPipelines
	forRelays      // buffers of other GPUs' copies
	forMeasurement // while a threshold is measured
	purposes
)

// budget bounds the memory that this process allocates on one GPU. The context of the driver is not
// included. Memory is taken before it is allocated, and given back after it is freed.
type budget struct {
	limit uint64

	mu   sync.Mutex // protects held
	held [purposes]uint64
}

// take reserves n bytes, or returns an error that names the limit.
func (b *budget) take(why purpose, n uint64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	taken := uint64(0)
	for _, k := range b.held {
		taken += k
	}
	if n > b.limit || taken > b.limit-n {
		return fmt.Errorf("%d MiB more beside %d MiB exceed the limit of %d MiB: "+
			"raise transports.gpu.memory, or lower transports.gpu.staging_buffer", n>>20, taken>>20,
			b.limit>>20)
	}
	b.held[why] += n
	return nil
}

// release returns n bytes that take has reserved.
func (b *budget) release(why purpose, n uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held[why] -= n
}

// bytes is what is reserved for one purpose.
func (b *budget) bytes(why purpose) uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.held[why]
}

// MemoryState is what this process holds of one GPU. Free is what the whole GPU has left, 0 where
// the driver does not report it.
type MemoryState struct {
	GPU                        int
	Staging, Pipelines, Relays uint64 // allocated by this process on the GPU
	Limit, Free                uint64
	PinnedBytes                uint64 // host memory that belongs to the GPU's staging slots
}

// Memory lists what this process holds of each GPU in use.
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
		s := MemoryState{GPU: u.index, Staging: u.budget.bytes(forStaging),
			Pipelines: u.budget.bytes(forPipelines),
			Relays:    u.budget.bytes(forRelays) + u.budget.bytes(forMeasurement),
			Limit:     u.budget.limit, PinnedBytes: uint64(len(u.arena))}
		// Without the lock: a driver that hangs would block every copy, too.
		if c, ok := u.card.(interface{ Free() (uint64, error) }); ok {
			if free, err := c.Free(); err == nil {
				s.Free = free
			}
		}
		out = append(out, s)
	}
	return out
}
