package policy

import (
	"sync"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
)

// knocker says whether kernels of ours have a GPU to themselves: a kernel that does nothing knocks before, and is back in 20 us where nobody else computes.
// [measured, H200] beside an engine it waits 1.7 ms for a slice of the GPU's time. Kernels that reach the host's memory move 30 to 50 GB/s alone; beside
// an engine they move 8 to 14, and it loses 12 to 45%. Under MPS nobody knocks (reaching).
type IdleProbe struct {
	fixed CopyMethod
	now   func() time.Time
	probe func() bool // knocks

	mu        sync.Mutex // protects all below
	changed   sync.Cond  // nobody is inside, or has knocked
	users     int        // hops under way
	probing   bool       // somebody does
	probed    time.Time  // of the last knock's end
	backoff   time.Duration
	notBefore time.Time // nobody knocks again
	calls     [2][numMethods]uint64
	bytes     [2][numMethods]uint64
}

// How often kernels knock. Once they are inside, a knock would wait for themselves: now and then all of them end before the next one.
const (
	resultValid  = time.Millisecond      // what was heard is taken to last so long
	probeEvery   = 50 * time.Millisecond // while lists follow each other
	backoffFirst = 20 * time.Millisecond // after one that found an engine, and twice as long after each more
	backoffLast  = 2 * time.Second
)

func NewIdleProbe(fixed CopyMethod, now func() time.Time, idle func() bool) *IdleProbe {
	k := &IdleProbe{fixed: fixed, now: now, probe: idle}
	k.changed.L = &k.mu
	return k
}

// enter reports whether a hop may go by kernels; then leave says that it ended. Whoever comes while all are to end, or while somebody knocks, waits for
// that, which is a hop or knockIdle at most. A knock needs no hop: whoever waits for one has its own.
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
		good := at.Sub(k.probed)
		switch {
		case at.Before(k.notBefore):
			return false
		case !k.probing && (k.users > 0 && good < probeEvery || good < resultValid):
			k.users++
			return true
		case k.probing || k.users > 0:
			k.changed.Wait()
			continue
		}
		k.probing = true
		k.mu.Unlock()
		ok := k.probe()
		k.mu.Lock()
		k.probing = false
		if k.probed, k.backoff = k.now(), min(max(2*k.backoff, backoffFirst), backoffLast); ok {
			k.backoff = 0
		}
		k.notBefore = k.probed.Add(k.backoff)
		k.changed.Broadcast()
	}
}

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

func (k *IdleProbe) Count(e CopyMethod, dir device.Direction, bytes uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.calls[dir][e]++
	k.bytes[dir][e] += bytes
}
