package connector

import (
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// watcher follows the layer flags of every worker that has a step open. It is one goroutine on a thread of its own, because
// Go's timers are a millisecond late where this needs 100 microseconds; with nothing to follow it sleeps on a condition.
type watcher struct {
	mu   sync.Mutex
	cond *sync.Cond
	list []*worker // replaced, never changed; guarded by mu
	stop bool      // guarded by mu
	done chan struct{}
}

func newWatcher() *watcher {
	wt := &watcher{done: make(chan struct{})}
	wt.cond = sync.NewCond(&wt.mu)
	return wt
}

// add makes sure that w is followed.
func (wt *watcher) add(w *worker) {
	if !w.watched.CompareAndSwap(false, true) {
		return
	}
	wt.mu.Lock()
	defer wt.mu.Unlock()
	wt.list = append(slices.Clip(slices.Clone(wt.list)), w)
	wt.cond.Signal()
}

// settle drops w from the list if it has nothing to follow. A pump that opens a step meanwhile either is seen here, or finds
// watched false and adds it again.
func (wt *watcher) settle(w *worker) {
	w.watched.Store(false)
	if w.waiting.Load() > 0 && w.watched.CompareAndSwap(false, true) {
		return
	}
	wt.mu.Lock()
	defer wt.mu.Unlock()
	// add may have put it in a second time already; one place goes.
	if i := slices.Index(wt.list, w); i >= 0 {
		wt.list = slices.Delete(slices.Clone(wt.list), i, i+1)
	}
}

func (wt *watcher) close() {
	wt.mu.Lock()
	wt.stop = true
	wt.cond.Signal()
	wt.mu.Unlock()
	<-wt.done
}

// next waits until there is something to follow; nil when the watcher ends. slept says that it had to wait.
func (wt *watcher) next() (list []*worker, slept bool) {
	wt.mu.Lock()
	defer wt.mu.Unlock()
	for len(wt.list) == 0 && !wt.stop {
		slept = true
		wt.cond.Wait()
	}
	if wt.stop {
		return nil, slept
	}
	return wt.list, slept
}

const timerSlack = 1000 // nanoseconds; the default of 50,000 doubles a short sleep

func (wt *watcher) run() {
	defer close(wt.done)
	spareP()
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine, and its timer slack with it
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, timerSlack, 0, 0, 0)
	p := newPacer(monotonic(unix.CLOCK_MONOTONIC), monotonic(unix.CLOCK_THREAD_CPUTIME_ID))
	for {
		list, slept := wt.next()
		if list == nil {
			return
		}
		if slept {
			p.resume(monotonic(unix.CLOCK_MONOTONIC), monotonic(unix.CLOCK_THREAD_CPUTIME_ID))
		}
		moved := 0
		for _, w := range list {
			if n := w.flagsMoved(); n > 0 {
				moved += n
				w.pump()
			}
			if w.waiting.Load() == 0 {
				wt.settle(w)
			}
		}
		nap(p.next(monotonic(unix.CLOCK_MONOTONIC), moved))
		if p.due() {
			p.charge(monotonic(unix.CLOCK_MONOTONIC), monotonic(unix.CLOCK_THREAD_CPUTIME_ID))
		}
	}
}

func monotonic(clock int32) time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(clock, &ts)
	return time.Duration(ts.Nano())
}

// flagsMoved compares the flags with what the watcher saw last. One load per flag, no lock.
func (w *worker) flagsMoved() int {
	moved := 0
	for i := range w.seen {
		if v := w.flags.Layer(i); v != w.seen[i] {
			w.seen[i] = v
			moved++
		}
	}
	return moved
}

// Pacing of the watcher. One sleep of a thread costs 8 to 20 us of CPU in a virtual machine, whatever is then looked at.
const (
	paceMin    = 50 * time.Microsecond
	paceIdle   = 2 * time.Millisecond // between looks while an open step does not move
	paceLate   = 8                    // a layer that is late is looked for every gap/paceLate
	paceFade   = 16                   // after t without a change, looks are at least t/paceFade apart
	paceWindow = 64                   // looks between two measurements of our own cost
	paceBudget = 0.015                // of a core, this thread alone
)

// pacer decides how long to sleep between two looks: until just before the next layer is due, then at a fraction of the time
// between layers, and never so short that looking costs more than its budget. Pure: times are arguments.
type pacer struct {
	last  time.Duration // when a flag moved last
	gap   time.Duration // learned time between layers
	floor time.Duration // raised by the budget
	looks int
	wall  time.Duration // at the last measurement
	cpu   time.Duration
}

func newPacer(now, cpu time.Duration) *pacer {
	return &pacer{last: now, gap: 4 * paceMin, floor: paceMin, wall: now, cpu: cpu}
}

// resume starts a new stretch after a sleep without anything to follow; what was learned stays.
func (p *pacer) resume(now, cpu time.Duration) {
	p.last, p.wall, p.cpu, p.looks = now, now, cpu, 0
}

// next returns the time to sleep; moved is how many flags this look has found changed.
func (p *pacer) next(now time.Duration, moved int) time.Duration {
	p.looks++
	since := now - p.last
	if moved == 0 {
		return max(p.gap/paceLate, p.floor, min(since/paceFade, paceIdle), paceMin)
	}
	// A pause between two steps is no gap between layers: one sample counts only so far.
	p.gap += (min(since/time.Duration(moved), 4*p.gap) - p.gap) / 8
	p.gap = max(p.gap, paceMin)
	p.last = now
	return max(p.gap*7/8, p.floor)
}

func (p *pacer) due() bool { return p.looks >= paceWindow }

// charge compares what looking has cost with the budget. The ceiling keeps an unlucky measurement from blinding the watcher.
func (p *pacer) charge(now, cpu time.Duration) {
	share := float64(cpu-p.cpu) / float64(max(now-p.wall, 1))
	switch {
	case share > paceBudget:
		p.floor = min(p.floor*5/4, paceIdle)
	case share < paceBudget*3/4:
		p.floor = max(p.floor*9/10, paceMin)
	}
	p.wall, p.cpu, p.looks = now, cpu, 0
}
