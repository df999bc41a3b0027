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
	Method      policy.CopyMethod
	Slots       int           // gathers and scatters under way at once, each with a HopBytes buffer on the GPU and one in host memory; default 8
	Buffers     int           // host buffers of LendBytes that lanes borrow; default 128
	PeerStage   uint64        // bytes of one stage between two GPUs; default 32 MiB. PipelineBytes has what a pair takes
	Memory      uint64        // bytes of each GPU at most; default 2 GiB. Pipelines that would exceed it are not made
	Table       *policy.Table // what was measured; nil: what is built in, or learned
	PeerDisable bool          // never copy between GPUs directly: for comparisons
	Log         *slog.Logger
}

// The shape of hops. [measured, H200] between two copies of different hops a copy engine pauses for 2 us to the host and 4 us from it,
// a tenth and a sixth of what 1 MiB takes, and a twentieth of 4 MiB; 8 MiB leave little of that. Lanes move slices, which are smaller.
const (
	SlotBytes      = 8 << 20
	LendBytes      = 1 << 20
	slotRuns       = 4096 // blocks of one hop; more are done in several
	defaultSlots   = 8
	defaultBuffers = 128
	PeerPipelines  = 2 // per ordered pair of GPUs: one core alone does not issue stages as fast as the link takes them
	defaultStage   = 32 << 20
	defaultMemory  = 2 << 30
	directPiece    = 256 << 10        // blocks of so many bytes on average are copied one by one
	closeTimeout   = 10 * time.Second // for hops under way, where a GPU is given back
	closePause     = time.Millisecond // between two looks meanwhile
)

// GPUs is this process's use of the host's GPUs: it imports memory that engines lend, and moves it. A GPU is opened when the
// first memory of it is imported; until then it is not touched. A GPU that fails takes nothing else with it: its regions return
// errors, others and host memory carry on.
type GPUs struct {
	cfg  Config
	plat device.Platform
	ids  [][16]byte

	workTimeout  time.Duration // tests may change these three
	closeTimeout time.Duration
	idleLimit    time.Duration
	now          func() time.Time

	mu      sync.Mutex // protects all below
	gpus    map[int]*GPU
	pairs   map[[2]int]*pair
	refused map[[2]int]refusal // directions without a pipeline
	closed  bool

	pins atomic.Pointer[[]pin] // changed under mu
}

// New opens the CUDA driver. An error wraps cuda.ErrNotSupported where there is none, or no GPU.
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
		return nil, fmt.Errorf("%w: the driver is there and lists no GPU", cuda.ErrNotSupported)
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
	g := &GPUs{cfg: cfg, plat: p, ids: ids, workTimeout: workTimeout, closeTimeout: closeTimeout, idleLimit: idleLimit, gpus: map[int]*GPU{}, pairs: map[[2]int]*pair{}, refused: map[[2]int]refusal{}, now: time.Now}
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
		return nil, fmt.Errorf("open GPU %d: %d MiB of staging exceed the limit of %d MiB: raise transports.gpu.memory", i, need>>20, g.cfg.Memory>>20)
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
	g.cfg.Log.Info("gpu in use", "gpu", i, "host_bytes", len(u.arena), "gpu_bytes", g.cfg.Slots*SlotBytes, "executor", g.cfg.Method.String(), "mps", u.mps.String(),
		"gpu_bytes_at_most", g.cfg.Memory)
	return u, nil
}

// Close gives every GPU back. No region may be in use any more.
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
