package gpu

import (
	"fmt"
	"slices"
	"sync"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// pinned is the device address of host memory in the arena or in a pinned range.
func (u *GPU) pinned(p []byte) (cuda.Ptr, bool) {
	if off, ok := offsetIn(u.arena, p); ok {
		return u.arenaPtr + cuda.Ptr(off), true
	}
	for _, r := range *u.gpus.pins.Load() {
		if off, ok := offsetIn(r.bytes, p); ok {
			return r.at + cuda.Ptr(off), true
		}
	}
	return 0, false
}

// pin is pinned host memory.
type pin struct {
	bytes []byte
	at    cuda.Ptr
	by    device.Card
}

// MaxPins bounds the pinned ranges, because each gather and scatter searches them.
const MaxPins = 64

// Pin registers host memory with the driver, so that gathers and scatters access it without a
// second copy: host caches, memfds of CPU engines. It must not be on the Go heap. unpin may be
// called when no GPU uses the memory any more.
func (g *GPUs) Pin(b []byte) (unpin func() error, err error) {
	u, err := g.open(0)
	if err != nil {
		return nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if n := len(*g.pins.Load()); n >= MaxPins {
		return nil, fmt.Errorf("gpu: %d ranges of host memory are pinned, at most %d: pin fewer, "+
			"larger ones", n, MaxPins)
	}
	at, err := u.card.Register(b)
	if err != nil {
		return nil, fmt.Errorf("gpu: pin %d bytes of host memory: %w; raise the memory lock limit",
			len(b), err)
	}
	all := append(slices.Clone(*g.pins.Load()), pin{b, at, u.card})
	g.pins.Store(&all)
	return sync.OnceValue(func() error {
		g.mu.Lock()
		defer g.mu.Unlock()
		left := slices.DeleteFunc(slices.Clone(*g.pins.Load()),
			func(p pin) bool { return &p.bytes[0] == &b[0] })
		g.pins.Store(&left)
		return u.card.Unregister(b)
	}), nil
}
