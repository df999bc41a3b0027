package gdr

import (
	"errors"
	"log/slog"
	"testing"
	"time"
)

// wayRig sends slices in order through ways, with a window of some in flight, as a lane does.
type wayRig struct {
	w     *ways
	now   time.Time
	line  []*flying
	bytes [numWays]uint64
}

type flying struct {
	t     *turn
	start time.Time
}

const (
	rigSlice  = 1 << 20
	rigWindow = 16
)

func newWayRig() *wayRig {
	return &wayRig{w: newWays(slog.New(slog.DiscardHandler)), now: time.Unix(1e9, 0)}
}

// move sends n bytes; each way takes some nanoseconds for a byte.
func (r *wayRig) move(n uint64, cost [numWays]float64) {
	for ; n > 0; n -= rigSlice {
		t := r.w.pick(rigSlice)
		r.bytes[t.way] += rigSlice
		r.line = append(r.line, &flying{t, r.now})
		if len(r.line) == rigWindow {
			r.end(cost)
		}
	}
	for len(r.line) > 0 {
		r.end(cost)
	}
}

func (r *wayRig) end(cost [numWays]float64) {
	x := r.line[0]
	r.line = r.line[1:]
	r.now = r.now.Add(time.Duration(cost[x.t.way] * rigSlice))
	r.w.ended(x.t, rigSlice, x.start, r.now, true)
}

// share is the part of the bytes that took a way since the last call.
func (r *wayRig) share(x way) float64 {
	s := float64(r.bytes[x]) / float64(r.bytes[direct]+r.bytes[staged])
	r.bytes = [numWays]uint64{}
	return s
}

// Traffic takes the way with the least cost, where the cost of host memory's bandwidth counts, and
// follows a change.
func TestWaysAreRanked(t *testing.T) {
	const total = 8 << 30
	for name, x := range map[string]struct {
		cost [numWays]float64 // nanoseconds for a byte
		best way
	}{
		"direct is faster":           {[numWays]float64{0.02, 0.05}, direct},
		"both are equal":             {[numWays]float64{0.02, 0.02}, direct},
		"staged is a little faster":  {[numWays]float64{0.022, 0.02}, direct},
		"another root complex":       {[numWays]float64{0.1, 0.03}, staged},
		"staged is somewhat faster":  {[numWays]float64{0.03, 0.02}, staged},
		"direct hardly moves at all": {[numWays]float64{10, 0.03}, staged},
	} {
		t.Run(name, func(t *testing.T) {
			r := newWayRig()
			r.move(total, x.cost)
			if s := r.share(x.best); s < 0.95 {
				t.Errorf("%.3f of the bytes took the way %s", s, x.best)
			}
			// then the other way round
			r.move(total, [numWays]float64{x.best.price(), x.best.other().price()})
			r.share(direct)
			r.move(total, [numWays]float64{x.best.price(), x.best.other().price()})
			if s := r.share(x.best.other()); s < 0.95 {
				t.Errorf("after a change, %.3f of the bytes took the way %s", s, x.best.other())
			}
		})
	}
}

// price is a cost at which the other way is better.
func (w way) price() float64 { return [numWays]float64{1, 0.1}[w] }

// With one slice at a time, the ways are ranked by their delay.
func TestWaysOfSingleSlices(t *testing.T) {
	r := newWayRig()
	for range 1 << 10 {
		r.move(rigSlice, [numWays]float64{0.02, 0.06})
		r.now = r.now.Add(time.Millisecond)
	}
	if s := r.share(direct); s < 0.8 {
		t.Errorf("%.3f of the bytes went directly", s)
	}
}

// A way that fails is left at once, and tried again ever more rarely.
func TestFailedWay(t *testing.T) {
	r := newWayRig()
	cost := [numWays]float64{0.02, 0.03}
	r.move(32<<20, cost)
	r.w.fault(direct, errors.New("no"))
	r.w.fault(direct, errors.New("no")) // another lane's slices
	r.share(direct)
	r.move(trialFault*trialFirst, cost)
	if s := r.share(staged); s != 1 {
		t.Errorf("%.3f of the bytes took the way that failed", 1-s)
	}
	faults := 0
	for range 256 << 10 { // 256 GiB
		x := r.w.pick(rigSlice)
		if x.way == direct {
			faults++
			r.w.fault(direct, errors.New("no"))
		}
		r.w.ended(x, rigSlice, r.now, r.now, false)
	}
	if faults < 4 || faults > 10 {
		t.Errorf("%d trials in 256 GiB", faults)
	}
	r.share(direct)
	r.move(300<<30, cost)
	if s := r.share(direct); s < 0.3 {
		t.Errorf("a way that works again has %.3f of the bytes", s)
	}
}
