package connector

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// spareP gives the scheduler one more P, once per process, for the watcher to sleep on.
var spareP = sync.OnceFunc(func() { runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + 1) })

var napping atomic.Bool

// nap sleeps for d on the calling thread. The process's one busy watcher sleeps without telling the scheduler: a proper system
// call gives the P away and, on its return, wakes the runtime's monitor thread, which then costs twice what the sleep does.
// The P that is held meanwhile is the spare one. A watcher of a second Server in the process sleeps the proper way.
// A stop of the world interrupts the sleep by its signal.
func nap(d time.Duration) {
	ts := unix.NsecToTimespec(int64(d))
	if !napping.CompareAndSwap(false, true) {
		_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, 0, &ts, nil)
		return
	}
	_, _, _ = unix.RawSyscall6(unix.SYS_CLOCK_NANOSLEEP, unix.CLOCK_MONOTONIC, 0, uintptr(unsafe.Pointer(&ts)), 0, 0, 0)
	napping.Store(false)
}
