// Package faulttest puts faults into any transport backend. Wrap decorates a backend; a Plan says which slices suffer what, by
// script or by seed, and counts it.
//
// The faults are those that rails have, and those that a wrong backend would have: a slice that fails, is late, is later than
// its lease, vanishes, or leaves only in part; a confirmation that is late, vanishes, or comes twice; a slice that is sent
// twice; one that is reported lost and written all the same, at the worst moment; a success that nobody proved; a lane on
// which nothing moves any more.
// Some keep the contract of package transport (a delay, a loss that ends InDoubt), some break it on purpose (FalseLanded,
// DuplicateResult, LateWrite): what is above a backend must not lose data even then.
//
// Invariants: a slice that Move took ends exactly once (twice under DuplicateResult); what the decorator sends on its own
// account, a ghost, goes through the wrapped backend like everything else, so that its guards and claims are what is
// tested; the decorator itself never touches memory. What it holds is bounded by the lane's MaxInFlight and by maxGhosts.
//
// Goroutines: one per wrapped backend, for what is late; Open starts it, Close joins it.
package faulttest
