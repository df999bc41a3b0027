package trace

import (
	"slices"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/nodeapi"
)

// Bounds of the records of each kind.
const (
	maxKept   = 512 // kept, and found by their ids
	maxRecent = 32  // listed as the last ones
)

// recent keeps the last requests that ended well, and the last that did not: many good ones do not
// push a failure out. The zero value is empty.
type recent struct {
	mu         sync.Mutex // protects all below
	good, rest ring
}

// ring has the last records, at most maxKept.
type ring struct {
	last []nodeapi.Record
	next int // the oldest, once all places are taken
}

func (r *ring) add(e nodeapi.Record) {
	if len(r.last) < maxKept {
		r.last = append(r.last, e)
		return
	}
	r.last[r.next] = e
	r.next = (r.next + 1) % maxKept
}

// newest lists up to limit records that fit, newest first.
func (r *ring) newest(limit int, fits func(*nodeapi.Record) bool) (out []nodeapi.Record) {
	for i := range r.last {
		e := &r.last[(r.next+len(r.last)-1-i)%len(r.last)]
		if len(out) < limit && fits(e) {
			out = append(out, *e)
		}
	}
	return out
}

// since is the time of the oldest record if all places are taken; zero: they are not.
func (r *ring) since() time.Time {
	if len(r.last) < maxKept {
		return time.Time{}
	}
	return r.last[r.next].At
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

// newest lists up to limit records of each kind that fit, newest first. All that ended after since
// are kept; zero: all.
func (r *recent) newest(limit int, fits func(*nodeapi.Record) bool) (all []nodeapi.Record,
	since time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	all = append([]nodeapi.Record{}, r.good.newest(limit, fits)...)
	all = append(all, r.rest.newest(limit, fits)...)
	slices.SortStableFunc(all, func(a, b nodeapi.Record) int { return b.At.Compare(a.At) })
	since = r.good.since()
	if s := r.rest.since(); s.After(since) {
		since = s
	}
	return all, since
}
