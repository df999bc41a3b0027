package proxy

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// guard ends a request whose engine shows no sign of life, or gives no first byte in time. It owns
// one goroutine until stop.
type guard struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	// Either the client gets bytes, and no other engine can take the request over, or the guard ends
	// the request for another engine: the first of both decides.
	decided atomic.Bool
	wg      sync.WaitGroup
}

// guard begins; other reports whether something better than a silent engine is there.
func (p *Proxy) guard(ctx context.Context, b *backend, bound time.Duration,
	other func() bool) *guard {
	g := &guard{}
	g.ctx, g.cancel = context.WithCancelCause(ctx)
	g.wg.Go(func() {
		tick, late := time.NewTicker(p.times.Check), time.NewTimer(bound)
		defer tick.Stop()
		defer late.Stop()
		for {
			select {
			case <-g.ctx.Done():
				return
			case <-late.C:
				g.replace(errLate)
			case <-tick.C:
				switch quiet, dead := b.quiet(); {
				case dead:
					g.cancel(errSilent) // also if the client has bytes
				case quiet && !g.decided.Load() && other():
					g.replace(errSilent)
				}
			}
		}
	})
	return g
}

// replace ends the request, unless the client gets bytes.
func (g *guard) replace(cause error) {
	if g.decided.CompareAndSwap(false, true) {
		g.cancel(cause)
	}
}

// begin reports whether the client can get the answer. If not, ctx has ended.
func (g *guard) begin() bool {
	if !g.decided.CompareAndSwap(false, true) {
		<-g.ctx.Done() // the guard ends it
	}
	return g.ctx.Err() == nil
}

func (g *guard) stop() {
	g.cancel(nil)
	g.wg.Wait()
}

// cause is the reason of an error of the request, before stop.
func (g *guard) cause(err error) error {
	if c := context.Cause(g.ctx); errors.Is(c, errLate) || errors.Is(c, errSilent) {
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
