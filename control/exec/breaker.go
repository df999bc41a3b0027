package exec

import (
	"fmt"
	"time"
)

// The circuit breaker of an endpoint. A peer that hangs or is cut off costs each request its patience, and the process a connect that hangs.
// After it was not reached for breakAfter, requests that name it are refused at once, so that their engine goes on by itself; after a
// while the next one is let through, and what becomes of it decides. All of this is about connects: no slice ever waits for it.
const (
	breakAfter   = 10 * time.Second       // of tries that failed; breakTries at least
	breakTries   = 2                      // one may be bad luck
	breakFirst   = 500 * time.Millisecond // refused for so long, doubling
	breakMost    = 5 * time.Second        // up to this
	maxEndpoints = 4096                   // remembered; past that, only those that somebody waits for
)

// breaker is part of an endpoint.
type breaker struct {
	failing Instant // the first failure since it was reached
	fails   int
	open    Instant // until when requests are refused; 0: none are
	span    time.Duration
	why     string
}

// failed counts a connect that came to nothing.
func (b *breaker) failed(now Instant, err error) {
	if b.fails == 0 {
		b.failing = now
	}
	b.fails++
	b.why = err.Error()
	if now < b.open {
		return // by those who waited already
	}
	if b.fails >= breakTries && (now-b.failing >= breakAfter || b.span > 0) {
		b.span = min(max(2*b.span, breakFirst), breakMost)
		b.open = now + b.span
	}
}

// refuses says why a request must not wait now; empty: it may.
func (b *breaker) refuses(now Instant) string {
	if now >= b.open {
		return ""
	}
	return fmt.Sprintf("not reached for %v, tried again in %v: %s", (now - b.failing).Round(time.Millisecond), (b.open - now).Round(time.Millisecond), b.why)
}

// until is how long it is worth remembering; 0: it is not.
func (b *breaker) until() Instant {
	if b.fails == 0 {
		return 0
	}
	return max(b.open, b.failing) + breakAfter + breakMost
}

// unreachable says why nothing that names an endpoint can come to anything now.
func (es *endpoints) unreachable(now Instant, addr string) string {
	ep := es.byAddr[addr]
	if ep == nil || ep.reached() {
		return ""
	}
	if why := ep.refuses(now); why != "" {
		return "the sidecar at " + addr + " was " + why
	}
	return ""
}
