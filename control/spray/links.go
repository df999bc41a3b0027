package spray

import (
	"fmt"
	"math"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// Facts about rails that the scheduler cannot learn by moving bytes: link states, distances of
// memory, credits of receivers, and bytes that arrive within a slice.

// Place is the location of a flow's memory, at both ends, in the numbering of the caller of Open. 0
// is unknown.
type Place uint8

// MaxPlaces bounds the places of one peer; the others are unknown.
const MaxPlaces = 64

const (
	maxLinks = 512                // rails of one side whose state or credit is remembered
	never    = Instant(1<<63 - 1) // end of an exclusion without a link
	maxPath  = 4 << 30            // bytes that a path can hold
	// The driver queries a lane's received bytes after this part of Config.Suspect.
	askAfter = 3
)

// CreditSpan is the time in which a rail moves the sum of the credits for it, which is the longest
// queue in front of it.
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

// ForgetPlace frees a place for other memory.
func (p *Peer) ForgetPlace(at Place) {
	for _, q := range p.pairs {
		q.tiers[min(at, MaxPlaces-1)] = 0
	}
}

// Moved reports that bytes of a lane have reached the other end since the last query.
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

// Quiet calls yield for each busy lane without recent progress whose transport can report the
// received bytes. The driver queries these.
func (s *Scheduler) Quiet(now Instant, yield func(lane uint64)) {
	for _, l := range s.busy {
		if l.info.ReportsAcked && !l.broken && now-max(l.moved, s.flights[l.head].posted) >=
			s.cfg.Suspect/askAfter {
			yield(l.info.ID)
		}
	}
}

// RailDown excludes every pair over a rail whose link is down, until RailUp, and frees its chunks
// for other pairs. p is the peer that owns the rail; nil: it is a local rail.
func (s *Scheduler) RailDown(now Instant, p *Peer, transport, rail string) {
	s.setLink(now, p, railName{transport, rail}, true)
}

// RailUp ends RailDown. The pairs return through a probe.
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

// follow applies the states of its two links to a pair.
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
			q.reason = fmt.Sprintf("the peer reports that the link of its rail %s is down", q.path.Remote)
		}
		for _, l := range q.lanes {
			s.release(l)
		}
	case !down && q.down:
		q.down, q.until, q.peer.renewAt = false, now, 0 // renew makes it Probing
	}
}

// Credit sets the receiver's limit of bytes in flight to a rail of p; 0: only the windows limit
// them. False: too many rails have credits.
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

// creditMax is the number of bytes in flight that the receiver's credit permits: the credit is
// what may wait at the receiver's end, and on a long path most of a window does not wait there.
func (q *pair) creditMax() uint64 {
	if q.credit == 0 {
		return math.MaxUint64
	}
	return q.credit + uint64(min(float64(q.credit)*float64(q.rtt)/float64(CreditSpan), maxPath))
}

// credited keeps window and slice within the credit.
func (q *pair) credited() {
	if limit := q.creditMax(); q.window > limit {
		q.window = limit
		q.piece = min(q.piece, max(q.window/2/transfer.ChunkBytes, 1)*transfer.ChunkBytes)
	}
}

// penalty of a pair for a flow, where the nearest that the flow can have is of tier near: being far
// costs only where something is nearer.
func penalty(tier, near uint8) float64 { return tierPenalty[tier] / tierPenalty[min(tier, near)] }
