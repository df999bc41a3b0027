package gpu

import (
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// Engine is what a worker's process can do on its own GPU: a thread of its shim packs and unpacks there in the engine's context, where
// kernels are not time-sliced against the engine's.
type Engine struct {
	Work    *board.Work
	Regions []*mem.Region // of REGISTER, in its order
	Ring    func()        // wakes the thread
	Exited  func() bool   // the process's end is proved
	End     func()        // called once, when nothing uses the others any more
}

// The bounds of work in an engine.
const (
	workTimeout  = 2 * time.Millisecond   // until a slot that nobody has taken is revoked
	engineRest   = 100 * time.Millisecond // then the engine is left alone for so long
	workExitLook = 10 * time.Millisecond  // between two looks whether the engine is dead
	workLate     = 10 * time.Second       // after which the log says that an engine does not finish
	workPause    = 20 * time.Microsecond  // between two looks at a done word
	workSpare    = 2                      // hops that no engine takes: one that is stopped in mid kernel must not stop the others
)

// Why a hop was not done in an engine. After errNoEngine nothing of it runs, and another executor may do it.
var (
	errNoEngine   = errors.New("gpu: the engine did not take the work")
	errEngineGone = errors.New("gpu: the engine died while it worked for us")
)

// engine is an Engine in use. Hops hold it while they use it.
type engine struct {
	Engine
	gpu   *GPU
	spans []lentRegion
	slots chan int // that are free
	seqs  [board.WorkSlots]uint64

	born time.Time

	refs  atomic.Int64 // hops, and the worker itself
	state atomic.Int32
	rest  atomic.Int64 // not to be asked before: time since it was born
}

// The states of an engine.
const (
	engineOpening = iota // OPEN is posted
	engineReady
	engineOff
)

// lentRegion is a region as this process has it mapped.
type lentRegion struct {
	base   cuda.Ptr
	size   uint64
	region int
}

// Attach makes an engine's own context an executor for its regions on one GPU. detach ends that; it does not wait for hops that are under
// way, which hold what they need. A nil detach: there is nothing for it to do here, and e.End was called.
func (g *GPUs) Attach(e Engine) (detach func()) {
	n := &engine{Engine: e, born: time.Now()}
	n.refs.Store(1)
	for i, r := range e.Regions {
		u, _ := r.Device().(*GPU)
		if u == nil || n.gpu != nil && u != n.gpu {
			continue
		}
		n.gpu = u
		n.spans = append(n.spans, lentRegion{cuda.Ptr(r.Base()), r.Size(), i})
	}
	if n.gpu == nil || g.cfg.Method == policy.Pack || g.cfg.Method == policy.Copy || cap(n.gpu.slots) <= workSpare {
		n.release()
		return nil
	}
	u := n.gpu
	handle, err := u.export()
	if err != nil {
		g.cfg.Log.Warn("no packing in the engine's context: the staging buffer cannot be exported", "gpu", u.index, "err", err)
		n.release()
		return nil
	}
	n.slots = make(chan int, min(board.WorkSlots-1, cap(u.slots)-workSpare))
	for i := range cap(n.slots) {
		n.slots <- i + 1
	}
	n.Work.SetHandle(openSlot, handle)
	if n.Work.Post(openSlot, 1, board.WorkRequest{Op: board.WorkOpen, Bytes: u.stagingBytes()}) {
		n.Ring()
	}
	u.setEngines(func(all []*engine) []*engine { return append(all, n) })
	return func() {
		u.setEngines(func(all []*engine) []*engine {
			return slices.DeleteFunc(all, func(o *engine) bool { return o == n })
		})
		n.release()
	}
}

// openSlot is the slot that OPEN goes by; others are for hops.
const openSlot = 0

// acquire makes sure that the engine's board stays. False: it is being let go.
func (e *engine) acquire() bool {
	for {
		n := e.refs.Load()
		if n == 0 {
			return false
		}
		if e.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (e *engine) release() {
	if e.refs.Add(-1) == 0 {
		e.End()
	}
}

// ready reports whether the engine, which is acquired, takes work. It looks at how OPEN ended: nobody waits for that.
func (e *engine) ready() bool {
	switch e.state.Load() {
	case engineReady:
		return time.Since(e.born) >= time.Duration(e.rest.Load())
	case engineOff:
		return false
	}
	refusal, ended := e.Work.Ended(openSlot, 1)
	if !ended {
		return false
	}
	if refusal != 0 {
		e.turnOff("OPEN", refusal)
		return false
	}
	if e.state.CompareAndSwap(engineOpening, engineReady) {
		e.gpu.gpus.cfg.Log.Info("gpu packs in an engine's own context", "gpu", e.gpu.index, "regions", len(e.spans))
	}
	return true
}

// turnOff ends the use of an engine for good; others, and the other executors, carry on.
func (e *engine) turnOff(what string, refusal uint32) {
	if e.state.Swap(engineOff) == engineOff {
		return
	}
	why := "its driver refused: its own log has the error"
	if refusal != board.WorkGpu {
		why = "it found the request impossible"
	}
	e.gpu.gpus.cfg.Log.Warn("no packing in the engine's context any more", "gpu", e.gpu.index, "at", what, "why", why)
}

// find is the region at p, which holds n bytes from there.
func (e *engine) find(p cuda.Ptr, n uint64) *lentRegion {
	for i := range e.spans {
		if s := &e.spans[i]; s.has(p, n) {
			return s
		}
	}
	return nil
}

func (s *lentRegion) has(p cuda.Ptr, n uint64) bool {
	off := uint64(p - s.base)
	return p >= s.base && off <= s.size && n <= s.size-off
}
