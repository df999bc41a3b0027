// Package placement prices the places where a prompt can run, and ranks them by the predicted time
// to the first token (TTFT).
//
// An engine that has a part of the prompt in its cache computes less of it. Another engine can
// fetch that part over links whose rates are known, or compute all of it. The price of a choice has
// five parts: queue, prefill, transfer, the overlap of these two, and the first decode step.
// docs/placement.md has the formulas.
//
// The package also has a cost model for moving query rows to a cache within a layer (Rows). Fit
// fits its two constants per fabric, as those of links.
//
// Invariants: a longer hit never raises the best price, and a choice never gets cheaper because
// something became slower. Rank and Decide agree. The package is pure: no clock, no I/O, no
// goroutine. Decide allocates nothing.
package placement
