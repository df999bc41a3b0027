package sim

import (
	"time"

	"github.com/kvspray/kvspray/control/exec"
	limits "github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/control/spray"
)

// What must hold after every event. Each promise has words of its own, by which the mutants
// recognize what noticed them.
const (
	brokeWrite   = "is written outside a live lease"
	brokeRead    = "is read outside a live lease"
	brokeCommit  = "is committed with chunks that are missing or wrong"
	brokeRelease = "goes back to its engine against the release rule"
	brokeSlices  = "has lost count of its slices"
	brokeBound   = "holds more than its bound"
	brokeEnd     = "never ended"
	brokeLeak    = "holds something when nothing is open"
	brokePath    = "failed while there was a path"
	brokeSlot    = "was given out again before its fence"
	brokeWord    = "refused a message of an honest peer"
	brokeTurn    = "gave lanes what is less urgent first"
	brokeShare   = "starves what is less urgent"
)

// Promises are all of them.
var Promises = []string{brokeWrite, brokeRead, brokeCommit, brokeRelease, brokeSlices, brokeBound,
	brokeEnd, brokeLeak, brokePath,
	brokeSlot, brokeWord, brokeTurn, brokeShare}

// waiting bounds what waits for one key here: a grant, its parts, and what was replayed of older
// ones.
const waiting = 2 * MaxRanks

// check looks at what the executor holds.
func (s *sidecar) check() {
	x := s.ex.Load()
	if x.Flights != len(s.moving) {
		s.c.violation("%s %s: %d are in flight, %d were given out and have not ended", s.n.addr,
			brokeSlices, x.Flights, len(s.moving))
		// A violation is counted once; what follows is the same.
		clear(s.moving)
	}
	bound := func(what string, n, limit int) {
		if n > limit {
			s.c.violation("%s %s: %d %s, at most %d", s.n.addr, brokeBound, n, what, limit)
		}
	}
	cfg := s.c.cfg.Exec
	slices := cfg.MaxSlices
	if slices == 0 {
		slices = exec.DefaultMaxSlices
	}
	bound("destination leases", x.Dests, limits.MaxDest)
	bound("source leases", x.Sources, limits.MaxSource)
	bound("slices in flight", x.Flights, slices*max(x.Peers, 1))
	bound("grants of peers", x.Inbound, limits.MaxFanout*limits.MaxSource+exec.DefaultMaxPending*max(
		x.Peers, 1))
	bound("lanes", x.Lanes, spray.MaxLanes*max(x.Peers, 1))
	// One for each thing that has a time of its own, grants whose sidecar is away among them; a fence
	// or a close that failed may be reported two times; credits and what is in flight have one look at
	// all of them.
	bound("timers", x.Timers, x.Dests+x.Sources+x.Inbound+x.Asked+x.Describing+x.Endpoints+x.
		Pending*waiting+2*s.bound()+2)
	s.inTurn()
	for _, p := range s.pipes {
		bound("control frames for one peer", len(p.waiting), maxWaiting)
	}
}

// bound counts the grants and origins that the driver has.
func (s *sidecar) bound() (n int) {
	for _, k := range s.drv.Bound() {
		n += k
	}
	return n
}

// quiet looks at what an executor holds when no lease is open anywhere.
func (s *sidecar) quiet() {
	x := s.ex.Load()
	if x.Dests+x.Sources+x.Inbound+x.Flights+x.Asked+x.Pending+x.Describing+x.Timers > 0 ||
		s.bound() > 0 {
		s.c.violation("%s %s: %+v, %d grants and origins", s.n.addr, brokeLeak, x, s.bound())
	}
}

// read is called before a chunk of the source is read.
func (s *source) read(chunk uint32) {
	if l := s.l; l.done != nil || s.closed || s.s.dead {
		s.s.c.violation("transfer %d: chunk %d of the source %s (ended %v, closed %v, dead %v)", l.t.ID,
			chunk, brokeRead, l.done != nil, s.closed, s.s.dead)
	}
}

// write is called before a chunk of the destination is written.
func (k *sink) write(chunk uint32) {
	if l := k.l; l.done != nil || k.fenced || k.s.dead {
		k.s.c.violation("transfer %d: chunk %d %s (ended %v, fenced %v, dead %v)", l.t.ID, chunk,
			brokeWrite, l.done != nil, k.fenced, k.s.dead)
	}
}

// released is called before a lease goes back to its engine.
func (l *lease) released() {
	for _, k := range l.sinks {
		if !k.fenced && !k.s.dead {
			l.n.c.violation("transfer %d: the destination %s: slot %d is neither fenced nor is its "+
				"process dead", l.t.ID, brokeRelease, k.land.Grant.Slot)
		}
	}
	for _, s := range l.sources {
		if !s.closed && !s.s.dead {
			l.n.c.violation(
				"transfer %d: the source %s: an origin is neither closed nor is its process dead", l.t.ID,
				brokeRelease)
		}
	}
}

// committed is called when a rank of the receiving engine has the completion.
func (l *lease) committed() {
	t, own := l.t, held(l.rank, len(l.e.boots))
	// What one rank of the prefill gave is all from one life of its blocks: half of a layer computed
	// once and half computed again is no layer.
	for layer := own.lo; layer < own.hi; layer++ {
		epoch := uint32(l.content[l.at(layer, 0)] >> 56)
		for i := range t.perLayer() {
			if w := l.content[l.at(layer, i)]; w != t.word(layer, i, epoch) || epoch > t.epoch {
				l.n.c.violation("transfer %d %s: chunk %d of layer %d holds %x, want %x", t.ID, brokeCommit, i,
					layer, w, t.word(layer, i, epoch))
				return
			}
		}
	}
	if want := t.Bytes() / uint64(len(l.e.boots)); l.done.Bytes != want {
		l.n.c.violation("transfer %d %s: it says %d bytes of %d", t.ID, brokeCommit, l.done.Bytes, want)
	}
}

// Settle looks at the end of a run: whether all that began ended, in time; patience is what the run
// itself kept processes from running.
func (c *Cluster) Settle(patience time.Duration) {
	for _, t := range c.transfers {
		switch {
		case t.Received == nil, t.Sent == nil && !t.Alone:
			c.violation("transfer %d from %s to %s %s (received %v, sent %v)", t.ID, t.From.addr, t.To.addr,
				brokeEnd, t.Received != nil, t.Sent != nil)
		case t.Last() > t.Deadline+patience:
			c.violation("transfer %d %s in time: after %s, its deadline was %s", t.ID, brokeEnd,
				t.Last(), t.Deadline)
		}
	}
	if c.open > 0 {
		return
	}
	for _, n := range c.Nodes {
		if n.side != nil {
			n.side.quiet()
		}
	}
}
