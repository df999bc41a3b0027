package watch

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// spareP gives the Go scheduler one more P, once per process, on which the watcher sleeps.
var spareP = sync.OnceFunc(func() { runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + 1) })

var sleeping atomic.Bool

// sleep sleeps for d on the calling thread. The process's one busy watcher sleeps without the Go
// scheduler: a normal system call gives the P away and, on its return, wakes the runtime's monitor
// thread, which costs twice as much as the sleep. The held P is the spare one. A watcher of a
// second Server in the process sleeps by a normal system call. The signal of a stop-the-world
// interrupts the sleep.
func sleep(d time.Duration) {
	ts := unix.NsecToTimespec(int64(d))
	if !sleeping.CompareAndSwap(false, true) {
		_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, 0, &ts, nil)
		return
	}
	_, _, _ = unix.RawSyscall6(unix.SYS_CLOCK_NANOSLEEP, unix.CLOCK_MONOTONIC, 0,
		uintptr(unsafe.Pointer(&ts)), 0, 0, 0)
	sleeping.Store(false)
}
