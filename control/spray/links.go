package spray

import (
	"fmt"
	"math"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// What others know about rails, and this package cannot find out by moving bytes: that a link is
// down, where memory lies, how much a receiver wants in flight, and that bytes arrive within a
// slice.

// Place says where the memory of a flow lies, at both ends, in the numbering of whoever opens
// flows. 0 is unknown.
type Place uint8

// MaxPlaces bounds what one peer tells apart; what is more is unknown.
const MaxPlaces = 64

const (
	maxLinks = 512                // rails of one side whose state or credit is remembered
	never    = Instant(1<<63 - 1) // until a link is back
	maxWay   = 4 << 30            // bytes that a way can hold
	// a lane is asked for its received bytes after this part of Config.Suspect.
	askAfter = 3
)

// CreditSpan is the time in which a rail moves the credits that its owner has given: what may wait
// in front of it.
const CreditSpan = time.Millisecond

// tierAt is the tier of the pair for memory at a place: 1 to 3.
func (q *pair) tierAt(at Place) uint8 {
	if t := q.tiers[at]; t != 0 {
		return t
	}
	return q.askTier(at)
}

func (q *pair) askTier(at Place) uint8 {
	t := q.tier
	if at != 0 && q.peer.Tier != nil {
		if v := q.peer.Tier(q.path, at); v != 0 {
			t = v
		}
	}
	q.tiers[at] = uint8(min(max(t, 1), len(tierPenalty)-1))
	return q.tiers[at]
}

// ForgetPlace makes a place mean something else from now on.
func (p *Peer) ForgetPlace(at Place) {
	for _, q := range p.pairs {
		q.tiers[min(at, MaxPlaces-1)] = 0
	}
}

// Moved says that bytes of what a lane carries have reached the other end since it was asked last.
func (s *Scheduler) Moved(now Instant, id uint64) {
	l := s.lanes[id]
	if l == nil || l.broken {
		return
	}
	q := l.pair
	s.alive(now, l)
	q.peer.moved = now
	q.stirs(now)
}

// Quiet calls yield for each lane that can tell what it has received, and should be asked: it is
// busy and has brought nothing for a while.
func (s *Scheduler) Quiet(now Instant, yield func(lane uint64)) {
	for _, l := range s.busy {
		if l.info.ReportsAcked && !l.broken && now-max(l.moved, s.flights[l.head].posted) >=
			s.cfg.Suspect/askAfter {
			yield(l.info.ID)
		}
	}
}

// RailDown takes every pair over a rail out of use at once, for its link is known to be down; what
// it carries goes to others. p: the rail is that peer's; nil: it is ours. It lasts until RailUp.
func (s *Scheduler) RailDown(now Instant, p *Peer, transport, rail string) {
	s.setLink(now, p, railName{transport, rail}, true)
}

// RailUp ends RailDown: a probe goes first.
func (s *Scheduler) RailUp(now Instant, p *Peer, transport, rail string) {
	s.setLink(now, p, railName{transport, rail}, false)
}

func (s *Scheduler) setLink(now Instant, p *Peer, n railName, down bool) {
	known, peers := s.down, s.peers
	if p != nil {
		known, peers = p.down, []*Peer{p}
	}
	if down && len(known) >= maxLinks && !known[n] {
		return
	}
	if down {
		known[n] = true
	} else {
		delete(known, n)
	}
	for _, o := range peers {
		for _, q := range o.pairs {
			if q.path.rail() == n && p == nil || q.path.far() == n && p != nil {
				s.follow(now, q)
			}
		}
	}
}

// far is the rail of the peer.
func (p Path) far() railName { return railName{p.Transport, p.Remote} }

// follow brings a pair to what is known of its two links.
func (s *Scheduler) follow(now Instant, q *pair) {
	here, there := s.down[q.path.rail()], q.peer.down[q.path.far()]
	switch down := here || there; {
	case down && !q.down:
		if q.state == Probing {
			q.peer.probing--
		}
		q.down, q.state, q.since, q.until, q.errors, q.silent = true, Excluded, now, never, 0, false
		q.drained(now)
		q.count.Exclusions++
		q.reason = fmt.Sprintf("the link of the local rail %s is down", q.path.Local)
		if !here {
			q.reason = fmt.Sprintf("the peer says that the link of its rail %s is down", q.path.Remote)
		}
		for _, l := range q.lanes {
			s.release(l)
		}
	case !down && q.down:
		q.down, q.until, q.peer.renewAt = false, now, 0 // renew makes it Probing
	}
}

// Credit is how many bytes may be in flight to a rail of p, as its owner says; 0: as many as the
// windows allow. False: there are too many of them already.
func (s *Scheduler) Credit(p *Peer, transport, rail string, bytes uint64) bool {
	n := railName{transport, rail}
	if _, known := p.credits[n]; !known && len(p.credits) >= maxLinks {
		return false
	}
	if bytes == 0 {
		delete(p.credits, n)
	} else {
		p.credits[n] = bytes
	}
	p.share(n)
	return true
}

// share divides the credit of a remote rail among the pairs that lead there.
func (p *Peer) share(n railName) {
	credit, pairs := p.credits[n], uint64(0)
	for _, q := range p.pairs {
		if q.path.far() == n && len(q.lanes) > 0 {
			pairs++
		}
	}
	for _, q := range p.pairs {
		if q.path.far() == n {
			q.credit = 0
			if credit > 0 {
				q.credit = max(credit/max(pairs, 1), transfer.ChunkBytes)
			}
			q.resize()
		}
	}
}

// creditMost is the number of bytes in flight that the receiver's credit permits: the credit is
// what may wait at the receiver's end, and on a long path most of a window does not wait there.
func (q *pair) creditMost() uint64 {
	if q.credit == 0 {
		return math.MaxUint64
	}
	return q.credit + uint64(min(float64(q.credit)*float64(q.rtt)/float64(CreditSpan), maxWay))
}

// credited keeps window and slice within the credit.
func (q *pair) credited() {
	if most := q.creditMost(); q.window > most {
		q.window = most
		q.piece = min(q.piece, max(q.window/2/transfer.ChunkBytes, 1)*transfer.ChunkBytes)
	}
}

// penalty of a pair for a flow, where the nearest that the flow can have is of tier near: being far
// costs only where something is nearer.
func penalty(tier, near uint8) float64 { return tierPenalty[tier] / tierPenalty[min(tier, near)] }
