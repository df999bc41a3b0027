package testutil

import (
	"os"
	"testing"
)

// ShortDir is a directory until the end of the test whose path leaves room for a socket's name, 107
// bytes in all. The path of TempDir contains the names of nested tests, and a number of varying
// length.
func ShortDir(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp("", "kvs")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
