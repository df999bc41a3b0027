package spray

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// Bounds of what is shown.
const (
	maxView = 1024 // pairs
	maxPast = 128  // local rails with counters of forgotten pairs
)

// PairView is one pair of rails, for people and metrics.
type PairView struct {
	Peer   string `json:"peer"`
	Path   Path   `json:"path"`
	Rank   int    `json:"rank"`
	Tier   int    `json:"tier"`
	State  string `json:"state"` // of State, or suspect, or down
	Reason string `json:"reason,omitempty"`
	// reason of the last exclusion, whatever the current state
	Last     string        `json:"last_reason,omitempty"`
	Left     time.Duration `json:"excluded_for_ns,omitempty"`
	Lanes    int           `json:"lanes"`
	Suspect  int           `json:"suspect_lanes"`
	Flights  int           `json:"slices_in_flight"`
	InFlight uint64        `json:"bytes_in_flight"`
	Window   uint64        `json:"window_bytes"`
	Low      uint64        `json:"background_window_bytes"`
	// the receiver's limit
	Credit    uint64        `json:"credit_bytes,omitempty"`
	Slice     uint64        `json:"slice_bytes"`
	Rate      float64       `json:"learned_bytes_per_second"`
	Neutral   float64       `json:"neutral_bytes_per_second"`
	Delay     time.Duration `json:"min_delay_ns"`
	Fixed     time.Duration `json:"fixed_ns"`
	Factor    float64       `json:"factor"`
	Score     time.Duration `json:"score_of_a_chunk_ns"`
	Error     float64       `json:"prediction_error"` // mean of |predicted - actual| / actual
	Samples   int           `json:"samples"`
	Counters  Counters      `json:"counters"`
	LastMoved time.Duration `json:"silent_for_ns"`
}

// View is the state of the scheduler, for debugging.
type View struct {
	Pairs   []PairView     `json:"pairs"`
	Waiting map[string]int `json:"chunks_waiting"` // by priority
	Flights int            `json:"slices_in_flight"`
}

// View describes every pair of rails, the first ones where there are very many.
func (s *Scheduler) View(now Instant) View {
	v := View{Flights: s.live, Waiting: map[string]int{}}
	for _, p := range s.peers {
		for prio := range p.queues {
			for i := range p.queues[prio].Len() {
				v.Waiting[Priority(prio).String()] += int(p.queues[prio].flow(i).Waiting())
			}
		}
		for _, q := range p.pairs {
			if len(v.Pairs) == maxView {
				return v
			}
			v.Pairs = append(v.Pairs, q.view(now))
		}
	}
	return v
}

// Link has the estimates of one rail pair to a peer, for programs that choose by them.
type Link struct {
	Path     Path
	State    string // as in PairView
	Lanes    int
	InFlight uint64  // bytes
	Window   uint64  // bytes
	Rate     float64 // bytes per second, confirmed by the receiver
	Samples  int     // of Rate; 0: it is the nominal speed, or the default
	Age      Instant // since the last of them
	Delay    Instant // the least time from a slice's start to its confirmation; 0: unknown
	// of the prediction Fixed + Factor*bytes/Rate: what a slice takes beside its bytes
	Fixed  Instant
	Factor float64
	Error  float64 // mean of |predicted - actual| / actual
}

// Links returns the estimates of each rail pair to the peer.
func (p *Peer) Links(now Instant) []Link {
	out := make([]Link, 0, len(p.pairs))
	for _, q := range p.pairs {
		v := q.view(now)
		l := Link{Path: q.path, State: v.State, Lanes: v.Lanes, InFlight: v.InFlight, Window: v.Window,
			Rate: v.Rate, Samples: v.Samples, Delay: v.Delay, Fixed: v.Fixed, Factor: v.Factor,
			Error: v.Error}
		if l.Samples > 0 {
			l.Age = now - q.sampled
		}
		if l.Delay == 0 {
			l.Delay = q.rtt
		}
		out = append(out, l)
	}
	return out
}

// RailView sums up one local rail over all peers. Its counters never decrease: they include
// forgotten pairs.
type RailView struct {
	Transport, Local string
	Pairs            int            // with lanes
	States           map[string]int // of them
	InFlight         uint64         // bytes
	Window           uint64         // bytes
	Rate             float64        // bytes per second, of the best pair
	Error            float64        // of predictions, mean over pairs that have been used
	Counters         Counters
}

// Rails sums up every local rail.
func (s *Scheduler) Rails(now Instant) []RailView {
	rails := map[railName]*RailView{}
	used := map[railName]int{}
	at := func(n railName) *RailView {
		if rails[n] == nil {
			rails[n] = &RailView{Transport: n.transport, Local: n.local, States: map[string]int{}}
		}
		return rails[n]
	}
	for n, c := range s.past {
		at(n).Counters.add(c)
	}
	for _, p := range s.peers {
		for _, q := range p.pairs {
			n := q.path.rail()
			r, v := at(n), q.view(now)
			r.Counters.add(&q.count)
			if q.samples > 0 {
				used[n]++
				r.Error += (q.err - r.Error) / float64(used[n])
			}
			if v.Lanes == 0 {
				continue
			}
			r.Pairs++
			r.States[v.State]++
			r.InFlight += v.InFlight
			r.Window += v.Window
			r.Rate = max(r.Rate, v.Rate)
		}
	}
	var out []RailView
	for _, r := range rails {
		out = append(out, *r)
	}
	slices.SortFunc(out, func(a, b RailView) int {
		return cmp.Or(strings.Compare(a.Transport, b.Transport), strings.Compare(a.Local, b.Local))
	})
	return out
}

// railName is one local rail.
type railName struct{ transport, local string }

func (p Path) rail() railName { return railName{p.Transport, p.Local} }

// retire adds the counters of a forgotten pair to those of its local rail, or, beyond maxPast
// rails, to a common sum.
func (s *Scheduler) retire(q *pair) {
	n := q.path.rail()
	if s.past[n] == nil && len(s.past) >= maxPast {
		n = railName{n.transport, "other"}
	}
	if s.past[n] == nil {
		s.past[n] = &Counters{}
	}
	s.past[n].add(&q.count)
	q.count = Counters{}
}

func (c *Counters) add(o *Counters) {
	c.Bytes += o.Bytes
	c.Confirmed += o.Confirmed
	c.Superseded += o.Superseded
	c.Failed += o.Failed
	c.Refused += o.Refused
	c.Lost += o.Lost
	c.Dropped += o.Dropped
	c.Doubled += o.Doubled
	c.TimedOut += o.TimedOut
	c.Hedges += o.Hedges
	c.Probes += o.Probes
	c.ProbesPassed += o.ProbesPassed
	c.ProbesFailed += o.ProbesFailed
	c.Errors += o.Errors
	c.Suspicions += o.Suspicions
	c.Exclusions += o.Exclusions
	c.Readmissions += o.Readmissions
}

func (q *pair) view(now Instant) PairView {
	v := PairView{Peer: q.peer.boot.String(), Path: q.path, Rank: q.rank, Tier: q.tier,
		State: q.state.String(), Lanes: len(q.lanes),
		InFlight: q.inflight, Window: q.window, Low: q.low, Credit: q.credit, Slice: q.piece,
		Rate: q.bw * 1e9, Neutral: q.neutral * 1e9, Delay: q.minDelay(),
		Fixed: Instant(q.b0), Factor: q.b1, Score: Instant(q.score(now, transfer.ChunkBytes, 0)),
		Error: q.err, Samples: q.samples,
		Counters: q.count, LastMoved: now - q.moved}
	for _, l := range q.lanes {
		v.Flights += l.flights
		if l.suspect {
			v.Suspect++
		}
	}
	switch {
	case len(q.lanes) == 0:
		v.State = "down"
	case q.live == 0 && q.state <= Readmitted:
		v.State = "suspect"
	}
	if v.Last = q.reason; q.state != Healthy {
		v.Reason = q.reason
	}
	if q.state == Excluded && !q.down {
		v.Left = max(q.until-now, 0)
	}
	return v
}
