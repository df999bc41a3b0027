package device

import (
	"time"

	"golang.org/x/sys/unix"

	_ "github.com/kvspray/kvspray/internal/sys/slack" // short pauses
)

// The pauses of Poll. [measured, H200 in a virtual machine] The driver's sleeping wait wakes up 500
// us late, its spinning wait takes a core for the whole copy, and time.Sleep cannot sleep for less
// than a millisecond. Four links that poll every 20 us take 1.2 cores, every 70 us 0.6. Linux adds
// 50 us to each pause unless package slack forbids it, which matters between two runs of a
// pipeline.
const (
	syncSpin   = 20 * time.Microsecond
	syncPause  = 70 * time.Microsecond
	syncPrompt = 20 * time.Microsecond
)

// Poll returns when done returns true. It spins for a moment and then calls done once per pause.
func Poll(every time.Duration, done func() bool) {
	start := time.Now()
	for !done() {
		if time.Since(start) <= syncSpin {
			continue
		}
		pause := unix.NsecToTimespec(int64(every))
		// An interrupted pause is only shorter.
		_ = unix.Nanosleep(&pause, nil)
	}
}

// DoneBy waits for the mark of e until late, and reports whether its work is done.
func DoneBy(e Event, late time.Time) (back bool, err error) {
	Poll(syncPrompt, func() bool {
		back, err = e.Done()
		return back || err != nil || !time.Now().Before(late)
	})
	return back, err
}
