// Package local keeps the leases that a sidecar serves without the executor, because no other
// sidecar takes part: copies between an engine's regions, and pages of the node's store.
//
// Invariants: a lease is open from Open to its end. A worker's memory is released after its last
// lease (After). A lease of Run has one goroutine; Wait returns after the last lease.
package local

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvspray/kvspray/control/engines"
)

// Why a lease ended early.
var (
	ErrCanceled = errors.New("cancelled by the engine")
	ErrLate     = errors.New("the deadline has passed")
	ErrGone     = errors.New("the engine worker is gone")
)

// Leases are the open leases of all workers.
type Leases struct {
	ctx context.Context // of all leases
	wg  sync.WaitGroup

	mu   sync.Mutex // protects all below
	open map[*engines.Worker]map[lease]open
	last map[*engines.Worker]func() // called at the end of a worker's last lease
	// faults are why leases of workers fail.
	faults map[*engines.Worker]error
}

// lease names a lease of a worker.
type lease struct {
	id   uint64 // any number: the engine, or this sidecar, has chosen it
	peer bool   // OpenPeer has opened it
}

// open is an open lease; its context ends when the lease is canceled.
type open struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
}

// New makes an empty set. The end of ctx ends all leases.
func New(ctx context.Context) *Leases {
	return &Leases{ctx: ctx, open: map[*engines.Worker]map[lease]open{},
		last:   map[*engines.Worker]func(){},
		faults: map[*engines.Worker]error{}}
}

// Run opens a lease and serves it by serve, on a goroutine of its own.
func (l *Leases) Run(w *engines.Worker, id uint64, deadline time.Duration,
	serve func(context.Context)) {
	ctx, end := l.Open(w, id, deadline)
	go func() {
		defer end()
		serve(ctx)
	}()
}

// Open opens a lease, until end is called, once. The context ends at the deadline, and when the
// lease is canceled; its cause is one of the errors above.
func (l *Leases) Open(w *engines.Worker, id uint64, deadline time.Duration) (_ context.Context,
	end func()) {
	return l.begin(w, lease{id, false}, deadline)
}

// OpenPeer is Open for a lease of a peer on a worker's memory. The worker's own leases may have the
// same ids, and it cannot cancel this one.
func (l *Leases) OpenPeer(w *engines.Worker, id uint64, deadline time.Duration) (_ context.Context,
	end func()) {
	return l.begin(w, lease{id, true}, deadline)
}

func (l *Leases) begin(w *engines.Worker, id lease, deadline time.Duration) (_ context.Context,
	end func()) {
	ctx, cancel := context.WithCancelCause(l.ctx)
	l.mu.Lock()
	if l.open[w] == nil {
		l.open[w] = map[lease]open{}
	}
	l.open[w][id] = open{ctx, cancel}
	if why := l.faults[w]; why != nil {
		cancel(why)
	}
	l.mu.Unlock()
	l.wg.Add(1)
	late := time.AfterFunc(deadline, func() { cancel(ErrLate) })
	return ctx, func() {
		late.Stop()
		cancel(nil)
		l.ended(w, id)
		l.wg.Done()
	}
}

// Cancel reports whether the lease is one of these, and cancels it.
func (l *Leases) Cancel(w *engines.Worker, id uint64, reason string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	o, ok := l.open[w][lease{id, false}]
	if ok {
		o.cancel(fmt.Errorf("%w: %s", ErrCanceled, reason))
	}
	return ok
}

// Gone soon ends the open leases of a worker.
func (l *Leases) Gone(w *engines.Worker) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.faults, w)
	l.endLocked(w, ErrGone)
}

// SetFault sets why open and new leases of a worker fail, until it is gone; nil: they do not.
func (l *Leases) SetFault(w *engines.Worker, why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if why == nil {
		delete(l.faults, w)
		return
	}
	l.faults[w] = why
	l.endLocked(w, why)
}

// endLocked soon ends the open leases of a worker.
func (l *Leases) endLocked(w *engines.Worker, why error) {
	for _, o := range l.open[w] {
		o.cancel(why)
	}
}

// Stop soon ends all open leases.
func (l *Leases) Stop(why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for w := range l.open {
		l.endLocked(w, why)
	}
}

// After calls f once w has no lease here. None may start later.
func (l *Leases) After(w *engines.Worker, f func()) {
	l.mu.Lock()
	wait := len(l.open[w]) > 0
	if wait {
		l.last[w] = f
	}
	l.mu.Unlock()
	if !wait {
		f()
	}
}

// Count returns the open leases, how many of these are canceled, and the workers whose memory waits
// for their last one.
func (l *Leases) Count() (leases, canceled, waiting int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, all := range l.open {
		leases += len(all)
		for _, o := range all {
			if o.ctx.Err() != nil {
				canceled++
			}
		}
	}
	return leases, canceled, len(l.last)
}

// Wait returns once every lease has ended.
func (l *Leases) Wait() { l.wg.Wait() }

func (l *Leases) ended(w *engines.Worker, id lease) {
	l.mu.Lock()
	delete(l.open[w], id)
	var f func()
	if len(l.open[w]) == 0 {
		f = l.last[w]
		delete(l.open, w)
		delete(l.last, w)
	}
	l.mu.Unlock()
	if f != nil {
		f()
	}
}

// Status is how a lease ended that err stopped; nil: it is complete.
func Status(err error) uint16 {
	switch {
	case err == nil:
		return engines.StatusOK
	case errors.Is(err, ErrCanceled):
		return engines.StatusCancelled
	case errors.Is(err, ErrLate):
		return engines.StatusExpired
	}
	return engines.StatusFailed
}
