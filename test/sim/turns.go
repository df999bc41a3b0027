package sim

import (
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/simfabric"
)

// What priorities are promised. It is seen from outside: in what order slices were given to lanes,
// and what waits when that is done.
const (
	// overtakes is how much may go to a peer before something more urgent that waits for it all the
	// time, beyond what was given of that: what can be owed at most, and the slice that pays the last
	// of it.
	overtakes = 1<<20 + simfabric.DefaultSliceBytes
	// lacks is how much a lower priority that waits all the time may be behind its share: what is owed
	// before it goes first, and the slice with which that was passed.
	lacks = 256<<10 + simfabric.DefaultSliceBytes
)

// due is what a lower priority gets of what goes before it.
var due = [spray.Priorities]float64{engines.LayerStream: 1.0 / 8, engines.Background: 1.0 / 16}

// turns is the order in which a peer was served.
type turns struct {
	given [spray.Priorities]uint64 // bytes, by this event
	// bytes: that went before what is more urgent, and that went instead of this
	over, lack [spray.Priorities]float64
	touched    bool
}

// gave counts the slices of a batch. Probes are copies of what is under way and have no turn.
func (s *sidecar) gave(batch []transport.Slice) {
	if s.c.cfg.Lies > 0 {
		return // what has "landed" at once makes a rail as fast as one likes
	}
	for _, x := range batch {
		o := s.sources[x.Origin]
		if x.Attempt == 0 || o == nil || o.closed {
			continue
		}
		t := s.turns[x.Origin.Peer]
		if t == nil {
			t = &turns{}
			s.turns[x.Origin.Peer] = t
		}
		if !t.touched {
			t.touched = true
			s.served = append(s.served, x.Origin.Peer)
		}
		n, err := o.Bytes(x.Range)
		if err != nil {
			s.c.violation("%s: slice %v of transfer %d: %v", s.n.addr, x.Range, o.l.t.ID, err)
			continue
		}
		t.given[o.l.t.Prio] += n
	}
}

// inTurn looks whether what an event gave to lanes was whose turn it was.
func (s *sidecar) inTurn() {
	for _, boot := range s.served {
		t := s.turns[boot]
		t.look(s.c, s.n.addr, boot, s.ex)
		t.touched, t.given = false, [spray.Priorities]uint64{}
	}
	s.served = s.served[:0]
}

func (t *turns) look(c *Cluster, addr string, boot transfer.Boot, ex *exec.Exec) {
	waiting := ex.Waiting(boot)
	var urgent float64 // bytes that went before
	for p, first := range t.given {
		n := float64(first)
		if p > 0 {
			ahead := 0
			for _, k := range waiting[:p] {
				ahead += k
			}
			switch {
			case ahead == 0:
				t.over[p] = 0
			case n > 0 && uint64(ahead)*transfer.ChunkBytes <= tail(ex.View(0).Rails, boot):
				// It may leave slow rails to others.
			default:
				t.over[p] = max(0, t.over[p]+n-urgent)
			}
			if waiting[p] > 0 {
				t.lack[p] = max(0, t.lack[p]+due[p]*urgent-n)
			} else {
				t.lack[p] = 0
			}
			c.stats.Overtook, c.stats.Lacked = max(c.stats.Overtook, int(t.over[p])), max(c.stats.Lacked,
				int(t.lack[p]))
			if t.over[p] > overtakes {
				c.violation("%s %s: %d KiB of %s for %v, with %d chunks waiting", addr, brokeTurn,
					int(t.over[p])>>10, spray.Priority(p), boot, ahead)
				t.over[p] = 0
			}
			if t.lack[p] > lacks {
				c.violation("%s %s: %s for %v is owed %d KiB", addr, brokeShare, spray.Priority(p), boot,
					int(t.lack[p])>>10)
				t.lack[p] = 0
			}
		}
		urgent += n
	}
}

// tail is how many bytes may wait for a peer and leave the rail that would be done last to others,
// for all of it is done sooner there.
func tail(v spray.View, boot transfer.Boot) uint64 {
	var rate float64 // bytes per second
	var last time.Duration
	for _, q := range v.Pairs {
		if q.Peer == boot.String() && q.Lanes > 0 {
			rate += q.Rate
			last = max(last, q.Score+time.Duration(q.Factor*float64(q.Slice)/q.Rate*float64(time.Second)))
		}
	}
	return uint64(rate * last.Seconds())
}
