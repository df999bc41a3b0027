//go:build cgo

package slack_test

import (
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/slack"
)

// TestInherited: all threads have it, including those older than any package's init.
func TestInherited(t *testing.T) {
	var here, all sync.WaitGroup
	here.Add(32)
	for range 32 { // each on a thread of its own
		all.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			here.Done()
			here.Wait()
			got, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
			if err != nil || got != slack.Nanoseconds {
				t.Errorf("timer slack %d ns, %v; want %d", got, err, slack.Nanoseconds)
			}
		})
	}
	all.Wait()
}
