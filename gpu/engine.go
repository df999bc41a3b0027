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

// Engine is a worker that packs for this process: a thread of its shim launches the kernels in the
// engine's context, where they are not time-sliced against the engine's.
type Engine struct {
	Work    *board.Work
	Regions []*mem.Region // in the order of REGISTER
	Ring    func()        // wakes the thread
	Exited  func() bool   // the exit of the process is proved
	End     func()        // called once, when this process uses nothing of it any more
}

// The bounds of engine work.
const (
	workTimeout  = 2 * time.Millisecond   // until a slot is revoked that the engine has not taken
	engineRest   = 100 * time.Millisecond // pause after a revoked slot
	workExitLook = 10 * time.Millisecond  // between two checks of the engine's exit
	workLate     = 10 * time.Second       // until the log reports an engine that does not finish
	workPause    = 20 * time.Microsecond  // between two checks of a done word
	// staging slots that no engine gets: an engine that stops in a kernel must not block the others.
	workSpare = 2
)

// Why an engine did not do the work. After errNoEngine nothing runs, and another method may do it.
var (
	errNoEngine   = errors.New("gpu: the engine did not take the work")
	errEngineGone = errors.New("gpu: the engine died while it packed for this sidecar")
)

// engine is an Engine in use. Staging slots hold a reference while they use it.
type engine struct {
	Engine
	gpu   *GPU
	spans []lentRegion
	slots chan int // free slots
	seqs  [board.WorkSlots]uint64

	born time.Time

	refs  atomic.Int64 // of staging slots, and of the worker itself
	state atomic.Int32
	rest  atomic.Int64 // no work before: time since born
}

// The states of an engine.
const (
	engineOpening = iota // OPEN is posted
	engineReady
	engineOff
)

// lentRegion is a region as mapped in this process.
type lentRegion struct {
	base   cuda.Ptr
	size   uint64
	region int
}

// Attach lets staging slots of one GPU use the engine's context for its regions. detach ends that.
// It does not wait for slots in use, which hold a reference. detach is nil where the engine is of
// no use; then e.End was called.
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
	if n.gpu == nil || g.cfg.Method == policy.Pack || g.cfg.Method == policy.Copy ||
		cap(n.gpu.slots) <= workSpare {
		n.release()
		return nil
	}
	u := n.gpu
	handle, err := u.export()
	if err != nil {
		g.cfg.Log.Warn("no packing in the engine's context: the staging buffer cannot be exported", "gpu",
			u.index, "err", err)
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

// openSlot is the slot of OPEN; staging slots use the others.
const openSlot = 0

// acquire takes a reference. It returns false after the last release.
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

// ready reports whether the acquired engine takes work. It checks the answer to OPEN without
// waiting for it.
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
		e.gpu.gpus.cfg.Log.Info("gpu packs in an engine's own context", "gpu", e.gpu.index, "regions",
			len(e.spans))
	}
	return true
}

// turnOff ends the use of an engine; other engines and other methods remain.
func (e *engine) turnOff(what string, refusal uint32) {
	if e.state.Swap(engineOff) == engineOff {
		return
	}
	why := "its driver refused; see the engine's log"
	if refusal != board.WorkGpu {
		why = "it rejected the request"
	}
	e.gpu.gpus.cfg.Log.Warn("no packing in the engine's context any more", "gpu", e.gpu.index, "at",
		what, "why", why)
}

// find returns the region that contains n bytes at p.
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
