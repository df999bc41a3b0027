package spray

import (
	"fmt"
	"slices"

	"github.com/kvspray/kvspray/transfer"
)

// Scheduler knows every lane of a process and every flow: what one transfer learns about a rail
// holds for all. Its methods must not be called concurrently.
type Scheduler struct {
	cfg     Config
	peers   []*Peer
	lanes   map[uint64]*laneState
	busy    []*laneState // lanes with something in flight
	flights []flight
	unused  []int32
	live    int
	seq     uint64
	// the last Tick, or when the first slice went out since all was idle
	ticked  Instant
	resting []*Flow                // those that wait because a transport refused them
	past    map[railName]*Counters // of pairs that are forgotten
	down    map[railName]bool      // our rails whose links are down

	egresses map[railName]*egressQueue
	awaited  []*egressQueue // for which a pair waits
}

// Peer is one other process, with the pairs of rails that lead there and the flows that want to go
// there.
type Peer struct {
	Owner any // the caller's
	// Tier is asked once per pair for the tier of memory at a place; nil or 0: that of the lane. Set
	// before the first lane.
	Tier func(Path, Place) int

	boot     transfer.Boot
	policy   Policy
	pairs    []*pair
	lanes    int
	queues   [numPriorities]queue
	owed     [numPriorities]float64 // bytes, to lower priorities
	backlog  [numPriorities]int     // chunks that wait
	inTurns  [numPriorities]int     // pairs that wait for their turn at a local rail
	flights  int
	hedged   uint64              // bytes of hedges in flight
	probing  int                 // pairs in that state
	draining *pair               // nil: none is
	renewAt  Instant             // when time alone may have changed something
	turn     int                 // of RoundRobin
	down     map[railName]bool   // its rails whose links are down
	credits  map[railName]uint64 // bytes that it wants in flight at most, by its rails
	moved    Instant
}

// Waiting counts the chunks that may be sent and wait for a lane, by priority.
func (p *Peer) Waiting() [Priorities]int { return p.backlog }

// waits counts chunks that wait and are at least so urgent.
func (p *Peer) waits(prio Priority) (n int) {
	for _, b := range p.backlog[:prio+1] {
		n += b
	}
	return n
}

// flight is a slice in flight.
type flight struct {
	flow       *Flow
	lane       *laneState
	r          transfer.Range
	bytes      uint64
	use        uint32 // how often this entry was given out
	prev, next int32  // on its lane, by age

	posted    Instant
	predicted Instant
	forgiven  Instant // of its age: we were asleep
	begin     Instant // of the busy period that counts for its rate sample
	delivered uint64  // of the pair, then
	ahead     uint64  // in flight on the pair, or waiting at the local rail, before it

	mark         uint64 // of its egress, as egress.posted; 0: it has none
	outDelivered uint64
	outBegin     Instant
	outLeft      Instant // when it would have left the local rail

	live     bool
	outBusy  bool // it found a queue at the local rail
	outClean bool // it found nothing at all there
	limited  bool // the rail was not kept busy: its rate says little
	clean    bool // it found next to nothing before it: what it takes is the delay of the path
	probe    bool
	hedge    bool // is the second copy
	doubled  bool // has a second copy, or its chunks wait for another lane
	late     bool // should have ended
	charged  bool // as a failure, for that
	passed   bool // its lane has moved since: it fills no window any more
}

// New returns a scheduler without peers.
func New(cfg Config) *Scheduler {
	return &Scheduler{cfg: cfg.withDefaults(), lanes: map[uint64]*laneState{},
		past: map[railName]*Counters{}, down: map[railName]bool{},
		egresses: map[railName]*egressQueue{}}
}

// Peer adds a peer.
func (s *Scheduler) Peer(boot transfer.Boot, owner any) *Peer {
	p := &Peer{Owner: owner, boot: boot, policy: s.cfg.Policy, down: map[railName]bool{},
		credits: map[railName]uint64{}}
	s.peers = append(s.peers, p)
	return p
}

// Forget drops what is known of a peer that will never speak again. Its lanes and flows end as
// ever.
func (s *Scheduler) Forget(p *Peer) {
	if i := slices.Index(s.peers, p); i >= 0 {
		s.peers = slices.Delete(s.peers, i, i+1)
		for _, q := range p.pairs {
			s.exit(q)
			s.bury(q)
		}
	}
}

// Busy reports whether anything is in flight, or rests: then Tick wants to be called every
// TickEvery.
func (s *Scheduler) Busy() bool { return s.live > 0 || len(s.resting) > 0 }

// Flights counts slices in flight.
func (s *Scheduler) Flights() int { return s.live }

// Unconfirmed calls yield for each slice of f in flight whose chunks have not landed otherwise,
// hedges left out.
func (s *Scheduler) Unconfirmed(f *Flow, yield func(rank int, bytes uint64)) {
	for i := range s.flights {
		if fl := &s.flights[i]; fl.live && fl.flow == f && !fl.probe && !fl.hedge &&
			!f.got.Contains(fl.r.First) {
			yield(fl.lane.pair.rank, fl.bytes)
		}
	}
}

// TickEvery is how often Tick looks at what is in flight.
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
			f.unpark() // it may be of a transport that serves the flow
		}
	}
	s.follow(now, q)
	p.share(in.Path.far())
	return nil
}

// pair finds or makes the pair of a lane. Of pairs that have no lane any more the oldest is
// forgotten when there are too many.
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
	s.bury(idle)
	idle.drained(0)
	s.exit(idle)
	*idle = pair{path: in.Path, peer: p, index: idle.index, neutral: nominal(in.Gbps)}
	s.enter(idle, in.Apart)
	return idle, nil
}

// LaneDown removes a lane. What it still holds ends through End, before or after.
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

// recount follows a change of what lanes are usable. Rare, so from scratch.
func (q *pair) recount() {
	q.live, q.flights, q.slots, q.kept, q.stalled, q.spare = 0, 0, 0, 0, q.inflight, nil
	for _, l := range q.lanes {
		if l.usable() {
			q.live++
			q.flights += l.flights
			q.slots += l.info.MaxSlices
			q.kept += l.info.MaxSlices - l.most(false)
			q.stalled -= l.inflight - l.passed
			q.spare = l
		}
	}
	q.shared = q.slots - q.kept
	if q.live < 2 {
		q.spare = nil
	} else {
		q.shared -= q.spare.most(false)
	}
	q.tally()
}

// post puts r of f on l. A probe has no attempt and counts as no copy.
func (s *Scheduler) post(now Instant, l *laneState, f *Flow, r transfer.Range, attempt uint32) Slice {
	var i int32
	if n := len(s.unused); n > 0 {
		i = s.unused[n-1]
		s.unused = s.unused[:n-1]
	} else {
		i = int32(len(s.flights))
		s.flights = append(s.flights, flight{})
	}
	q := l.pair
	bytes, err := f.space.Bytes(r)
	if err != nil {
		bytes = 0 // cannot be: r comes from a set of that space's size
	}
	fl := &s.flights[i]
	*fl = flight{flow: f, lane: l, r: r, bytes: bytes, use: fl.use + 1, prev: l.tail, next: -1,
		posted:    now,
		predicted: Instant(q.expectAt(now, bytes)), delivered: q.delivered, ahead: q.ahead(now),
		live: true, probe: attempt == 0}
	load := q.load() + bytes
	fl.limited = load <= uint64(q.holds())+q.cut(f.prio) && load+q.cut(f.prio) <= q.most(f.prio)
	if fl.clean = fl.ahead <= q.shallow(); fl.clean {
		q.drained(now)
	}
	if q.load() == 0 {
		q.delivAt = now
	}
	fl.begin = q.delivAt
	q.leaves(now, fl)
	if l.tail >= 0 {
		s.flights[l.tail].next = i
	} else {
		l.head, l.moved = i, now
		l.busy = len(s.busy)
		s.busy = append(s.busy, l)
	}
	l.tail = i
	l.inflight += bytes
	l.flights++
	q.inflight += bytes
	if l.usable() {
		q.flights++
	} else {
		q.stalled += bytes
	}
	q.tally()
	q.peer.flights++
	f.flights++
	if s.live++; s.live == 1 {
		s.ticked = now
	}
	return Slice{Lane: l.info.ID, Flow: f, Range: r, Bytes: bytes, Attempt: attempt,
		Cookie: uint64(fl.use)<<32 | uint64(uint32(i))}
}

// find is the flight of a cookie, or nil: it has ended, or never was.
func (s *Scheduler) find(cookie uint64) (*flight, int32) {
	i := uint32(cookie)
	if int64(i) >= int64(len(s.flights)) {
		return nil, 0
	}
	f := &s.flights[i]
	if !f.live || f.use != uint32(cookie>>32) {
		return nil, 0
	}
	return f, int32(i)
}

// End ends a slice; false: that cookie names none that is in flight, so nothing changes.
func (s *Scheduler) End(now Instant, cookie uint64, v Verdict) (Ended, bool) {
	fl, i := s.find(cookie)
	if fl == nil {
		return Ended{}, false
	}
	s.unlink(fl, i)
	l, q, f := fl.lane, fl.lane.pair, fl.flow
	out := Ended{Flow: f, Range: fl.r, Bytes: fl.bytes, Rank: q.rank}
	s.judge(now, fl, v)
	if fl.probe {
		switch v {
		case Confirmed, Superseded:
			q.count.ProbesPassed++
		case Failed, Lost:
			q.count.ProbesFailed++
		}
		if v == Confirmed && !f.stopped {
			f.detail() // it has landed, and is on its way still
			out.Fresh = f.land(fl.r)
		}
	} else {
		if v != Confirmed && !f.stopped {
			f.detail()
		}
		if f.chunks != nil {
			run := f.chunks[fl.r.First:fl.r.End()]
			for i := range run {
				run[i].copies--
			}
		}
		switch {
		case f.stopped:
		case v == Confirmed:
			out.Fresh = f.land(fl.r)
			f.accepted(q.rank)
		default:
			if v == Refused {
				s.refused(now, f, q.rank)
			}
			if (v == Failed || v == Refused) && !fl.charged {
				f.strike(fl.r, q)
			}
			out.Exhausted = f.exhausted(fl.r, s.cfg.MaxStrikes)
			f.free(fl.r, false)
		}
	}
	if l.broken && v == Lost {
		s.release(l)
	}
	fl.live, fl.flow, fl.lane = false, nil, nil
	s.unused = append(s.unused, i)
	return out, true
}

// unlink takes a flight off its lane and out of every sum.
func (s *Scheduler) unlink(fl *flight, i int32) {
	l, q := fl.lane, fl.lane.pair
	if fl.prev >= 0 {
		s.flights[fl.prev].next = fl.next
	} else {
		l.head = fl.next
	}
	if fl.next >= 0 {
		s.flights[fl.next].prev = fl.prev
	} else {
		l.tail = fl.prev
	}
	l.inflight -= fl.bytes
	l.flights--
	q.inflight -= fl.bytes
	if l.usable() {
		q.flights--
	}
	if fl.passed || !l.usable() {
		q.stalled -= fl.bytes
	}
	if fl.passed {
		l.passed -= fl.bytes
	}
	q.tally()
	if q.out != nil && fl.mark > 0 {
		q.out.flights[fl.flow.prio]--
	}
	q.peer.flights--
	fl.flow.flights--
	if fl.hedge {
		q.peer.hedged -= fl.bytes
	}
	s.live--
	if l.flights == 0 {
		last := len(s.busy) - 1
		s.busy[l.busy] = s.busy[last]
		s.busy[l.busy].busy = l.busy
		s.busy[last] = nil
		s.busy = s.busy[:last]
		l.busy = -1
	}
}

// judge takes what the end of a flight says about its path.
func (s *Scheduler) judge(now Instant, fl *flight, v Verdict) {
	l, q := fl.lane, fl.lane.pair
	q.count.ended(v)
	if v == Lost {
		if !l.broken {
			l.broken = true
			q.recount()
			q.fault(now, &s.cfg, "lane lost")
		}
		return
	}
	s.alive(now, l)
	switch v {
	case Confirmed, Superseded:
		q.delivered += fl.bytes
		rate := q.left(now, fl)
		if v == Confirmed {
			q.learn(now, fl, rate)
		}
		q.delivAt = now
		q.peer.moved = now
		q.stirs(now)
		if q.state != Healthy && fl.posted >= q.since {
			q.proven(now)
		}
	case Failed:
		if !fl.charged {
			q.fault(now, &s.cfg, "slice failed")
		}
	}
}

// alive takes a sign of life of a lane. Where it was suspect, others have what it carries, and its
// silence was judged: no slice that it held meanwhile is late for that.
func (s *Scheduler) alive(now Instant, l *laneState) {
	if l.suspect {
		for i := l.head; i >= 0; i = s.flights[i].next {
			s.flights[i].forgiven = now - s.flights[i].posted
		}
		l.suspect = false
		l.pair.recount()
	}
	for i := l.head; i >= 0 && s.flights[i].late && !l.broken; i = s.flights[i].next {
		// Those behind it come through, and it may never end.
		if fl := &s.flights[i]; !fl.passed {
			fl.passed = true
			l.passed += fl.bytes
			l.pair.stalled += fl.bytes
		}
	}
	l.pair.tally()
	l.moved, l.pair.moved = now, now
}

// release makes what a lane has in flight sendable on others, too, and counts it.
func (s *Scheduler) release(l *laneState) (n uint64) {
	for i := l.head; i >= 0; i = s.flights[i].next {
		if s.double(&s.flights[i]) {
			n++
		}
	}
	return n
}

func (s *Scheduler) double(fl *flight) bool {
	if fl.doubled || fl.probe {
		return false
	}
	fl.doubled = true
	fl.flow.free(fl.r, true)
	return true
}

// Tick looks at what is in flight and calls touched for peers that have new work or a new choice.
func (s *Scheduler) Tick(now Instant, touched func(*Peer)) {
	if asleep := now - s.ticked - maxTickGap; asleep > 0 && s.live > 0 {
		s.forgive(now, asleep)
	}
	s.ticked = now
	for _, l := range s.busy {
		s.watch(now, l)
		touched(l.pair.peer)
	}
	for _, l := range s.busy {
		q := l.pair
		// One that waits for its probe has been judged: without a lane to probe on, nothing new is known
		// of it.
		if q.live == 0 && len(q.lanes) > 0 && q.state <= Readmitted {
			s.lagging(now, q, Instant(lagFactor)*s.flights[l.head].predicted)
		}
	}
	s.rested(now, touched)
}

// forgive takes the time in which this process did not run off every clock that a lane is judged
// by: we were silent, and what came meanwhile has not been looked at yet.
func (s *Scheduler) forgive(now, asleep Instant) {
	for _, l := range s.busy {
		l.moved = min(l.moved+asleep, now)
		if l.doubted > 0 {
			l.doubted = min(l.doubted+asleep, now)
		}
		l.pair.moved = max(l.pair.moved, l.moved)
		for i := l.head; i >= 0; i = s.flights[i].next {
			s.flights[i].forgiven += asleep
		}
	}
}

// watch finds silence on a lane, and a slice that others overtake without end.
func (s *Scheduler) watch(now Instant, l *laneState) {
	if !l.usable() && !s.retry(now, l) {
		return
	}
	q, i := l.pair, l.head
	for i >= 0 && s.flights[i].passed {
		i = s.flights[i].next
	}
	if i < 0 {
		if l.flights < l.most(false) {
			return // what is late has been judged: that nothing else comes back says nothing more
		}
		i = l.head // it has no place left for what would tell
	}
	fl := &s.flights[i]
	patience := max(s.cfg.Suspect, lateFactor*fl.predicted)
	if l.info.ReportsAcked && now-q.moved >= s.cfg.Suspect {
		// of what has not a byte to show for it; while other lanes of the pair have, it may be their turn
		patience = s.cfg.Suspect
	}
	if silent := now - max(l.moved, l.doubted, fl.posted+fl.forgiven); silent >= patience {
		l.suspect, l.doubted = true, now
		q.recount()
		q.count.Suspicions++
		q.count.Doubled += s.release(l)
		if q.state == Probing || q.state == Readmitted {
			q.exclude(now, &s.cfg, fmt.Sprintf("on trial, and silent for %v", silent))
			q.silent = true
		}
		return
	}
	for ; i >= 0; i = s.flights[i].next {
		fl := &s.flights[i]
		if now-fl.posted-fl.forgiven < max(s.cfg.Attempt, stuckFactor*fl.predicted) {
			break // the rest is younger
		}
		if fl.late {
			continue
		}
		fl.late = true
		q.count.TimedOut++
		if !fl.probe {
			s.double(fl)
		}
		if l.moved > fl.posted+fl.forgiven { // else it is the lane that is silent
			fl.charged = true
			if !fl.probe {
				fl.flow.strike(fl.r, q)
			}
			q.fault(now, &s.cfg, "slice timed out")
		}
	}
}

// retry gives a suspect lane another chance once a slice should have ended, where there is no other
// path: it may be that nothing comes back because nothing is sent, and that what it was suspected
// for is one slice that never ends. What it has in flight counts again, so it is given no more than
// its window has room for, or one chunk, where all of that is late.
func (s *Scheduler) retry(now Instant, l *laneState) bool {
	if l.broken || now-l.doubted < s.cfg.Attempt {
		return false
	}
	for _, q := range l.pair.peer.pairs {
		if q.usable() {
			return false
		}
	}
	l.suspect, l.doubted = false, now
	l.pair.recount()
	return true
}

// lagging excludes a pair that is silent while its peers move. Where all are silent it is the other
// side, or the way there.
func (s *Scheduler) lagging(now Instant, q *pair, patience Instant) {
	silent := now - q.moved
	for _, l := range q.lanes {
		silent = min(silent, now-l.moved)
	}
	if silent >= max(s.cfg.Exclude, patience) && q.peer.moved > now-silent {
		q.exclude(now, &s.cfg, fmt.Sprintf("silent for %v while other rails to this peer moved", silent))
		q.silent = true
	}
}
