// Package faulttest adds faults to any transport backend. Wrap decorates a backend; a Plan selects
// the slices that suffer faults, by script or by seed, and counts them.
//
// The faults are those of rails and those of a wrong backend: a slice that fails, is late, is later
// than its lease, vanishes, or leaves only in part; a confirmation that is late, vanishes, or comes
// twice; a slice that is sent two times; a slice that is reported lost and written all the same, at
// the worst moment; a success without proof; a lane that stops moving. Some keep the contract of
// package transport (a delay, a loss that ends InDoubt), some break it on purpose (FalseLanded,
// DuplicateResult, LateWrite): the layers above must not lose data even then.
//
// Invariants: a slice that Move accepted ends exactly once (twice under DuplicateResult). The
// decorator's own slices, the extra ones, go through the wrapped backend like all others, so the
// backend's guards and claims are tested; the decorator itself never touches memory. Its state is
// bounded by the lane's MaxInFlight and by maxExtra.
//
// Goroutines: one per wrapped backend for delayed work; Open starts it, Close joins it.
package faulttest
