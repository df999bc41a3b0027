// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"runtime"
	"testing"
)

// allocNoise is what the rest of the process may allocate meanwhile: a fuzz test's engine talks to its parent.
const allocNoise = 64 << 10

// Allocates is what f allocates in all, garbage included, with what the rest of the process does at the same time.
func Allocates(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// AllocatesAtMost fails the test if f allocates more than so many bytes in all: what a reader of foreign bytes may take, as a function of
// what was sent.
func AllocatesAtMost(tb testing.TB, most uint64, what string, f func()) {
	tb.Helper()
	if n := Allocates(f); n > most+allocNoise {
		tb.Fatalf("%s: it allocated %d bytes, at most %d are allowed", what, n, most)
	}
}
