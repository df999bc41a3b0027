package connector

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/connector/internal/blocks"
	"github.com/kvspray/kvspray/connector/internal/process"
	"github.com/kvspray/kvspray/connector/internal/watch"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// Reasons for the end of a worker.
var (
	ErrExited     = errors.New("connector: the engine worker's exit is proved")
	ErrSuperseded = errors.New("connector: a new session of the same engine worker took over")
	ErrBoard      = errors.New("connector: the engine worker broke its board")
)

// Errors of Complete.
var (
	ErrGone         = errors.New("connector: the worker is gone")
	ErrUnknownLease = errors.New("connector: no such open lease")
)

// worker is the state behind a Worker.
//
// Lock order: deliver, then mu. Options.Events and Copy, and Store.Start, are called with deliver
// held and mu free; they may call Complete and SourceValid.
type worker struct {
	// Set once.
	s      *Server
	pub    *engines.Worker
	log    *slog.Logger
	proc   *process.Peer
	flags  *board.Flags
	tables []layout.Table // of the layout
	done   chan struct{}  // closed when every lease is fenced and the memory is released

	// lease id -> *lease, open source leases; SourceValid reads it without a lock
	sources  sync.Map
	signals  signals
	watched  watch.Entry // of signals
	draining atomic.Bool // BYE was sent: no new leases
	regions  regions

	deliver sync.Mutex      // protects the next two
	gone    bool            // WorkerGone was delivered: no more events
	batch   []engines.Event // being delivered; its memory is reused

	mu          sync.Mutex // protects all below
	session     *session   // nil when the socket is closed
	submissions submissions
	completions completions
	steps       steps
	rings       *mem.Region
	leases      map[uint64]*lease
	guard       *blocks.Guard // of the memory that open leases write, or put into the store
	copies      int           // open
	segments    segments
	pools       pools
	blockIDs    int               // in the tables of open leases and of their pending steps
	held        map[uint64]*lease // those that wait for a stream mark
	pending     []engines.Event   // decoded and accepted, not delivered
	starts      []func()          // likewise, leases for copies and pages: they need no executor
	closed      bool              // rings are not touched any more
	broken      error             // the ring is invalid
	detached    *time.Timer
}

// lease is one open lease. Fields but epoch are guarded by worker.mu.
type lease struct {
	id       uint64
	source   bool
	isCopy   bool           // a COPY or LOAD; not a source
	load     *loadFlag      // of a LOAD
	pool     *openPool      // of a GET or PUT
	regions  []*addedRegion // that a COPY, LOAD, GET or PUT accesses
	epoch    atomic.Uint32  // 0: closed to readers
	tokens   uint32
	attempt  uint32
	preempt  bool // blocks are lost; the next STEP of a later attempt revives the lease
	canceled bool
	steps    []pendingStep // oldest first
	reported []uint32      // per flat layer: tokens reported to the control layer
	ids      int           // block ids of the table that the control layer holds
	held     *held         // destination: it waits for a stream mark
}

func (w *worker) leaseID(l *lease) transfer.LeaseID {
	return transfer.LeaseID{Boot: w.pub.Boot, ID: l.id, Epoch: l.epoch.Load()}
}

// publishWaitingLocked publishes to the watcher how many leases wait for GPU writes.
func (w *worker) publishWaitingLocked() {
	w.signals.holding.Store(len(w.held) > 0)
	w.signals.waiting.Store(int32(len(w.steps.leases) + len(w.held)))
}

// run is the ring's goroutine: it drains records, delivers events, and sleeps on the SQ eventfd.
func (w *worker) run() {
	defer w.s.wg.Done()
	for {
		w.pump()
		w.mu.Lock()
		if w.closed || w.broken != nil {
			err, closed := w.broken, w.closed
			w.mu.Unlock()
			if !closed {
				w.s.retire(w, fmt.Errorf("%w: %w", ErrBoard, err))
			}
			return
		}
		sleep := w.submissions.ring.Sleep() && w.pendingLocked() == 0
		w.mu.Unlock()
		if !sleep {
			continue
		}
		if err := w.submissions.await(); err != nil {
			if errors.Is(err, os.ErrClosed) {
				return
			}
			w.mu.Lock()
			w.broken = fmt.Errorf("submission eventfd: %w", err)
			w.mu.Unlock()
		}
	}
}

// pump drains the ring, follows the flags and delivers, until no work is left.
func (w *worker) pump() {
	w.deliver.Lock()
	defer w.deliver.Unlock()
	if w.gone {
		return
	}
	for {
		w.mu.Lock()
		more := w.submissions.drainLocked(drainBatch)
		w.steps.followLocked()
		w.followHeldLocked()
		starts := w.starts
		w.starts = nil
		w.batch, w.pending = w.pending, w.batch
		follow := w.signals.Waiting() && !w.closed
		w.mu.Unlock()
		if follow {
			w.s.watch.Add(&w.watched)
		}
		// A lease starts before the event that cancels it.
		for _, start := range starts {
			start()
		}
		if len(w.batch) > 0 {
			w.s.opt.Events(w.batch)
			clear(w.batch)
			w.batch = w.batch[:0]
		} else if len(starts) == 0 && !more {
			return
		}
	}
}

func (w *worker) breakLocked(err error) {
	if w.broken == nil {
		w.broken = err
		for _, l := range w.leases {
			l.epoch.Store(0)
		}
	}
}

var recordNames = map[uint16]string{board.RecStep: "step", board.RecIntent: "intent",
	board.RecExpect: "expect", board.RecCancel: "cancel",
	board.RecPreempt: "preempt", board.RecHold: "hold", board.RecYield: "yield", board.RecCopy: "copy",
	board.RecGet: "get", board.RecPut: "put", board.RecLoad: "load", board.RecBatch: "batch"}

func (w *worker) recordLocked(rec board.Record) {
	kind := recordNames[rec.Type]
	var err error
	switch rec.Type {
	case board.RecStep:
		err = w.steps.stepLocked(rec)
	case board.RecIntent:
		err = w.intentLocked(rec)
	case board.RecExpect:
		err = w.expectLocked(rec)
	case board.RecCopy, board.RecLoad:
		err = w.copyLocked(rec)
	case board.RecBatch:
		err = w.batchLocked(rec)
	case board.RecGet, board.RecPut:
		err = w.pagesLocked(rec)
	case board.RecCancel, board.RecPreempt, board.RecHold, board.RecYield:
		err = w.changeLocked(rec)
	default:
		kind = "unknown"
		err = &msg.Error{Message: "record", Field: "type", Problem: fmt.Sprintf("type %d is unknown",
			rec.Type),
			Remedy: "this sidecar is older than the shim: upgrade it"}
	}
	if err != nil {
		w.submissions.complainLocked(kind, err)
		return
	}
	w.s.hookRecord(kind)
}

func (w *worker) eventLocked(e engines.Event) {
	e.Worker = w.pub
	w.pending = append(w.pending, e)
}

// pendingLocked counts what waits for delivery.
func (w *worker) pendingLocked() int { return len(w.pending) + len(w.starts) }

// complete ends an open lease towards the shim.
func (w *worker) complete(c engines.Completion) error {
	enc := encodeCompletion(c)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return fmt.Errorf("complete %s: %w", c.Lease, ErrGone)
	}
	l := w.leases[c.Lease.ID]
	if l == nil || c.Lease.Boot != w.pub.Boot {
		return fmt.Errorf("complete %s: %w", c.Lease, ErrUnknownLease)
	}
	if l.source == c.Received {
		return fmt.Errorf("complete %s: received = %v, but source = %v: %w", c.Lease, c.Received,
			l.source, ErrUnknownLease)
	}
	// before the lease counts as complete: a drain that waits for the last one closes the ring
	w.completions.postLocked(enc)
	w.closeLeaseLocked(l)
	return nil
}

func (w *worker) closeLeaseLocked(l *lease) {
	l.epoch.Store(0)
	w.steps.dropLocked(l)
	if l.held != nil {
		w.unholdLocked(l)
	}
	w.blockIDs -= l.ids
	delete(w.leases, l.id)
	w.unuseLocked(l)
	w.guard.Release(l.id)
	if l.isCopy {
		w.copies--
	}
	w.unusePoolLocked(l)
	if l.source {
		w.sources.Delete(l.id)
	}
	w.s.hookLeases(l.source, -1)
	w.pub.Leases.Add(-1)
}

// shut stops using the rings and forgets the leases; the memory stays until release.
func (w *worker) shut() {
	if w.shutOnce() {
		// ends run; without a lock, since Close waits for run's current check, which takes the lock
		_ = w.submissions.event.Close()
	}
}

func (w *worker) shutOnce() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return false
	}
	w.closed = true
	w.pending, w.starts = nil, nil
	if w.detached != nil {
		w.detached.Stop()
	}
	if w.signals.later != nil {
		w.signals.later.Stop()
	}
	w.completions.stopLocked()
	for _, l := range w.leases {
		w.closeLeaseLocked(l)
	}
	w.rings.Release()
	w.proc.Close() // ends the exit watch
	return true
}

// release frees the engine's memory once everything is fenced.
func (w *worker) release() {
	all := slices.Clone(w.pub.Regions)
	w.mu.Lock()
	for _, a := range w.regions.added {
		all = append(all, a.Region)
	}
	clear(w.regions.added)
	w.mu.Unlock()
	w.s.freeRegions(all)
	close(w.done)
}
