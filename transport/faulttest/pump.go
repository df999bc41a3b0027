package faulttest

import (
	"container/heap"
	"sync"
	"time"
)

// pump runs delayed functions on one goroutine.
type pump struct {
	wake chan struct{}
	stop chan struct{}
	done chan struct{}
	once sync.Once

	mu   sync.Mutex
	q    jobs
	n    uint64
	over bool // functions queued from here on never run on it
}

type job struct {
	at time.Time
	n  uint64 // keeps the order of functions due at one time
	fn func()
}

type jobs []job

func (q jobs) Len() int { return len(q) }
func (q jobs) Less(i, j int) bool {
	return q[i].at.Before(q[j].at) || q[i].at.Equal(q[j].at) && q[i].n < q[j].n
}
func (q jobs) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *jobs) Push(x any)   { *q = append(*q, x.(job)) }
func (q *jobs) Pop() any {
	old := *q
	x := old[len(old)-1]
	old[len(old)-1] = job{}
	*q = old[:len(old)-1]
	return x
}

func newPump() *pump {
	return &pump{wake: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{})}
}

// after runs fn on the pump's goroutine when it is due, or when the pump closes, if that is
// earlier. A function from a Move concurrent with Close runs at once, but not on the caller's
// goroutine.
func (p *pump) after(d time.Duration, fn func()) {
	p.mu.Lock()
	if p.over {
		p.mu.Unlock()
		go fn()
		return
	}
	p.n++
	heap.Push(&p.q, job{time.Now().Add(d), p.n, fn})
	p.mu.Unlock()
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

func (p *pump) run() {
	defer close(p.done)
	t := time.NewTimer(time.Hour)
	defer t.Stop()
	for {
		closing := false
		select {
		case <-p.stop:
			closing = true
		default:
		}
		wait := time.Hour
		var fn func()
		p.mu.Lock()
		if len(p.q) > 0 {
			if wait = time.Until(p.q[0].at); wait <= 0 || closing {
				fn = heap.Pop(&p.q).(job).fn
			}
		}
		p.over = closing && fn == nil
		p.mu.Unlock()
		if fn != nil {
			fn()
			continue
		}
		if closing {
			return
		}
		t.Reset(wait)
		select {
		case <-p.stop:
		case <-p.wake:
		case <-t.C:
		}
	}
}

func (p *pump) close() {
	p.once.Do(func() { close(p.stop) })
	<-p.done
}
