package testutil

import (
	"testing"
	"time"
)

// Eventually waits until ok returns true, and fails the test when it has not after so long.
func Eventually(tb testing.TB, within time.Duration, what string, ok func() bool) {
	tb.Helper()
	for end := time.Now().Add(within); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			tb.Fatalf("not within %v: %s", within, what)
		}
	}
}
