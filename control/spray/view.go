package spray

import (
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// maxView bounds the pairs that a snapshot shows.
const maxView = 1024

// PairView is one pair of rails, for people and metrics.
type PairView struct {
	Peer      string        `json:"peer"`
	Path      Path          `json:"path"`
	Rank      int           `json:"rank"`
	Tier      int           `json:"tier"`
	State     string        `json:"state"` // of State, or suspect, or down
	Reason    string        `json:"reason,omitempty"`
	Left      time.Duration `json:"excluded_for_ns,omitempty"`
	Lanes     int           `json:"lanes"`
	Suspect   int           `json:"suspect_lanes"`
	Flights   int           `json:"slices_in_flight"`
	InFlight  uint64        `json:"bytes_in_flight"`
	Window    uint64        `json:"window_bytes"`
	Slice     uint64        `json:"slice_bytes"`
	Rate      float64       `json:"learned_bytes_per_second"`
	Neutral   float64       `json:"neutral_bytes_per_second"`
	Delay     time.Duration `json:"least_delay_ns"`
	Fixed     time.Duration `json:"b0_ns"`
	Factor    float64       `json:"b1"`
	Score     time.Duration `json:"score_of_a_chunk_ns"`
	Error     float64       `json:"prediction_error"` // mean of |predicted - actual| / actual
	Samples   int           `json:"samples"`
	Counters  Counters      `json:"counters"`
	LastMoved time.Duration `json:"silent_for_ns"`
}

// View is what the scheduler knows.
type View struct {
	Pairs   []PairView     `json:"pairs"`
	Waiting map[string]int `json:"chunks_waiting"` // by priority
	Flights int            `json:"slices_in_flight"`
}

// View describes every pair of rails, the first ones where there are very many.
func (s *Scheduler) View(now Instant) View {
	v := View{Flights: s.live, Waiting: map[string]int{}}
	for _, p := range s.peers {
		for prio, q := range p.queues {
			for _, f := range q {
				v.Waiting[Priority(prio).String()] += int(f.Waiting())
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

func (q *pair) view(now Instant) PairView {
	v := PairView{Peer: q.peer.boot.String(), Path: q.path, Rank: q.rank, Tier: q.tier, State: q.state.String(), Lanes: len(q.lanes),
		InFlight: q.inflight, Window: q.window, Slice: q.piece, Rate: q.bw * 1e9, Neutral: q.neutral * 1e9, Delay: q.least(),
		Fixed: Instant(q.b0), Factor: q.b1, Score: Instant(q.score(transfer.ChunkBytes)), Error: q.err, Samples: q.samples,
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
	if q.state != Healthy {
		v.Reason = q.reason
	}
	if q.state == Excluded {
		v.Left = max(q.until-now, 0)
	}
	return v
}
