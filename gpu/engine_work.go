package gpu

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// workSlot is a slot of an engine's work memory that a staging slot has acquired. The zero value is
// none.
type workSlot struct {
	engine *engine
	slot   int
}

// findWorkSlot finds an engine that has all blocks of h and is ready.
func (u *GPU) findWorkSlot(h *slot) (none workSlot) {
	all := *u.engines.Load()
	i := slices.IndexFunc(all, func(e *engine) bool {
		return e.find(cuda.Ptr(h.pieces[0].Off),
			h.pieces[0].Len) != nil
	})
	if i < 0 || !h.lent {
		return none
	}
	e := all[i]
	if !e.acquire() {
		return none
	}
	if e.ready() && e.has(h) {
		select {
		case slot := <-e.slots:
			return workSlot{e, slot}
		default:
		}
	}
	e.release()
	return none
}

// has reports whether all blocks of h are in the engine's regions.
func (e *engine) has(h *slot) bool {
	for i := range h.pieces {
		if e.find(cuda.Ptr(h.pieces[i].Off), h.pieces[i].Len) == nil {
			return false
		}
	}
	return true
}

// release ends what findWorkSlot began. The slot of a dead engine is not used again.
func (w workSlot) release(err error) {
	if !errors.Is(err, errEngineGone) {
		w.engine.slots <- w.slot
	}
	w.engine.release()
}

// run makes the engine pack or unpack h, and waits for the end.
func (w workSlot) run(h *slot, op uint32) error {
	e, slot := w.engine, w.slot
	runs, axes := 0, mem.OneAxis
	if e.Work.Rows() {
		axes = mem.BothAxes
	}
	var bytes uint64
	for rest := h.pieces; len(rest) > 0; {
		region := e.find(cuda.Ptr(rest[0].Off), rest[0].Len)
		// A run ends with its region: in the engine, regions are at other distances.
		n := 1
		for n < len(rest) && region.has(cuda.Ptr(rest[n].Off), rest[n].Len) {
			n++
		}
		for here := rest[:n]; len(here) > 0; {
			r, first := mem.Leading(here, axes), &here[0]
			runs = e.Work.SetRun(slot, runs, board.WorkRun{Region: region.region,
				Off: first.Off - uint64(region.base), Stride: r.Stride, Outer: r.Outer,
				Len: uint32(first.Len), Count: r.Count, Rows: r.Rows})
			bytes += r.Pieces() * first.Len
			here = here[r.Pieces():]
		}
		rest = rest[n:]
	}
	e.seqs[slot]++
	seq := e.seqs[slot]
	if e.Work.Post(slot, seq, board.WorkRequest{Op: op, Runs: uint32(runs), Dense: h.at, Bytes: bytes,
		Blocks: uint32(e.gpu.packBlocks)}) {
		e.Ring()
	}
	return e.wait(slot, seq)
}

// wait returns when nothing of a slot runs or will run.
func (e *engine) wait(slot int, seq uint64) (err error) {
	start := time.Now()
	looked, late := start, false
	var refusal uint32
	revocable := true
	device.Poll(workPause, func() bool {
		var ended bool
		if refusal, ended = e.Work.Ended(slot, seq); ended {
			return true
		}
		now := time.Now()
		if revocable && now.Sub(start) > e.gpu.gpus.workTimeout {
			if revocable = false; e.Work.Revoke(slot, seq) {
				e.rest.Store(int64(time.Since(e.born) + engineRest))
				err = errNoEngine
				return true
			}
		}
		if now.Sub(looked) > workExitLook {
			if looked = now; e.Exited() {
				err = errEngineGone
				return true
			}
			if !late && now.Sub(start) > workLate {
				late = true
				e.gpu.gpus.cfg.Log.Warn("an engine does not finish its work; its blocks are held until it "+
					"finishes or exits", "gpu", e.gpu.index,
					"after", workLate)
			}
		}
		return false
	})
	if err == nil && refusal != 0 {
		e.turnOff("a kernel", refusal)
		err = fmt.Errorf("%w: refused (%d)", errNoEngine, refusal)
	}
	return err
}
