package gdr

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transport"
)

// way is how a slice gets between memory of a GPU and the NIC.
type way uint8

const (
	direct  way = iota // the NIC reads and writes the memory
	staged             // through a slab
	numWays = 2
)

func (w way) String() string { return [numWays]string{"direct", "staged"}[w] }
func (w way) other() way     { return numWays - 1 - w }

// Bytes between trials of the way that is not the best one, and of a trial: time does not count,
// because slow or little traffic would be on trial more often.
const (
	trialBytes = 16 << 20
	// A trial comes after trialFirst, and after twice as many bytes each time that it loses.
	trialFirst = 64 << 20
	trialLast  = 4 << 30
	// A fault costs a registration or a lane, so the next trial is later by this factor.
	trialFault     = 4
	trialLastFault = 64 << 30
	trialWins      = 2 // in a row make a way the best one
	// stagedPrice is the factor by which staging must be faster, because it takes host memory's
	// bandwidth and the GPU's copy engines.
	stagedPrice = 1.25
	costBytes   = 64 << 20 // the cost of the best way is a mean over the last 64 to 128 MiB
	costMin     = trialBytes / 2
)

// ways chooses between the two ways of one rail to one GPU, in one direction, by their measured
// time for a byte. Slices of both ways at once would wait behind each other in the same queues, so
// all traffic takes one way at a time: turns of the best way, and trials of the other.
type ways struct {
	log *slog.Logger

	mu sync.Mutex
	// guarded by mu
	best  way
	cost  [numWays]float64 // nanoseconds; 0: unknown
	turn  *turn            // the present one
	pause uint64           // until the next trial
	wins  int
}

// turn is a time in which new slices take one way.
type turn struct {
	way   way
	trial bool
	left  uint64 // bytes until its end
	over  bool
	open  int       // slices that have not ended
	last  time.Time // of the last slice's end; zero: its first measures what was in front of it
	bytes uint64
	took  time.Duration // with slices in flight
}

func newWays(log *slog.Logger) *ways {
	return &ways{log: log, pause: trialFirst, turn: &turn{left: trialFirst}}
}

// pick returns the turn of a new slice of n bytes.
func (w *ways) pick(n uint64) *turn {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := w.turn
	t.open++
	if t.left > n {
		t.left -= n
		return t
	}
	t.over = true
	if t.trial {
		w.turn = &turn{way: w.best, left: w.pause}
	} else {
		w.turn = &turn{way: w.best.other(), left: trialBytes, trial: true}
	}
	return t
}

// ended ends a slice. measured: it went this way from start to end.
func (w *ways) ended(t *turn, n uint64, start, end time.Time, measured bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	t.open--
	if measured {
		w.measureLocked(t, n, start, end)
	}
	if t.trial && t.over && t.open == 0 && t.way != w.best {
		w.judgeLocked(t)
	}
}

func (w *ways) measureLocked(t *turn, n uint64, start, end time.Time) {
	if !t.last.IsZero() {
		if start.Before(t.last) {
			start = t.last // before, other slices moved
		}
		t.bytes += n
		t.took += max(end.Sub(start), 1)
	}
	if end.After(t.last) {
		t.last = end
	}
	if t.bytes < costMin || t.trial {
		return
	}
	w.cost[t.way] = float64(t.took) / float64(t.bytes)
	if t.bytes >= 2*costBytes {
		t.bytes, t.took = t.bytes/2, t.took/2
	}
}

// judgeLocked compares a trial with the best way.
func (w *ways) judgeLocked(t *turn) {
	if t.bytes < costMin || w.cost[w.best] == 0 {
		return
	}
	w.cost[t.way] = float64(t.took) / float64(t.bytes)
	if w.priced(t.way) >= w.priced(w.best) {
		w.wins, w.pause = 0, max(w.pause, min(2*w.pause, trialLast))
		return
	}
	if w.wins++; w.wins < trialWins {
		w.pause = trialFirst
		w.turn.left = min(w.turn.left, trialFirst)
		return
	}
	w.log.Info("way between NIC and GPU changed", "way", t.way.String(), "gb_per_s", 1/w.cost[t.way],
		"before", 1/w.cost[w.best])
	w.takeLocked(t.way, trialFirst)
}

func (w *ways) priced(x way) float64 {
	if x == staged {
		return w.cost[x] * stagedPrice
	}
	return w.cost[x]
}

// fault leaves a way that has failed, until the next trial.
func (w *ways) fault(x way, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.best != x && w.turn.way != x {
		return // it was left already
	}
	if w.best == x {
		w.log.Warn("way between NIC and GPU failed", "way", x.String(), "now", x.other().String(),
			"err", err)
	}
	w.takeLocked(x.other(), min(trialFault*w.pause, trialLastFault))
}

func (w *ways) takeLocked(best way, pause uint64) {
	w.best, w.wins, w.pause = best, 0, pause
	w.turn = &turn{way: best, left: pause}
}

// trip is the way of one slice.
type trip struct {
	ways  *ways // nil: the memory's only way
	turn  *turn // nil: not measured, or ended
	way   way
	began time.Time
}

// wayKey identifies ways of a device.
type wayKey struct {
	device mem.Device
	remote bool
}

// trip chooses the way of a slice of n bytes.
func (d *openDevice) trip(g mem.Device, remote bool, n uint64) trip {
	if g == nil {
		return trip{}
	}
	d.mu.Lock()
	w := d.ways[wayKey{g, remote}]
	if w == nil {
		w = newWays(d.keys.log.With("transport", Name, "device", d.Name(), "writes", remote))
		d.ways[wayKey{g, remote}] = w
	}
	d.mu.Unlock()
	t := w.pick(n)
	return trip{ways: w, turn: t, way: t.way}
}

func (t *trip) start(now time.Time) { t.began = now }

// ended measures a slice that has gone its way.
func (t *trip) ended(n uint64) { t.end(n, !t.began.IsZero()) }

// drop ends a slice that is not measured. Idempotent, also after ended.
func (t *trip) drop() { t.end(0, false) }

func (t *trip) end(n uint64, measured bool) {
	if t.turn != nil {
		t.ways.ended(t.turn, n, t.began, time.Now(), measured)
		t.turn = nil
	}
}

// fault leaves the way of a slice that failed there.
func (t *trip) fault(err error) {
	if t.ways != nil {
		t.ways.fault(t.way, err)
	}
	t.drop()
}

// detour takes a slice through host memory that the NIC cannot move itself. Memory that it never
// reaches is no reason to leave the direct way of the GPU's other memory.
func (t *trip) detour(err error) {
	if errors.Is(err, transport.ErrNotSupported) {
		t.drop()
	} else {
		t.fault(err)
	}
	t.way = staged
}
