package connector

import (
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/slack"
)

// watcher follows the layer flags of every worker that has a step open and is awaited. It is one goroutine on a thread of its own, because
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

// add makes sure that w is followed, if its layers are awaited; else it is looked at now and then.
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

// settle drops w from the list if it has nothing to follow, or nobody awaits it. Who changes that meanwhile either is seen here, or
// finds watched false and adds it again.
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

func (wt *watcher) run() {
	defer close(wt.done)
	cores := runtime.GOMAXPROCS(0) // what a container may use, not what its host has
	spareP()
	runtime.LockOSThread()                                             // never unlocked: the thread ends with the goroutine, and its timer slack with it
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, slack.Nanoseconds, 0, 0, 0) // said already where the binary has cgo
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

// started is when the process began to tell the time.
var started = time.Now()

// now is the monotonic time, without a system call.
func now() time.Duration { return time.Since(started) }

// cpuTime is what the calling thread has used.
func cpuTime() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts)
	return time.Duration(ts.Nano())
}

// awaited reports whether a change of the flags matters at once: a partner wants the layers or is about to come, or a lease waits for the
// stream mark.
func (w *worker) awaited(at time.Duration) bool {
	return w.partners.Load() || w.holding.Load() || at < time.Duration(w.fresh.Load())
}

// Follow says whether a source lease of w has a partner. Where none has one nobody is late when layers are looked for with each record
// of the ring and every paceAlone, while to follow each of them would cost most of what a sidecar may cost that moves nothing.
func (w *Worker) Follow(partners bool) {
	s := w.state
	s.partners.Store(partners)
	if partners && s.waiting.Load() > 0 {
		s.s.watch.add(s) // whose first look is at what came meanwhile
	}
}

// lookLaterLocked looks at the flags after paceAlone.
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

// flagsMoved compares the flags with the most that the watcher saw: those of replays fall as a step begins, which says nothing. Three loads per
// flag at most, no lock.
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

// Pacing of the watcher. One sleep of a thread costs 8 to 20 us of CPU in a virtual machine, whatever is then looked at.
const (
	paceMin    = 20 * time.Microsecond
	paceNap    = 5 * time.Microsecond   // what is asked for at least: the kernel adds more than that
	paceOver   = 200 * time.Microsecond // what a sleep is taken to last too long at most
	paceIdle   = 2 * time.Millisecond   // between looks while an open step does not move
	paceAlone  = 100 * time.Millisecond // between looks while nobody waits for a layer; the deadline of a long prefill counts from what is seen
	paceFresh  = 100 * time.Millisecond // after a source lease is opened its partner is about to come
	paceLate   = 16                     // a layer that is late is looked for every gap/paceLate
	paceFade   = 32                     // after t without a change, looks are at least t/paceFade apart
	paceOdd    = 2                      // so many gaps are no time between layers but a pause between two steps, unless two follow each other
	paceWindow = 64                     // looks between two measurements of our own cost
	paceShare  = 0.02                   // of the host for looking, while somebody waits for layers; what follows from a layer is no part of it
	paceBudget = 0.3                    // of a core for the same, at most
)

// pacer decides how long to sleep between two looks: until just before the next layer is due, then at a fraction of the time
// between layers, and never so short that looking costs more than its budget. Pure: times are arguments.
type pacer struct {
	last  time.Duration // when a flag moved last
	gap   time.Duration // learned time between layers
	odd   bool          // the last time between two changes was a pause
	most  float64       // of a core: the budget
	floor time.Duration // raised by the budget
	over  time.Duration // learned: how much longer than asked a sleep lasts
	looks int
	wall  time.Duration // at the last measurement
	cpu   time.Duration
}

func newPacer(cores int, now, cpu time.Duration) *pacer {
	return &pacer{last: now, gap: 8 * paceMin, most: min(paceBudget, paceShare*float64(cores)), floor: paceMin, wall: now, cpu: cpu}
}

// resume starts a new stretch after a sleep without anything to follow; what was learned stays.
func (p *pacer) resume(now, cpu time.Duration) {
	p.last, p.wall, p.cpu, p.looks = now, now, cpu, 0
}

// next returns the time to sleep; moved is how many flags the look at a time has found changed.
func (p *pacer) next(at, now time.Duration, moved int) time.Duration {
	return max(p.until(at, now, moved)-p.over, paceNap)
}

// slept tells how long a sleep has lasted.
func (p *pacer) slept(asked, lasted time.Duration) {
	p.over += (min(max(lasted-asked, 0), paceOver) - p.over) / 8
}

// until returns the time to the next look. The next layer is due by when this one was seen: what has been done since is no time between layers, and
// would make every look later than the one before.
func (p *pacer) until(at, now time.Duration, moved int) time.Duration {
	p.looks++
	since := at - p.last
	if moved == 0 {
		if since < p.gap*9/8 && p.floor == paceMin {
			return p.gap / paceLate // it is due now: a few short sleeps, unless the budget is used up
		}
		return max(p.gap/paceLate, p.floor, min(since/paceFade, paceIdle))
	}
	// A pause between two steps is no gap between layers, and the first layers of a step would be looked for late.
	sample := since / time.Duration(moved)
	late := sample > p.gap*3/2
	if p.odd = sample > paceOdd*p.gap && !p.odd; !p.odd {
		p.gap += (min(sample, 4*p.gap) - p.gap) / 8
		p.gap = max(p.gap, paceMin)
	}
	p.last = at
	if late { // the next one need not be: a GPU that has no room for the flag of a layer sets it just before that of the layer behind it
		return max(p.gap/paceLate, p.floor)
	}
	return max(p.gap*7/8-(now-at), p.floor)
}

// spare keeps work that is no looking out of the budget: at a slow pace there would be as much of it.
func (p *pacer) spare(cpu time.Duration) { p.cpu += cpu }

func (p *pacer) due() bool { return p.looks >= paceWindow }

// charge compares what looking has cost with the budget. The ceiling keeps an unlucky measurement from blinding the watcher.
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
