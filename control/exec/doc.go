// Package exec is the executor, the state machine of all transfers of one process. It matches
// intents with grants, releases chunks as layers become complete, commits, fences, expires and
// completes. Package spray chooses the lane of each slice and retries failed ones.
//
// It has no goroutine, clock, I/O or lock. Events are method calls with `now`; Drain returns the
// resulting actions in the order in which the driver must perform them. The driver serializes the
// calls. Moving a slice allocates nothing in steady state.
//
// The parts are packages below internal, and each owns its state: see the fields of Exec for the
// parts and their order. Exec takes the events, and turns what the parts ask for into actions.
//
// Invariants:
//   - each lease completes exactly once, by lease.MayRelease;
//   - a commit needs a full bitmap, both leases, and the fence;
//   - a destination lease is granted in parts, one for each rank of the source's engine that sends
//     something; together they are all missing bytes, and the commit needs every part;
//   - slices name only bound origins; nothing counts after an origin's guard is revoked;
//   - every lease has a deadline, every wait ends by it, and then only a fence starts;
//   - all tables are bounded (package lease and Config).
package exec
