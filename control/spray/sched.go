package spray

import (
	"fmt"
	"slices"

	"github.com/kvspray/kvspray/transfer"
)

// Scheduler has all lanes and flows of a process, so that one transfer's experience with a rail
// serves all. Its methods must not be called concurrently.
type Scheduler struct {
	cfg     Config
	peers   []*Peer
	lanes   map[uint64]*laneState
	busy    []*laneState // lanes with something in flight
	flights []flight
	unused  []int32
	live    int
	seq     uint64
	ticked  Instant                // the last Tick, or the first slice after an idle time
	resting []*Flow                // refused by a transport, and waiting for another try
	past    map[railName]*Counters // of forgotten pairs
	down    map[railName]bool      // local rails whose links are down

	egresses map[railName]*egressQueue
	awaited  []*egressQueue // those with waiting pairs
}

// Peer is another process, with the rail pairs and the flows to it.
type Peer struct {
	Owner any // the caller's
	// Tier returns the tier of memory at a place, and is called once per pair and place; nil or 0:
	// that of the lane. Set before the first lane.
	Tier func(Path, Place) int

	boot     transfer.Boot
	pairs    []*pair
	lanes    int
	queues   [numPriorities]queue
	owed     [numPriorities]float64 // bytes, to lower priorities
	backlog  [numPriorities]int     // chunks that wait
	inTurns  [numPriorities]int     // pairs in the turns of a local rail
	flights  int
	hedged   uint64              // bytes of hedges in flight
	probing  int                 // pairs in that state
	draining *pair               // at most one at a time
	renewAt  Instant             // next check of what time alone changes
	down     map[railName]bool   // its rails whose links are down
	credits  map[railName]uint64 // limits of bytes in flight, by its rails
	moved    Instant
}

// Waiting counts the chunks that may be sent and wait for a lane, by priority.
func (p *Peer) Waiting() [Priorities]int { return p.backlog }

// waits counts waiting chunks of a priority and all higher ones.
func (p *Peer) waits(prio Priority) (n int) {
	for _, b := range p.backlog[:prio+1] {
		n += b
	}
	return n
}

// New returns a scheduler without peers.
func New(cfg Config) *Scheduler {
	return &Scheduler{cfg: cfg.withDefaults(), lanes: map[uint64]*laneState{},
		past: map[railName]*Counters{}, down: map[railName]bool{},
		egresses: map[railName]*egressQueue{}}
}

// Peer adds a peer.
func (s *Scheduler) Peer(boot transfer.Boot, owner any) *Peer {
	p := &Peer{Owner: owner, boot: boot, down: map[railName]bool{},
		credits: map[railName]uint64{}}
	s.peers = append(s.peers, p)
	return p
}

// Forget removes a peer that has ended for good. Its lanes and flows end as usual.
func (s *Scheduler) Forget(p *Peer) {
	if i := slices.Index(s.peers, p); i >= 0 {
		s.peers = slices.Delete(s.peers, i, i+1)
		for _, q := range p.pairs {
			s.exit(q)
			s.retire(q)
		}
	}
}

// Busy reports whether slices are in flight or flows rest. The caller then calls Tick every
// TickEvery.
func (s *Scheduler) Busy() bool { return s.live > 0 || len(s.resting) > 0 }

// Flights counts slices in flight.
func (s *Scheduler) Flights() int { return s.live }

// Unconfirmed calls yield for each slice of f in flight, except hedges and probes, whose chunks
// have not landed through another copy.
func (s *Scheduler) Unconfirmed(f *Flow, yield func(rank int, bytes uint64, at Flight)) {
	for i := range s.flights {
		if fl := &s.flights[i]; fl.progress != unused && fl.flow == f && fl.copy < hedgeCopy &&
			!f.chunks.HasLanded(fl.r.First) {
			q := fl.lane.pair
			yield(q.rank, fl.bytes, Flight{Path: &q.path, Posted: fl.posted})
		}
	}
}

// TickEvery is the interval of calls of Tick.
const TickEvery = tickEvery

// LaneUp adds a lane to p.
func (s *Scheduler) LaneUp(now Instant, p *Peer, in LaneInfo) error {
	in.SliceBytes = min(max(in.SliceBytes/transfer.ChunkBytes, 1), maxSliceChunks) *
		transfer.ChunkBytes
	in.MaxSlices = max(in.MaxSlices, 1)
	in.Rank = min(max(in.Rank, 0), MaxRanks-1)
	in.Tier = min(max(in.Tier, 1), len(tierPenalty)-1)
	switch {
	case s.lanes[in.ID] != nil:
		return fmt.Errorf("spray: lane %d is up already", in.ID)
	case p.lanes >= MaxLanes:
		return fmt.Errorf("spray: lane %d over %.*s: the peer has %d lanes, which is the most", in.ID,
			maxPairNameSize, in.Path, p.lanes)
	case len(in.Path.Local) > maxPairNameSize || len(in.Path.Remote) > maxPairNameSize:
		return fmt.Errorf("spray: lane %d: the name of a rail is longer than %d bytes", in.ID,
			maxPairNameSize)
	}
	q, err := s.pair(p, in)
	if err != nil {
		return err
	}
	q.tier, q.rank, q.neutral = in.Tier, in.Rank, nominal(in.Gbps)
	q.tiers = [MaxPlaces]uint8{}
	if in.RTT > 0 && (q.rtt == 0 || in.RTT < q.rtt) {
		q.rtt = in.RTT
	}
	q.slice = max(q.slice, uint64(in.SliceBytes))
	if len(q.lanes) == 0 {
		q.slice, q.moved = uint64(in.SliceBytes), now
	}
	if q.samples == 0 {
		q.reset()
	}
	q.resize()
	l := &laneState{info: in, pair: q, head: -1, tail: -1, moved: now, busy: -1}
	q.lanes = append(q.lanes, l)
	p.lanes++
	s.lanes[in.ID] = l
	q.recount()
	for _, f := range s.resting {
		if f.peer == p {
			f.unpark() // the new lane's transport may serve the flow
		}
	}
	s.follow(now, q)
	p.share(in.Path.far())
	return nil
}

// pair finds or makes the pair of a lane. If there are too many pairs, it forgets the oldest one
// without lanes.
func (s *Scheduler) pair(p *Peer, in LaneInfo) (*pair, error) {
	var idle *pair
	for _, q := range p.pairs {
		if q.path == in.Path {
			return q, nil
		}
		if len(q.lanes) == 0 && q.inflight == 0 && (idle == nil || q.moved < idle.moved) {
			idle = q
		}
	}
	if len(p.pairs) < MaxPairs {
		q := &pair{path: in.Path, peer: p, index: len(p.pairs), neutral: nominal(in.Gbps)}
		p.pairs = append(p.pairs, q)
		s.enter(q, in.Apart)
		return q, nil
	}
	if idle == nil {
		return nil, fmt.Errorf("spray: rails %s: the peer has %d pairs, which is the most",
			in.Path, MaxPairs)
	}
	if idle.state == Probing {
		p.probing--
	}
	s.retire(idle)
	idle.drained(0)
	s.exit(idle)
	*idle = pair{path: in.Path, peer: p, index: idle.index, neutral: nominal(in.Gbps)}
	s.enter(idle, in.Apart)
	return idle, nil
}

// LaneDown removes a lane. Its slices end through End, before or after.
func (s *Scheduler) LaneDown(now Instant, id uint64) {
	l := s.lanes[id]
	if l == nil {
		return
	}
	delete(s.lanes, id)
	q := l.pair
	s.release(l)
	if l.flights > 0 && !l.broken {
		q.fault(now, &s.cfg, "lane lost")
	}
	l.broken = true
	q.lanes = slices.DeleteFunc(q.lanes, func(o *laneState) bool { return o == l })
	q.peer.lanes--
	q.moved = now
	q.recount()
	q.peer.share(q.path.far())
}

// recount recomputes the sums over usable lanes after a change of these. It is rare.
func (q *pair) recount() {
	q.live, q.flights, q.slots, q.kept, q.stalled, q.spare = 0, 0, 0, 0, q.inflight, nil
	for _, l := range q.lanes {
		if l.usable() {
			q.live++
			q.flights += l.flights
			q.slots += l.info.MaxSlices
			q.kept += l.info.MaxSlices - l.limit(false)
			q.stalled -= l.inflight - l.passed
			q.spare = l
		}
	}
	q.shared = q.slots - q.kept
	if q.live < 2 {
		q.spare = nil
	} else {
		q.shared -= q.spare.limit(false)
	}
	q.tally()
}
