// Package health decides whether a GPU or a network interface is fit for use, from what their
// drivers report: Xid errors, memory errors, a lost GPU, throttling; errors, retransmissions and
// lost carriers of a link.
//
// Invariants: GPU and Link have no clock and do no I/O: times and readings are arguments. Their
// state is bounded. A fault ends only after a time without errors. A reading that a driver does not
// provide has no effect.
//
// Goroutines: none.
package health

import "time"

// Kind is the kind of a fault.
type Kind string

// The kinds.
const (
	Xid       Kind = "xid"
	Lost      Kind = "lost"      // the GPU does not answer
	Recovery  Kind = "recovery"  // the driver demands a recovery action
	Memory    Kind = "memory"    // uncorrected errors, rows that cannot be remapped
	Throttled Kind = "throttled" // by heat or power
	Flaps     Kind = "flaps"
	Errors    Kind = "errors"
	Resends   Kind = "retransmissions"
)

// Fault is the reason why a device is not fit.
type Fault struct {
	Kind   Kind // empty: it is fit
	Level  Level
	Text   string
	Remedy Remedy // of a GPU
	Since  time.Time
}
