package device

import (
	"time"

	"golang.org/x/sys/unix"

	_ "github.com/kvspray/kvspray/internal/sys/slack" // short pauses
)

// How poll waits. [measured, H200 in a virtual machine] the driver's sleeping wait wakes up 500 us late, a spinning one takes a core
// from the engine for as long as a copy lasts, and time.Sleep cannot sleep for less than a millisecond. Four links that look every 20 us take
// 1.2 cores, every 70 us 0.6; where two runs of a pipeline follow each other 50 us count, which Linux adds to a thread's pauses
// unless it is told otherwise.
const (
	syncSpin   = 20 * time.Microsecond
	syncPause  = 70 * time.Microsecond
	syncPrompt = 20 * time.Microsecond
)

// poll returns when done says so. It spins for a moment and then looks once in every pause.
func Poll(every time.Duration, done func() bool) {
	start := time.Now()
	for !done() {
		if time.Since(start) <= syncSpin {
			continue
		}
		pause := unix.NsecToTimespec(int64(every))
		// An interrupted pause is a short one.
		_ = unix.Nanosleep(&pause, nil)
	}
}

// backBy waits for what comes before the mark of e, but not longer than until then, and reports whether it is done.
func DoneBy(e Event, late time.Time) (back bool, err error) {
	Poll(syncPrompt, func() bool {
		back, err = e.Done()
		return back || err != nil || !time.Now().Before(late)
	})
	return back, err
}
