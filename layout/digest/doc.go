// Package digest computes the content digest of KV caches: a sum over their bytes that depends on
// what the bytes mean (token, layer, plane, head, position in the head), not on where they lie.
// Caches of one prompt in different layouts have equal digests, and the digests of parts add up to
// the digest of the whole, wherever a page or a row is divided. docs/content-digest.md has the
// definition and its bounds.
//
// It owns the weights of a seed, the units of a plane (Units) and their sum. It uses the registered
// planes and one side's memory, and no plan: therefore a fault of a plan changes one side's digest
// and not the other's.
//
// The package is pure: no clock, no I/O, no goroutine. A Key is not safe for concurrent use.
package digest
