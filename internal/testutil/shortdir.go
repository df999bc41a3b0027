// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"os"
	"testing"
)

// ShortDir is a folder until the end of the test whose path leaves room for a socket's name, 107 bytes in all: that of TempDir has the names of nested
// tests in it, and a number that is sometimes longer.
func ShortDir(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp("", "kvs")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
