package testutil

import (
	"runtime"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/slack"
)

// usualWakeup is the CPU time of a short sleep on machines for which shares of a core are
// specified: some 10 us on hosts and in most virtual machines. In others it is 50, because the
// hypervisor handles each timer and each idle processor, and frequent sleepers cost that many times
// more.
const usualWakeup = 15 * time.Microsecond

const (
	wakeups     = 2000
	wakeupSleep = 300 * time.Microsecond
)

// wakeup measures it.
func wakeup(t *testing.T) time.Duration {
	t.Helper()
	took := make(chan time.Duration)
	go func() {
		// never unlocked: the thread ends with the goroutine, and its timer slack with it
		runtime.LockOSThread()
		_ = unix.Prctl(unix.PR_SET_TIMERSLACK, slack.Nanoseconds, 0, 0, 0)
		var before, after unix.Timespec
		pause := unix.NsecToTimespec(int64(wakeupSleep))
		_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &before)
		for range wakeups { // without the scheduler's own cost of a system call
			_, _, _ = unix.RawSyscall6(unix.SYS_CLOCK_NANOSLEEP, unix.CLOCK_MONOTONIC, 0,
				uintptr(unsafe.Pointer(&pause)), 0, 0, 0)
		}
		_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &after)
		took <- time.Duration(after.Nano()-before.Nano()) / wakeups
	}()
	return <-took
}

// HoldsShare fails the test unless a process stays under a share of a core (share). The share
// applies to a usual machine: if wake-ups cost more CPU time it is scaled by that factor. Not
// judged with the race detector.
func HoldsShare(t *testing.T, what string, limit float64, windows int, window time.Duration,
	cpu func() time.Duration, after func(time.Duration)) {
	t.Helper()
	used := share(t, what, windows, window, cpu, after)
	if used <= limit || Race {
		return
	}
	w := wakeup(t)
	allowed := limit * max(1, float64(w)/float64(usualWakeup))
	t.Logf("%s: a wake-up takes %s of a processor here, usually %s: %.2f%% of a core are allowed "+
		"for %.2f%%", what, w, usualWakeup, 100*allowed, 100*limit)
	if used > allowed {
		t.Errorf("%s: %.2f%% of a core, at most %.2f%%", what, 100*used, 100*allowed)
	}
}
