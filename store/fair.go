package store

import (
	"cmp"
	"time"
)

// flow is what one namespace has of one stage, whose lock guards it.
type flow struct {
	served  uint64     // bytes, and what it missed while it asked for nothing
	running int        // pieces that goroutines work at
	open    int        // requests under way
	queues  [2][]piece // gets, puts with pages that no worker has taken
}

// fair divides goroutines of one kind between namespaces: start-time fair queueing by bytes. The
// namespace that was served least goes first; one that asked for nothing meanwhile does not save up
// for it. A piece that has begun is not stopped. So that a namespace that asks seldom need not wait
// for the pieces of others, some goroutines begin only pieces of namespaces that have none running,
// as long as several namespaces ask.
type fair struct {
	workers  int
	reserve  int
	busy     int
	now      uint64 // what the piece that began last had been served before
	last     *flow  // whose piece began last
	switched time.Time
}

// atOnce is how long two namespaces count as asking at the same time.
const atOnce = time.Second

// several reports whether several namespaces ask.
func (f *fair) several() bool { return time.Since(f.switched) <= atOnce }

// reserveShare: 1/reserveShare of the goroutines that wait for I/O is the reserve.
const reserveShare = 4

func newFair(workers int) fair { return fair{workers: workers, reserve: workers / reserveShare} }

// copiers leaves one processor to other namespaces: goroutines of this kind wait for nothing.
func (f *fair) copiers(processors int) {
	f.reserve = max(f.reserve, f.workers-max(1, processors-1))
}

// may reports whether a goroutine may begin a piece of a namespace.
func (f *fair) may(w *flow) bool {
	return w.running == 0 || f.workers-f.busy > f.reserve ||
		f.workers > f.busy && !f.several()
}

// compare is negative if namespace a goes before b.
func (f *fair) compare(a, b *flow) int {
	return cmp.Or(cmp.Compare(max(a.served, f.now), max(b.served, f.now)),
		cmp.Compare(a.served, b.served))
}

// begin counts a piece that a goroutine begins.
func (f *fair) begin(w *flow, bytes uint64) {
	if f.last != w {
		if f.last != nil {
			f.switched = time.Now()
		}
		f.last = w
	}
	w.served = max(w.served, f.now)
	f.now = w.served
	w.served += bytes
	w.running++
	f.busy++
}

// end ends a piece.
func (f *fair) end(w *flow) {
	w.running--
	f.busy--
}
