package proxy

import (
	"fmt"
	"time"
)

// condition is the health of an engine. Choices prefer a lower one.
type condition uint8

const (
	fit     condition = iota
	slow              // its health check takes long, or its devices have a fault
	busy              // it has answered 429, or 503 with a time, which is not over
	failing           // its requests failed
	silent            // no sign of life: a better engine takes over requests without a byte
	down              // no process serves there: it gets no requests
)

func (c condition) String() string {
	return [...]string{"fit", "slow", "busy", "failing", "silent", "down"}[c]
}

const (
	downAfter    = 2 // failed health checks in a row
	deadFactor   = 5 // a silent engine is down after this multiple of Times.Silent
	maxDoublings = 10
	longestRest  = 30 * time.Second // of an engine whose requests fail
	acceptTime   = time.Second      // for a connection, before silence counts against the engine
)

// health derives the condition of one engine from its health checks and its requests. It has no
// clock: times are arguments. lastByte is when any of its requests got bytes.
type health struct {
	slowAfter   time.Duration // of an unanswered check
	silentAfter time.Duration // the same
	firstRest   time.Duration // after a failed request; doubles with each further one

	checked   bool      // a check has an outcome
	bad       int       // checks in a row with an error as answer, or without a listener
	gone      bool      // by a request; the next good check ends it
	asked     time.Time // of the first check without an answer; zero: all were answered
	passed    time.Time // of the last call of passes
	lateCheck bool      // the last answer to a check came after slowAfter
	failures  int       // failed requests in a row
	begun     bool      // a request after them has bytes
	restUntil time.Time // after failures
	busyUntil time.Time
	reason    string
	fault     string    // of its devices, by its sidecar; empty: none
	answered  time.Time // of the last answer to a check
	unreached time.Time // begin of a connection that was not accepted in time; zero: none
}

// asks notes that a check begins.
func (h *health) asks(now time.Time) {
	if h.asked.IsZero() {
		h.asked = now
	}
}

// unaccepted notes that a connection which began at a time has not been accepted in acceptTime. An
// engine that has sent something since then lives: a burst of connections fills its backlog.
func (h *health) unaccepted(begun, lastByte time.Time) {
	if !h.answered.After(begun) && !lastByte.After(begun) {
		h.unreached = begun
	}
}

// lost reports whether a connection was not accepted, and nothing has come from the engine since.
func (h *health) lost(lastByte time.Time) bool {
	return !h.unreached.IsZero() && !lastByte.After(h.unreached)
}

// passes notes that the router runs. Time in which the router itself was stopped, or had no CPU, is
// no silence of the engine. every is the time between two calls.
func (h *health) passes(now time.Time, every time.Duration) {
	slept := now.Sub(h.passed) - every
	if first := h.passed.IsZero(); !first && slept > every && !h.asked.IsZero() {
		h.asked = h.asked.Add(slept)
	}
	h.passed = now
}

// answers notes the outcome of a check.
func (h *health) answers(now time.Time, s sign, err error) {
	switch s {
	case signNone:
		h.asked = time.Time{} // it was not asked
		return
	case signAlive:
		if h.bad >= downAfter || h.gone {
			h.failures, h.restUntil, h.busyUntil = 0, time.Time{}, time.Time{} // of the old process
		}
		h.lateCheck = now.Sub(h.asked) >= h.slowAfter
		h.bad, h.gone = 0, false
		if h.failures == 0 {
			h.reason = ""
		}
	case signLate:
		h.checked, h.reason = true, err.Error()
		return // asked stays: the silence goes on
	default:
		h.bad = min(h.bad+1, downAfter)
		if !h.checked || s == signRefused {
			h.bad = downAfter // no good check is known, or no process is there
		}
		h.lateCheck, h.reason = false, err.Error()
	}
	h.checked, h.asked, h.answered, h.unreached = true, time.Time{}, now, time.Time{}
}

// request notes the outcome of a request; after is of a busy engine.
func (h *health) request(now time.Time, s sign, after time.Duration, err error) {
	switch s {
	case signNone:
		return
	case signAlive:
		h.failures, h.restUntil, h.busyUntil = 0, time.Time{}, time.Time{}
		if h.bad == 0 && h.asked.IsZero() {
			h.reason = ""
		}
		return
	case signBusy:
		h.busyUntil = now.Add(after)
	case signRefused:
		h.gone, h.checked = true, true
	default:
		// Requests that were on their way together count as one.
		if now.Before(h.restUntil) {
			break
		}
		h.failures, h.begun = h.failures+1, false
		h.restUntil = now.Add(min(h.firstRest<<min(h.failures-1, maxDoublings), longestRest))
	}
	h.reason = err.Error()
}

// trial reports whether the engine gets one request at a time, to see whether it still fails.
func (h *health) trial() bool { return h.failures > 0 && !h.begun }

// begins notes the first bytes of a good answer.
func (h *health) begins() { h.begun = true }

// dead reports whether a silence is that of an engine that is down.
func (h *health) dead(silence time.Duration) bool { return silence >= deadFactor*h.silentAfter }

// silence is for how long the engine has shown no sign of life.
func (h *health) silence(now, lastByte time.Time) time.Duration {
	if h.asked.IsZero() {
		return 0
	}
	since := h.asked
	if lastByte.After(since) {
		since = lastByte
	}
	return now.Sub(since)
}

func (h *health) condition(now, lastByte time.Time) condition {
	quiet := h.silence(now, lastByte)
	switch {
	case h.bad >= downAfter, h.gone, h.dead(quiet):
		return down
	case quiet >= h.silentAfter, h.lost(lastByte):
		return silent
	case now.Before(h.restUntil):
		return failing
	case now.Before(h.busyUntil):
		return busy
	case h.fault != "", h.lateCheck, !h.asked.IsZero() && now.Sub(h.asked) >= h.slowAfter:
		return slow
	}
	return fit
}

// why is for the operator; empty: the engine is fit.
func (h *health) why(now, lastByte time.Time) string {
	switch c := h.condition(now, lastByte); {
	case c == fit:
		return ""
	case c == slow && h.fault != "":
		return h.fault
	case c == slow:
		return fmt.Sprintf("its health check takes longer than %s", h.slowAfter)
	case c == silent && h.lost(lastByte):
		return fmt.Sprintf("a connection was not accepted within %s, and nothing has come since",
			acceptTime)
	case h.reason == "":
		return fmt.Sprintf("no sign of life for %s", h.silence(now, lastByte).Round(time.Second))
	}
	return h.reason
}
