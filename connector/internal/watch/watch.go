// Package watch follows the layer flags that engines write into shared memory.
//
// A Watcher is one goroutine on a thread of its own. It sleeps on a condition while no Worker is
// added, and otherwise checks at the pace of the layers, within a budget of CPU time.
package watch

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/slack"
)

// Worker has layer flags. A Watcher calls its methods from several goroutines, and none of them
// while it holds a lock.
type Worker interface {
	Waiting() bool                 // something waits for the flags
	Awaited(at time.Duration) bool // a change of the flags matters at once; at: in the time of Now
	Moved() int                    // flags that changed since the last call; only the Watcher calls it
	Pump()                         // processes changed flags
	LookLater()                    // calls Pump after Alone
}

// Entry is a Worker's place in a Watcher.
type Entry struct {
	Worker
	listed atomic.Bool
}

// Watcher follows the layer flags of every worker with an open step whose layers are awaited. It is
// one goroutine on its own thread, because Go's timers are a millisecond late and this needs 100
// microseconds. With nothing to follow it sleeps on a condition.
type Watcher struct {
	mu   sync.Mutex
	cond *sync.Cond
	list []*Entry // replaced, never changed; guarded by mu
	stop bool     // guarded by mu
	done chan struct{}
}

// New returns a Watcher; Run makes it work.
func New() *Watcher {
	wt := &Watcher{done: make(chan struct{})}
	wt.cond = sync.NewCond(&wt.mu)
	return wt
}

// Add ensures that w is followed if its layers are awaited; otherwise its flags are checked at
// intervals.
func (wt *Watcher) Add(w *Entry) {
	if !w.Awaited(Now()) {
		w.LookLater()
		return
	}
	if !w.listed.CompareAndSwap(false, true) {
		return
	}
	wt.mu.Lock()
	defer wt.mu.Unlock()
	wt.list = append(slices.Clip(slices.Clone(wt.list)), w)
	wt.cond.Signal()
}

// settle drops w from the list if it has nothing to follow or nothing awaits its layers. A
// concurrent change is either visible here, or finds listed false and adds w again.
func (wt *Watcher) settle(w *Entry) {
	w.listed.Store(false)
	if w.Waiting() {
		if w.Awaited(Now()) && w.listed.CompareAndSwap(false, true) {
			return
		}
		defer wt.Add(w)
	}
	wt.mu.Lock()
	defer wt.mu.Unlock()
	// Add may have put it in a second time already; remove one entry.
	if i := slices.Index(wt.list, w); i >= 0 {
		wt.list = slices.Delete(slices.Clone(wt.list), i, i+1)
	}
}

// Close ends Run and returns after it has ended.
func (wt *Watcher) Close() {
	wt.mu.Lock()
	wt.stop = true
	wt.cond.Signal()
	wt.mu.Unlock()
	<-wt.done
}

// next waits until there is something to follow; nil when the watcher ends. slept reports whether
// it waited.
func (wt *Watcher) next() (list []*Entry, slept bool) {
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

// Run follows the flags until Close.
func (wt *Watcher) Run() {
	defer close(wt.done)
	cores := runtime.GOMAXPROCS(0) // a container's limit, not its host's
	spareP()
	// never unlocked: the thread ends with the goroutine, and its timer slack with it
	runtime.LockOSThread()
	// already set if the binary has cgo
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, slack.Nanoseconds, 0, 0, 0)
	p := newPacer(cores, Now(), cpuTime())
	for {
		list, slept := wt.next()
		if list == nil {
			return
		}
		if slept {
			p.resume(Now(), cpuTime())
		}
		moved, at := 0, Now()
		for _, w := range list {
			if n := w.Moved(); n > 0 {
				moved += n
				before := cpuTime()
				w.Pump()
				p.spare(cpuTime() - before)
			}
			if !w.Waiting() || !w.Awaited(at) {
				wt.settle(w)
			}
		}
		from := Now()
		asked := p.next(at, from, moved)
		sleep(asked)
		p.slept(asked, Now()-from)
		if p.due() {
			p.charge(Now(), cpuTime())
		}
	}
}

// started is the process's start of time.
var started = time.Now()

// Now is the monotonic time, without a system call.
func Now() time.Duration { return time.Since(started) }

// cpuTime is the CPU time of the calling thread.
func cpuTime() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts)
	return time.Duration(ts.Nano())
}
