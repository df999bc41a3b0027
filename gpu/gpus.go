package gpu

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// platform is a host's GPUs: CUDA, or a fake of it in tests.
type platform interface {
	UUIDs() ([][16]byte, error)
	Open(i int) (card, error)
	CanAccess(from, to int) (bool, error)
}

// card is one GPU in use by this process.
type card interface {
	NewPacker() (Packer, error)
	// Import maps the whole allocation that h names and returns how long it really is. fd stays the caller's.
	Import(h *Handle, fd int) (p cuda.Ptr, bytes uint64, err error)
	Unimport(h *Handle, p cuda.Ptr, bytes uint64) error
	// Register makes host memory reachable by every card; Unregister undoes it.
	Register(b []byte) (cuda.Ptr, error)
	Unregister(b []byte) error
	// Reach lets this card's copy engines at the other's memory. Idempotent.
	Reach(other card) error
	// Export names an allocation of ours to other processes.
	Export(p cuda.Ptr) (cuda.IPCHandle, error)
	// PCI is the address of the card, as sysfs writes it: "0000:1b:00.0".
	PCI() (string, error)
	Close() error
}

// Config bounds what a sidecar takes of each GPU that it uses. The zero value has sensible bounds.
type Config struct {
	Executor    Executor
	Hops        int    // gathers and scatters under way at once, each with a HopBytes buffer on the GPU and one in host memory; default 8
	Buffers     int    // host buffers of LendBytes that lanes borrow; default 128
	PeerStage   uint64 // bytes of one stage between two GPUs; default 32 MiB. PipelineBytes has what a pair takes
	Memory      uint64 // bytes of each GPU at most; default 2 GiB. Pipelines that would exceed it are not made
	Table       *Table // what was measured; nil: what is built in, or learned
	PeerDisable bool   // never copy between GPUs directly: for comparisons
	Log         *slog.Logger
}

// The shape of hops. [measured, H200] between two copies of different hops a copy engine pauses for 2 us to the host and 4 us from it,
// a tenth and a sixth of what 1 MiB takes, and a twentieth of 4 MiB; 8 MiB leave little of that. Lanes move slices, which are smaller.
const (
	HopBytes       = 8 << 20
	LendBytes      = 1 << 20
	hopRuns        = 4096 // blocks of one hop; more are done in several
	defaultHops    = 8
	defaultBuffers = 128
	PeerPipelines  = 2 // per ordered pair of GPUs: one core alone does not issue stages as fast as the link takes them
	defaultStage   = 32 << 20
	defaultMemory  = 2 << 30
	directPiece    = 256 << 10        // blocks of so many bytes on average are copied one by one
	closePatience  = 10 * time.Second // for hops under way, where a GPU is given back
	closePause     = time.Millisecond // between two looks meanwhile
)

// GPUs is this process's use of the host's GPUs: it imports memory that engines lend, and moves it. A GPU is opened when the
// first memory of it is imported; until then it is not touched. A GPU that fails takes nothing else with it: its regions return
// errors, others and host memory carry on.
type GPUs struct {
	cfg  Config
	plat platform
	ids  [][16]byte

	patience      time.Duration // workPatience; tests of something else have more
	closePatience time.Duration // closePatience; a test has less
	knock         time.Duration // knockIdle; a test has others

	mu     sync.Mutex // protects all below
	gpus   map[int]*GPU
	peers  map[[2]int]*pair // nil: no way but through the host
	closed bool

	pins atomic.Pointer[[]pin] // changed under mu
}

// pin is host memory that every GPU's copy engines reach.
type pin struct {
	bytes []byte
	at    cuda.Ptr
	by    card
}

// MaxPins bounds what Pin may be told at once: each gather and scatter looks through it.
const MaxPins = 64

// Pin registers host memory with the driver, so that gathers into it and scatters from it need no second copy: host caches, memfds
// of CPU engines. It must be off the Go heap. The result undoes it, once nothing uses the memory through a GPU any more.
func (g *GPUs) Pin(b []byte) (unpin func() error, err error) {
	u, err := g.open(0)
	if err != nil {
		return nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if n := len(*g.pins.Load()); n >= MaxPins {
		return nil, fmt.Errorf("stage: %d ranges of host memory are pinned, at most %d: pin fewer, larger ones", n, MaxPins)
	}
	at, err := u.card.Register(b)
	if err != nil {
		return nil, fmt.Errorf("stage: pin %d bytes of host memory: %w; raise the memory lock limit", len(b), err)
	}
	all := append(slices.Clone(*g.pins.Load()), pin{b, at, u.card})
	g.pins.Store(&all)
	return sync.OnceValue(func() error {
		g.mu.Lock()
		defer g.mu.Unlock()
		left := slices.DeleteFunc(slices.Clone(*g.pins.Load()), func(p pin) bool { return &p.bytes[0] == &b[0] })
		g.pins.Store(&left)
		return u.card.Unregister(b)
	}), nil
}

// New opens the CUDA driver. An error wraps cuda.ErrNotSupported where there is none, or no GPU.
func New(cfg Config) (*GPUs, error) {
	p, err := openPlatform(func(model string) int { return cfg.Table.Limits(model).PackBlocks })
	if err != nil {
		return nil, err
	}
	return newGPUs(p, cfg)
}

func newGPUs(p platform, cfg Config) (*GPUs, error) {
	ids, err := p.UUIDs()
	if err != nil {
		return nil, fmt.Errorf("stage: list GPUs: %w", err)
	}
	if len(ids) == 0 {
		return nil, fmt.Errorf("%w: the driver is there and lists no GPU", cuda.ErrNotSupported)
	}
	if cfg.Hops <= 0 {
		cfg.Hops = defaultHops
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
	g := &GPUs{cfg: cfg, plat: p, ids: ids, patience: workPatience, closePatience: closePatience, knock: knockIdle, gpus: map[int]*GPU{}, peers: map[[2]int]*pair{}}
	g.pins.Store(&[]pin{})
	return g, nil
}

// Import makes a region of size bytes of another process's GPU memory. handle is an encoded Handle, fd its descriptor or -1. On
// success the region owns fd; on an error it stays the caller's.
func (g *GPUs) Import(id mem.ID, handle []byte, fd int, size uint64) (*mem.Region, error) {
	h, err := ParseHandle(handle)
	if err != nil {
		return nil, err
	}
	if size == 0 || size > h.Alloc-h.Off {
		return nil, fmt.Errorf("stage: region %s: %d bytes at offset %d of an allocation of %d: register what was allocated", id, size, h.Off, h.Alloc)
	}
	if (h.Kind == HandleFD) != (fd >= 0) {
		return nil, fmt.Errorf("stage: region %s: descriptor %d with a GPU handle of kind %d: kind 2 comes with one, kind 1 without", id, fd, h.Kind)
	}
	gpu, err := g.find(h.GPU)
	if err != nil {
		return nil, fmt.Errorf("stage: region %s: %w", id, err)
	}
	p, n, err := gpu.card.Import(&h, fd)
	if err != nil {
		return nil, fmt.Errorf("stage: region %s: import from GPU %d: %w; the allocation must be alive and another process's, which shares this sidecar's "+
			"IPC namespace (one pod, or hostIPC) and its MPS server, if any", id, gpu.index, err)
	}
	undo := func() {
		if err := gpu.card.Unimport(&h, p, n); err != nil {
			g.cfg.Log.Warn("gpu memory not unmapped", "gpu", gpu.index, "region", id.String(), "err", err)
		}
	}
	if h.Off >= n || size > n-h.Off {
		undo()
		return nil, fmt.Errorf("stage: region %s: [%d, +%d) of an allocation that has %d bytes", id, h.Off, size, n)
	}
	r, err := mem.NewDevice(id, mem.DeviceMemory{Device: gpu, Addr: uint64(p) + h.Off, Size: size, Handle: handle, FD: fd, Free: undo})
	if err != nil {
		undo()
		return nil, err
	}
	return r, nil
}

// find opens the GPU of that name at its first use.
func (g *GPUs) find(id [16]byte) (*GPU, error) {
	for i := range g.ids {
		if g.ids[i] == id {
			return g.open(i)
		}
	}
	return nil, fmt.Errorf("no GPU of UUID %x here, %d others: give this sidecar the engine's GPUs (NVIDIA_VISIBLE_DEVICES, the pod's resources)", id, len(g.ids))
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
	if need := uint64(g.cfg.Hops) * HopBytes; need > g.cfg.Memory {
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
	g.cfg.Log.Info("gpu in use", "gpu", i, "host_bytes", len(u.arena), "gpu_bytes", g.cfg.Hops*HopBytes, "executor", g.cfg.Executor.String(), "mps", u.mps.String(),
		"gpu_bytes_at_most", g.cfg.Memory)
	return u, nil
}

// errNoPeer: copies between two GPUs go through host memory.
var errNoPeer = errors.New("stage: no peer access")

// pair moves bytes from one GPU to another, or within one GPU.
type pair struct {
	peers []*Peer
	learn *chooser // beside engines that compute
	// idle admits kernels as long as no engine computes on either GPU. Without it, learn would go on
	// with what it has learned beside an engine, and would take the way through host memory for an
	// idle GPU. nil: no probe works here, and learn has it all.
	idle   *knocker
	within bool // source and destination are one GPU
}

// choice is how a list is moved.
type choice struct {
	how  Executor
	try  bool // only with a part of the list, to learn how long it takes
	idle bool // no engine computes, so that it teaches nothing about the time beside one
	// alone: an engine computes on the one GPU, and no hop through host memory may use a kernel, either.
	alone bool
}

// pick chooses for the next list. The caller calls done when that has been moved.
func (p *pair) pick(now time.Time) (c choice, done func()) {
	if p.idle != nil && p.idle.enter() {
		return choice{how: Pack, idle: true}, p.idle.leave
	}
	if p.idle != nil && p.within {
		// The engine pays for kernels that run beside it, and learn sees only their own time. Copy
		// engines take nothing from it.
		return choice{how: Copy, alone: true}, func() {}
	}
	c.how, c.try = p.learn.pick(now, false)
	return c, func() {}
}

// run gives moves to the pipeline that has the fewest runs.
func (p *pair) run(moves []Move) error {
	if len(p.peers) == 0 {
		return net.ErrClosed
	}
	least := p.peers[0]
	for _, q := range p.peers[1:] {
		if q.idleRuns() > least.idleRuns() {
			least = q
		}
	}
	return least.Run(moves)
}

// pairProbe detects whether both GPUs are idle.
func (g *GPUs) pairProbe(from, to *GPU) *knocker {
	return newKnocker(Auto, time.Now, func() bool {
		return from.idle(g.knock) && (from == to || to.idle(g.knock))
	})
}

func (g *GPUs) pair(from, to *GPU) (*pair, error) {
	if g.cfg.PeerDisable {
		return nil, errNoPeer
	}
	key := [2]int{from.index, to.index}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, net.ErrClosed
	}
	if p, ok := g.peers[key]; ok {
		if p == nil {
			return nil, errNoPeer
		}
		return p, nil
	}
	if from != to {
		for _, k := range [][2]*GPU{{from, to}, {to, from}} {
			ok, err := g.plat.CanAccess(k[0].index, k[1].index)
			if err == nil && ok {
				err = k[0].card.Reach(k[1].card)
			}
			if !ok || err != nil {
				g.cfg.Log.Warn("no peer access; copies go through host memory", "from", k[0].index, "to", k[1].index, "err", err)
				g.peers[key] = nil
				return nil, errNoPeer
			}
		}
	}
	fixed := g.cfg.Executor
	if fixed == InEngine {
		fixed = Copy // by way of the host, in hops, which engines pack
	}
	p := &pair{learn: newChooser(fixed, 0), within: from == to}
	if from.reaching() == Auto && to.reaching() == Auto {
		p.idle = g.pairProbe(from, to)
	}
	for range PeerPipelines {
		q, err := g.newPeer(from, to)
		if err != nil {
			// One pipeline is slower than two and better than none; with none the host's memory serves.
			g.cfg.Log.Warn("gpu pipeline not made", "from", from.index, "to", to.index, "have", len(p.peers), "err", err)
			break
		}
		p.peers = append(p.peers, q)
	}
	if len(p.peers) == 0 {
		g.peers[key] = nil
		return nil, errNoPeer
	}
	g.peers[key] = p
	g.cfg.Log.Info("gpu pipeline", "from", from.index, "to", to.index, "gpu_bytes_each", uint64(len(p.peers))*pipelineBytes(g.cfg.PeerStage))
	return p, nil
}

// newPeer is called with g.mu held, so that nobody else takes what is found to be left.
func (g *GPUs) newPeer(from, to *GPU) (*Peer, error) {
	need := pipelineBytes(g.cfg.PeerStage)
	sides := []*GPU{from, to}
	for _, u := range sides {
		n := need
		if from == to {
			n = 2 * need
		}
		if err := u.budget.fits(n); err != nil {
			return nil, fmt.Errorf("GPU %d: %w", u.index, err)
		}
	}
	src, err := from.card.NewPacker()
	if err != nil {
		return nil, err
	}
	dst, err := to.card.NewPacker()
	if err != nil {
		return nil, errors.Join(err, src.Close())
	}
	p, err := newPeer(min(MinStage, max(g.cfg.PeerStage/2, 1)), g.cfg.PeerStage, src, dst)
	if err != nil {
		return nil, err
	}
	for _, u := range sides {
		u.budget.pipelines.Add(need)
	}
	return p, nil
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
	for _, p := range g.peers {
		for p != nil && len(p.peers) > 0 {
			errs = append(errs, p.peers[0].Close())
			p.peers = p.peers[1:]
		}
	}
	for _, u := range g.gpus {
		errs = append(errs, u.close())
	}
	return errors.Join(errs...)
}
