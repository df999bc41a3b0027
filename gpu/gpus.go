package gpu

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// Config bounds what a sidecar takes of each GPU that it uses. The zero value has sensible bounds.
type Config struct {
	Method policy.CopyMethod
	// concurrent gathers and scatters, each with SlotBytes on the GPU and in host memory; default 8
	Slots     int
	Buffers   int    // host buffers of LendBytes that lanes borrow; default 128
	PeerStage uint64 // bytes of one stage between two GPUs; default 32 MiB; see peercopy.Bytes
	// limit of each GPU's memory; default 2 GiB. It includes staging, pipelines and relay buffers
	Memory      uint64
	Table       *policy.Table // measured values; nil: built-in ones
	PeerDisable bool          // no direct copies between GPUs, for comparisons
	// RelayRank ranks a relay for a target by their PCI addresses; lower ranks are taken first. nil:
	// all are equal
	RelayRank func(target, relay string) int
	Log       *slog.Logger
}

// The shape of staging slots. [measured, H200] Between copies of two slots a copy engine pauses
// for 2 us to the host and 4 us from it: a tenth and a sixth of the time of 1 MiB, a twentieth
// of 4 MiB, little of 8 MiB. Lanes move slices, which are smaller.
const (
	SlotBytes      = 8 << 20
	LendBytes      = 1 << 20
	slotRuns       = 4096 // blocks of one slot
	defaultSlots   = 8
	defaultBuffers = 128
	PeerPipelines  = 2 // per direction: one core does not issue stages as fast as the link moves them
	defaultStage   = 32 << 20
	defaultMemory  = 2 << 30
	directPiece    = 256 << 10        // average block from which copy engines copy one by one
	closeTimeout   = 10 * time.Second // for what is in flight when a GPU is closed
	closePause     = time.Millisecond // between two checks meanwhile
)

// GPUs is this process's use of the host's GPUs. A GPU is opened when the first memory of it is
// imported, or by Use. A GPU that fails affects only its own regions, which return errors.
type GPUs struct {
	cfg  Config
	plat device.Platform
	ids  [][16]byte

	closeTimeout time.Duration // tests may change these two
	idleLimit    time.Duration
	now          func() time.Time

	mu      sync.Mutex // protects all below
	gpus    map[int]*GPU
	pairs   map[[2]int]*pair
	refused map[[2]int]refusal // directions without a pipeline
	closed  bool

	pins atomic.Pointer[[]pin] // changed under mu
}

// New opens the CUDA driver. The error wraps cuda.ErrNotSupported where there is no driver or no
// GPU.
func New(cfg Config) (*GPUs, error) {
	p, err := device.OpenHost(func(model string) int { return cfg.Table.Limits(model).PackBlocks })
	if err != nil {
		return nil, err
	}
	return newGPUs(p, cfg)
}

func newGPUs(p device.Platform, cfg Config) (*GPUs, error) {
	ids, err := p.UUIDs()
	if err != nil {
		return nil, fmt.Errorf("gpu: list GPUs: %w", err)
	}
	if len(ids) == 0 {
		return nil, fmt.Errorf("%w: the driver lists no GPU", cuda.ErrNotSupported)
	}
	if cfg.Slots <= 0 {
		cfg.Slots = defaultSlots
	}
	if cfg.Buffers <= 0 {
		cfg.Buffers = defaultBuffers
	}
	if cfg.PeerStage == 0 {
		cfg.PeerStage = defaultStage
	}
	if cfg.Memory == 0 {
		cfg.Memory = defaultMemory
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	g := &GPUs{cfg: cfg, plat: p, ids: ids, closeTimeout: closeTimeout,
		idleLimit: idleLimit, gpus: map[int]*GPU{}, pairs: map[[2]int]*pair{},
		refused: map[[2]int]refusal{}, now: time.Now}
	g.pins.Store(&[]pin{})
	return g, nil
}

func (g *GPUs) open(i int) (*GPU, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, net.ErrClosed
	}
	if u := g.gpus[i]; u != nil {
		return u, nil
	}
	if need := uint64(g.cfg.Slots) * SlotBytes; need > g.cfg.Memory {
		return nil, fmt.Errorf("open GPU %d: %d MiB of staging exceed the limit of %d MiB: raise "+
			"transports.gpu.memory", i, need>>20, g.cfg.Memory>>20)
	}
	c, err := g.plat.Open(i)
	if err != nil {
		return nil, fmt.Errorf("open GPU %d: %w", i, err)
	}
	u, err := newGPU(g, i, c)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open GPU %d: %w", i, err), c.Close())
	}
	g.gpus[i] = u
	g.cfg.Log.Info("gpu in use", "gpu", i, "host_bytes", len(u.arena), "gpu_bytes",
		g.cfg.Slots*SlotBytes, "executor", g.cfg.Method.String(), "mps", u.mps.String(),
		"gpu_bytes_at_most", g.cfg.Memory)
	return u, nil
}

// Close releases every GPU. No region may be in use.
func (g *GPUs) Close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil
	}
	g.closed = true
	var errs []error
	for _, p := range g.pairs {
		for len(p.pipelines) > 0 {
			errs = append(errs, p.pipelines[0].Close())
			p.pipelines = p.pipelines[1:]
		}
	}
	for _, u := range g.gpus {
		errs = append(errs, u.close())
	}
	return errors.Join(errs...)
}
