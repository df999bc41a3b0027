//go:build !race

package testutil

// Race reports whether the race detector is on: it allocates, and everything takes several times as
// long.
const Race = false
