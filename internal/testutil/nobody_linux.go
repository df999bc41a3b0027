package testutil

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

const unprivileged = 65534

// AsNobody calls f with permissions of files in effect: root runs it in a thread of another user. f
// uses no other goroutine and does not end the test.
func AsNobody(tb testing.TB, f func()) {
	tb.Helper()
	if os.Geteuid() != 0 {
		f()
		return
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		const same = ^uintptr(0)
		// The raw call is for this thread alone, syscall.Setresuid for all of them.
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, same, unprivileged, same); errno != 0 {
			done <- errno
			return
		}
		f()
		done <- nil
	}()
	if err := <-done; err != nil {
		tb.Fatalf("become another user: %v", err)
	}
}
