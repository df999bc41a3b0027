package policy

import (
	"sync"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
)

// IdleProbe detects whether this process's kernels have a GPU to themselves: an empty kernel runs
// first, which ends within 20 us on an idle GPU. [measured, H200] Beside an engine it waits 1.7 ms
// for a slice of the GPU's time. Kernels that reach host memory move 30 to 50 GB/s alone. Beside an
// engine they move 8 to 14 GB/s, and the engine loses 12 to 45%. Under MPS the probe sees nothing
// and is not used.
//
// A GPU has one IdleProbe, which all users of its kernels share: an empty kernel would wait for
// kernels that entered elsewhere, and a result that two probes use twice would last twice as long.
type IdleProbe struct {
	fixed CopyMethod
	now   func() time.Time
	probe func() bool // runs the empty kernel

	mu        sync.Mutex // protects all below
	changed   sync.Cond  // users is 0, or a probe has ended
	users     int        // between Enter and Leave
	probing   bool       // an empty kernel runs
	probed    time.Time  // end of the last probe
	streak    int        // probes in a row that found the GPU idle
	backoff   time.Duration
	notBefore time.Time // the next probe
	calls     [2][numMethods]uint64
	bytes     [2][numMethods]uint64
}

// How often the empty kernel runs. It would wait for kernels of this process, so that all users
// leave before it runs.
const (
	resultValid = time.Millisecond      // of one result
	probeEvery  = 50 * time.Millisecond // while users follow each other, after probeStreak results
	// an engine that computes leaves moments in which one probe finds it idle.
	probeStreak  = 3
	backoffFirst = 20 * time.Millisecond // after a probe that found an engine; it doubles
	backoffLast  = 2 * time.Second
)

// NewIdleProbe makes a probe. fixed: Auto, or the answer: Pack admits all, everything else nothing.
// idle runs an empty kernel and reports whether it ended in time.
func NewIdleProbe(fixed CopyMethod, now func() time.Time, idle func() bool) *IdleProbe {
	k := &IdleProbe{fixed: fixed, now: now, probe: idle}
	k.changed.L = &k.mu
	return k
}

// Enter reports whether kernels may be used now; then Leave ends the use. Enter waits while a probe
// runs, or while users leave before the next one. The probe needs no staging slot: callers may hold
// one meanwhile.
func (k *IdleProbe) Enter() bool {
	if k == nil {
		return false
	}
	if k.fixed != Auto {
		return k.fixed == Pack
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for {
		at := k.now()
		age := at.Sub(k.probed)
		switch {
		case at.Before(k.notBefore):
			return false
		case !k.probing && k.streak > 0 && age < k.validLocked():
			k.users++
			return true
		case k.probing || k.users > 0:
			k.changed.Wait()
			continue
		}
		k.probing = true
		k.mu.Unlock()
		idle := k.probe()
		k.mu.Lock()
		k.probing = false
		k.probed = k.now()
		if idle {
			k.streak, k.backoff = k.streak+1, 0
		} else {
			k.streak, k.backoff = 0, min(max(2*k.backoff, backoffFirst), backoffLast)
		}
		k.notBefore = k.probed.Add(k.backoff)
		k.changed.Broadcast()
	}
}

// validLocked is how long the last result admits users.
func (k *IdleProbe) validLocked() time.Duration {
	if k.users > 0 && k.streak >= probeStreak {
		return probeEvery
	}
	return resultValid
}

// Leave ends what Enter has admitted.
func (k *IdleProbe) Leave() {
	if k.fixed != Auto {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.users--; k.users == 0 {
		k.changed.Broadcast()
	}
}

// Count counts bytes between the GPU and scattered host pages.
func (k *IdleProbe) Count(e CopyMethod, dir device.Direction, bytes uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.calls[dir][e]++
	k.bytes[dir][e] += bytes
}
