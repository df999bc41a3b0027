// Package layout describes KV caches: regions, groups, layers, planes, and the runs between two of them.
//
// It owns the words (plane, run, piece), the bounds that a registered layout must keep, its msgpack form (docs/protocol.md,
// section 3), and the geometry: the hash of what shapes the transfer space. The fingerprint, of what must be equal for bytes to mean
// the same, is parseblock's: it needs to know what pages hold.
//
// Invariants: a Layout that passed Validate has only pages inside its regions, no two layers of a group share a byte, and no
// offset computed from it overflows. What memory is described never depends on tensor shapes, only on bases, strides, page
// bytes and planes.
//
// It is pure: no clock, no I/O, no goroutine. A Layout is read-only once it is shared.
package layout
