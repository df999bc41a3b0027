package endpoint

import (
	"fmt"
	"time"
)

// The circuit breaker of an endpoint. An unreachable peer costs each request its match timeout, and
// the process a connect that hangs. After failures for BreakAfter, requests for the endpoint are
// refused at once, so that their engines recompute. After a while one request is let through, and
// its connect decides. All of this concerns connects: no slice waits for a breaker.
const (
	BreakAfter   = 10 * time.Second       // of tries that failed; breakTries at least
	breakTries   = 2                      // one may be bad luck
	breakFirst   = 500 * time.Millisecond // refused for so long, doubling
	BreakMax     = 5 * time.Second        // up to this
	MaxEndpoints = 4096                   // remembered; beyond that, only used ones
)

// breaker is the circuit breaker of an endpoint.
type breaker struct {
	failing Instant // the first failure since it was reached
	fails   int
	open    Instant // until when requests are refused; 0: none are
	span    time.Duration
	why     string
}

// failed counts a failed connect.
func (b *breaker) failed(now Instant, err error) {
	if b.fails == 0 {
		b.failing = now
	}
	b.fails++
	b.why = err.Error()
	if now < b.open {
		return // a try for requests that waited before the breaker opened
	}
	if b.fails >= breakTries && (now-b.failing >= BreakAfter || b.span > 0) {
		b.span = min(max(2*b.span, breakFirst), BreakMax)
		b.open = now + b.span
	}
}

// refuses returns why a request is refused now; empty: it is not.
func (b *breaker) refuses(now Instant) string {
	if now >= b.open {
		return ""
	}
	return fmt.Sprintf("not reached for %v, tried again in %v: %s",
		(now - b.failing).Round(time.Millisecond), (b.open - now).Round(time.Millisecond), b.why)
}

// until is how long the failures are worth remembering; 0: there are none.
func (b *breaker) until() Instant {
	if b.fails == 0 {
		return 0
	}
	return max(b.open, b.failing) + BreakAfter + BreakMax
}

// Unreachable returns why requests for an endpoint are refused now; empty: they are not.
func (t *Table) Unreachable(now Instant, addr string) string {
	ep := t.byAddr[addr]
	if ep == nil || ep.Reached() {
		return ""
	}
	if why := ep.refuses(now); why != "" {
		return "the sidecar at " + addr + " was " + why
	}
	return ""
}
