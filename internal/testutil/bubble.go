package testutil

import (
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
)

var bubbles sync.Mutex // held by the bubble that has set the number of processors

// Bubble is synctest.Test. With the race detector it runs f on one processor: when timers of one
// bubble fire in two threads at once, ThreadSanitizer crashes, because Go 1.26 gives both threads
// the same context.
func Bubble(t *testing.T, f func(*testing.T)) {
	t.Helper()
	if Race {
		bubbles.Lock()
		defer bubbles.Unlock()
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	}
	synctest.Test(t, f)
}
