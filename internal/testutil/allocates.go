package testutil

import (
	"runtime"
	"testing"
)

// allocNoise bounds the allocations of the rest of the process: a fuzz test's engine communicates
// with its parent.
const allocNoise = 64 << 10

// Allocates returns the bytes that f allocates, garbage included, with those of the rest of the
// process at the same time.
func Allocates(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// AllocatesAtMost fails the test if f allocates more than limit bytes: the bound of a reader of
// foreign bytes, as a function of the input.
func AllocatesAtMost(tb testing.TB, limit uint64, what string, f func()) {
	tb.Helper()
	if n := Allocates(f); n > limit+allocNoise {
		tb.Fatalf("%s: it allocated %d bytes, at most %d are allowed", what, n, limit)
	}
}
