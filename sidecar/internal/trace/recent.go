package trace

import (
	"slices"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/metrics"
)

// maxRecent bounds how many ended requests a recent keeps of each kind.
const maxRecent = 32

// recent keeps the last requests that ended well, and the last that did not: many good ones do not
// push a failure out. The zero value is empty.
type recent struct {
	mu         sync.Mutex // protects all below
	good, rest ring
}

type ring struct {
	last [maxRecent]Ended
	n    uint64 // added so far
}

func (r *ring) add(e Ended) {
	r.last[r.n%maxRecent] = e
	r.n++
}

// newest lists what is kept, newest first.
func (r *ring) newest() []Ended {
	out := []Ended{}
	for i := r.n; i > 0 && r.n-i < maxRecent; i-- {
		out = append(out, r.last[(i-1)%maxRecent])
	}
	return out
}

// put adds a line that has a summary.
func (r *recent) put(line any) {
	l, ok := line.(record)
	if !ok {
		return
	}
	e := l.ended()
	e.At = time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if e.Outcome == string(metrics.OK) {
		r.good.add(e)
	} else {
		r.rest.add(e)
	}
}

// newest lists both kinds, newest first.
func (r *recent) newest() []Ended {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := append(r.good.newest(), r.rest.newest()...)
	slices.SortStableFunc(all, func(a, b Ended) int { return b.At.Compare(a.At) })
	return all
}
