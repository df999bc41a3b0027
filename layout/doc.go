// Package layout describes KV caches: regions, groups, layers, planes and the runs between two of them. It is pure: no clock,
// no I/O, no goroutine.
package layout
