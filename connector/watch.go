package connector

import (
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/slack"
)

// watcher follows the layer flags of every worker with an open step whose layers are awaited. It is
// one goroutine on its own thread, because Go's timers are a millisecond late and this needs 100
// microseconds. With nothing to follow it sleeps on a condition.
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

// add ensures that w is followed if its layers are awaited; otherwise its flags are checked at
// intervals.
func (wt *watcher) add(w *worker) {
	if !w.awaited(now()) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.lookLaterLocked()
		return
	}
	if !w.watched.CompareAndSwap(false, true) {
		return
	}
	wt.mu.Lock()
	defer wt.mu.Unlock()
	wt.list = append(slices.Clip(slices.Clone(wt.list)), w)
	wt.cond.Signal()
}

// settle drops w from the list if it has nothing to follow or nothing awaits its layers. A
// concurrent change is either visible here, or finds watched false and adds w again.
func (wt *watcher) settle(w *worker) {
	w.watched.Store(false)
	if w.waiting.Load() > 0 {
		if w.awaited(now()) && w.watched.CompareAndSwap(false, true) {
			return
		}
		defer wt.add(w)
	}
	wt.mu.Lock()
	defer wt.mu.Unlock()
	// add may have put it in a second time already; remove one entry.
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

// next waits until there is something to follow; nil when the watcher ends. slept reports whether
// it waited.
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

func (wt *watcher) run() {
	defer close(wt.done)
	cores := runtime.GOMAXPROCS(0) // a container's limit, not its host's
	spareP()
	// never unlocked: the thread ends with the goroutine, and its timer slack with it
	runtime.LockOSThread()
	// already set if the binary has cgo
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, slack.Nanoseconds, 0, 0, 0)
	p := newPacer(cores, now(), cpuTime())
	for {
		list, slept := wt.next()
		if list == nil {
			return
		}
		if slept {
			p.resume(now(), cpuTime())
		}
		moved, at := 0, now()
		for _, w := range list {
			if n := w.flagsMoved(); n > 0 {
				moved += n
				before := cpuTime()
				w.pump()
				p.spare(cpuTime() - before)
			}
			if w.waiting.Load() == 0 || !w.awaited(at) {
				wt.settle(w)
			}
		}
		from := now()
		asked := p.next(at, from, moved)
		nap(asked)
		p.slept(asked, now()-from)
		if p.due() {
			p.charge(now(), cpuTime())
		}
	}
}

// started is the process's start of time.
var started = time.Now()

// now is the monotonic time, without a system call.
func now() time.Duration { return time.Since(started) }

// cpuTime is the CPU time of the calling thread.
func cpuTime() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts)
	return time.Duration(ts.Nano())
}

// awaited reports whether a change of the flags matters at once: another sidecar waits for the
// layers or will soon, or a lease waits for the stream mark.
func (w *worker) awaited(at time.Duration) bool {
	return w.partners.Load() || w.holding.Load() || at < time.Duration(w.fresh.Load())
}

// Follow sets whether a source lease of w has a matching receiver. Without one, checking layers
// with each record of the ring and every paceAlone is early enough; following each layer would take
// most of an idle sidecar's CPU budget.
func (w *Worker) Follow(partners bool) {
	s := w.state
	s.partners.Store(partners)
	if partners && s.waiting.Load() > 0 {
		s.s.watch.add(s) // its first check covers earlier changes
	}
}

// lookLaterLocked checks the flags after paceAlone.
func (w *worker) lookLaterLocked() {
	if w.closed || w.later != nil {
		return
	}
	w.later = time.AfterFunc(paceAlone, func() {
		w.mu.Lock()
		w.later = nil
		w.mu.Unlock()
		w.pump()
	})
}

// flagsMoved compares the flags with the highest values that the watcher saw; flags of replays fall
// when a step begins, which is no change. Three loads per flag at most, no lock.
func (w *worker) flagsMoved() int {
	moved := 0
	for i := range w.seen {
		if v := w.flags.Layer(i); v > w.seen[i] {
			w.seen[i] = v
			moved++
		}
	}
	if v := w.flags.Mark(); v > w.seenMark {
		w.seenMark = v
		moved++
	}
	return moved
}

// Pacing of the watcher. One sleep of a thread costs 8 to 20 us of CPU in a virtual machine,
// whatever the check costs.
const (
	paceMin  = 20 * time.Microsecond
	paceNap  = 5 * time.Microsecond   // shortest requested sleep: the kernel adds more than that
	paceOver = 200 * time.Microsecond // largest assumed overrun of a sleep
	paceIdle = 2 * time.Millisecond   // between checks while an open step does not move
	// between checks while no layer is awaited; the deadline of a long prefill counts from the last
	// change seen
	paceAlone = 100 * time.Millisecond
	paceFresh = 100 * time.Millisecond // after a source lease is opened its receiver is expected
	paceLate  = 16                     // a late layer is checked every gap/paceLate
	// after t without a change, checks are at least t/paceFade apart
	paceFade = 32
	// this many gaps are a pause between two steps, unless two follow each other
	paceOdd    = 2
	paceWindow = 64 // checks between two measurements of their cost
	// of the host's CPU for checking while layers are awaited; work after a layer is not included
	paceShare  = 0.02
	paceBudget = 0.3 // limit of the same in cores
)

// pacer decides the sleep between two checks: until just before the next layer is due, then a
// fraction of the time between layers, and never so short that checking exceeds its budget. Pure:
// times are arguments.
type pacer struct {
	last  time.Duration // when a flag moved last
	gap   time.Duration // learned time between layers
	odd   bool          // the last time between two changes was a pause
	most  float64       // of a core: the budget
	floor time.Duration // raised by the budget
	over  time.Duration // learned overrun of a sleep
	looks int
	wall  time.Duration // at the last measurement
	cpu   time.Duration
}

func newPacer(cores int, now, cpu time.Duration) *pacer {
	return &pacer{last: now, gap: 8 * paceMin, most: min(paceBudget, paceShare*float64(cores)), floor: paceMin, wall: now, cpu: cpu}
}

// resume starts a new period after a sleep without anything to follow; learned values stay.
func (p *pacer) resume(now, cpu time.Duration) {
	p.last, p.wall, p.cpu, p.looks = now, now, cpu, 0
}

// next returns the time to sleep; moved is the number of flags that the check at a time found
// changed.
func (p *pacer) next(at, now time.Duration, moved int) time.Duration {
	return max(p.until(at, now, moved)-p.over, paceNap)
}

// slept records the length of a sleep.
func (p *pacer) slept(asked, lasted time.Duration) {
	p.over += (min(max(lasted-asked, 0), paceOver) - p.over) / 8
}

// until returns the time to the next check. The next layer is due relative to the check that saw
// this one: time spent since then is no time between layers, and would make every check later than
// the previous one.
func (p *pacer) until(at, now time.Duration, moved int) time.Duration {
	p.looks++
	since := at - p.last
	if moved == 0 {
		if since < p.gap*9/8 && p.floor == paceMin {
			return p.gap / paceLate // it is due now: a few short sleeps, if the budget permits
		}
		return max(p.gap/paceLate, p.floor, min(since/paceFade, paceIdle))
	}
	// A pause between two steps is no gap between layers; counting it would make the checks of the
	// next step's first layers late.
	sample := since / time.Duration(moved)
	late := sample > p.gap*3/2
	if p.odd = sample > paceOdd*p.gap && !p.odd; !p.odd {
		p.gap += (min(sample, 4*p.gap) - p.gap) / 8
		p.gap = max(p.gap, paceMin)
	}
	p.last = at
	// the next one need not be late: a GPU without room for a layer's flag sets it just before the
	// next layer's flag
	if late {
		return max(p.gap/paceLate, p.floor)
	}
	return max(p.gap*7/8-(now-at), p.floor)
}

// spare excludes other work from the budget; a slower pace would not reduce that work.
func (p *pacer) spare(cpu time.Duration) { p.cpu += cpu }

func (p *pacer) due() bool { return p.looks >= paceWindow }

// charge compares the cost of checking with the budget. The ceiling keeps a single bad measurement
// from stopping the watcher.
func (p *pacer) charge(now, cpu time.Duration) {
	share := float64(cpu-p.cpu) / float64(max(now-p.wall, 1))
	switch {
	case share > p.most:
		p.floor = min(p.floor*5/4, paceIdle)
	case share < p.most*3/4:
		p.floor = max(p.floor*9/10, paceMin)
	}
	p.wall, p.cpu, p.looks = now, cpu, 0
}
