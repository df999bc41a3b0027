package proxy

import (
	"context"
	"errors"
	"maps"
	"net/http/httptrace"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// guard ends a request whose engine is silent, or sends no first byte in time. It needs no
// goroutine or timer for each stream: Watch checks all guards of an engine.
type guard struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	b      *backend
	other  func() bool // something better than a silent engine is there
	late   *time.Timer
	// The request has a connection. It need not be the one that was dialed for it: net/http takes one
	// that becomes idle first. From then on the engine may receive the request.
	reached atomic.Bool
	// Either the client gets bytes, and no other engine can take the request over, or the guard ends
	// the request for another engine: the first of both decides.
	decided atomic.Bool
	// Another engine can continue the answer, of which the client has a part.
	movable atomic.Bool
}

// guardKey is the key of the guard in the context of its request, for the dialer.
type guardKey struct{}

func newGuard(ctx context.Context, b *backend, bound time.Duration, other func() bool) *guard {
	g := &guard{b: b, other: other}
	ctx = httptrace.WithClientTrace(context.WithValue(ctx, guardKey{}, g),
		&httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { g.reached.Store(true) }})
	g.ctx, g.cancel = context.WithCancelCause(ctx)
	g.late = time.AfterFunc(bound, func() { g.replace(errLate) })
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.guards == nil {
		b.guards = map[*guard]struct{}{}
	}
	b.guards[g] = struct{}{}
	return g
}

// checkGuards ends requests of an engine that is silent.
func (b *backend) checkGuards() {
	quiet, dead := b.quiet()
	if !quiet {
		return
	}
	b.mu.Lock()
	all := slices.Collect(maps.Keys(b.guards))
	b.mu.Unlock()
	for _, g := range all {
		switch {
		case dead, g.movable.Load() && g.other():
			g.cancel(errSilent) // also if the client has bytes
		case !g.decided.Load() && g.other():
			g.replace(errSilent)
		}
	}
}

// replace ends the request, unless the client gets bytes.
func (g *guard) replace(cause error) {
	if g.decided.CompareAndSwap(false, true) {
		g.cancel(cause)
	}
}

// begin reports whether the client can get the answer. If not, ctx has ended.
func (g *guard) begin() bool {
	g.late.Stop()
	if !g.decided.CompareAndSwap(false, true) {
		<-g.ctx.Done() // the guard ends it
	}
	return g.ctx.Err() == nil
}

func (g *guard) stop() {
	g.late.Stop()
	g.cancel(nil)
	g.b.mu.Lock()
	defer g.b.mu.Unlock()
	delete(g.b.guards, g)
}

// cause is the reason of an error of the request, before stop.
func (g *guard) cause(err error) error {
	c := context.Cause(g.ctx)
	if errors.Is(c, errUnaccepted) && g.reached.Load() {
		return errSilent // a connection came while the guard ended the request
	}
	if errors.Is(c, errLate) || errors.Is(c, errSilent) || errors.Is(c, errUnaccepted) {
		return c
	}
	return err
}

// race decides between the failure of P and the answer of D. Its nil value has no P.
type race struct {
	stop func() // ends D's request

	mu       sync.Mutex // guards all below
	failed   bool
	answered bool
}

func (r *race) prefillFailed() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failed = true; !r.answered {
		r.stop()
	}
}

// decodeAnswers reports whether the client gets D's answer.
func (r *race) decodeAnswers() bool {
	if r == nil {
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answered = !r.failed
	return r.answered
}
