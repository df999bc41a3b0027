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
		changed := false
		for _, w := range list {
			if w.flagsMoved() {
				changed = true
				w.pump()
			}
			if w.waiting.Load() == 0 {
				wt.settle(w)
			}
		}
		ts := unix.NsecToTimespec(int64(p.next(monotonic(unix.CLOCK_MONOTONIC), changed)))
		_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, 0, &ts, nil)
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
func (w *worker) flagsMoved() bool {
	moved := false
	for i := range w.seen {
		if v := w.flags.Layer(i); v != w.seen[i] {
			w.seen[i] = v
			moved = true
		}
	}
	return moved
}

// Pacing of the watcher.
const (
	paceMin     = 50 * time.Microsecond
	paceMax     = 250 * time.Microsecond // while layers come
	paceIdle    = time.Millisecond       // while an open step does not move
	paceLooks   = 5                      // looks per layer
	paceFade    = 16                     // after t without a change, looks are t/paceFade apart
	paceWindow  = 64                     // looks between two measurements of our own cost
	paceBudget  = 0.025                  // share of a core
	paceCeiling = time.Millisecond       // of the floor that the budget raises
)

// pacer decides how long to sleep between two looks: a fraction of the time between layers, longer when nothing moves, and
// never so short that looking costs more than its budget. Pure: times are arguments.
type pacer struct {
	last  time.Duration // when a flag moved last
	gap   time.Duration // learned time between moves
	floor time.Duration // raised by the budget
	looks int
	wall  time.Duration // at the last measurement
	cpu   time.Duration
}

func newPacer(now, cpu time.Duration) *pacer {
	return &pacer{last: now, gap: paceLooks * 2 * paceMin, floor: paceMin, wall: now, cpu: cpu}
}

// resume starts a new stretch after a sleep without anything to follow; what was learned stays.
func (p *pacer) resume(now, cpu time.Duration) {
	p.last, p.wall, p.cpu, p.looks = now, now, cpu, 0
}

// next returns the time to sleep.
func (p *pacer) next(now time.Duration, changed bool) time.Duration {
	since := now - p.last
	if changed {
		// Pauses between steps are no gaps between layers.
		if since < 8*p.gap || since < paceIdle {
			p.gap += (min(since, paceLooks*paceMax) - p.gap) / 8
		}
		p.last, since = now, 0
	}
	p.looks++
	d := min(max(p.gap/paceLooks, p.floor), max(paceMax, p.floor))
	return max(d, min(since/paceFade, paceIdle))
}

func (p *pacer) due() bool { return p.looks >= paceWindow }

// charge compares what looking has cost with the budget.
func (p *pacer) charge(now, cpu time.Duration) {
	share := float64(cpu-p.cpu) / float64(max(now-p.wall, 1))
	switch {
	case share > paceBudget:
		p.floor = min(p.floor*5/4, paceCeiling)
	case share < paceBudget*3/4:
		p.floor = max(p.floor*9/10, paceMin)
	}
	p.wall, p.cpu, p.looks = now, cpu, 0
}
