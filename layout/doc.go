// Package layout describes KV caches: regions, groups, layers, planes, and the runs between two of
// them.
//
// It owns the terms (plane, run, piece), the bounds of a registered layout, its msgpack form
// (docs/protocol.md, section 3), and the geometry: the hash of the properties that shape the
// transfer space. The fingerprint, which covers the meaning of bytes, is in parseblock, because it
// depends on the content of pages.
//
// Invariants: a Layout that passed Validate has only pages inside its regions, no two layers of a
// group share a byte, and no offset computed from it overflows. The described memory depends only
// on bases, strides, page bytes and planes, never on tensor shapes.
//
// The package is pure: no clock, no I/O, no goroutine. A Layout is read-only once it is shared.
package layout
