package exec

import (
	"fmt"

	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// maxRanks bounds the transports that are told apart. All others share the last rank.
const maxRanks = spray.MaxRanks

// dispatcher gives work to lanes.
type dispatcher struct {
	*core
	peers   *peers
	lanes   map[uint64]*laneState
	touched []*peer // with new work, until assign
	scan    *timer  // of what is in flight
	rest    *timer  // of what assign left to the next tick

	touchRails func(*spray.Peer)
	askLane    func(lane uint64)
}

func newDispatcher(c *core, ps *peers) *dispatcher {
	dp := &dispatcher{core: c, peers: ps, lanes: map[uint64]*laneState{}}
	dp.scan = newTimer(dp.scanFlights)
	dp.rest = newTimer(func(Instant) {}) // Tick assigns after every timer
	dp.touchRails = func(p *spray.Peer) { dp.touch(p.Owner.(*peer)) }
	dp.askLane = func(lane uint64) { dp.emit(Ask).Lane = lane }
	return dp
}

// laneState is one lane to a peer. The scheduler has the rest of its state.
type laneState struct {
	id        uint64
	peer      *peer
	wakeHints bool
	batch     []transport.Slice // given to it by this event
}

func (dp *dispatcher) touch(p *peer) {
	if !p.dirty {
		p.dirty = true
		dp.touched = append(dp.touched, p)
	}
}

func (dp *dispatcher) rank(backend string) int {
	for i, t := range dp.cfg.Transports {
		if t == backend {
			return min(i, maxRanks-1)
		}
	}
	return maxRanks - 1
}

// up is Exec.LaneUp.
func (dp *dispatcher) up(now Instant, in LaneInfo) error {
	p := dp.peers.get(in.Peer)
	err := dp.spray.LaneUp(now, p.rails, spray.LaneInfo{ID: in.ID,
		Path: spray.Path{Transport: in.Backend, Local: in.Local, Remote: in.Remote},
		Rank: dp.rank(in.Backend), Tier: in.Tier, Gbps: in.Gbps, SliceBytes: in.SliceBytes,
		MaxSlices: in.MaxInFlight, Apart: in.Apart, ReportsAcked: in.ReportsAcked, RTT: in.RTT})
	if err != nil {
		return fmt.Errorf("exec: lane to peer %s: %w", in.Peer, err)
	}
	l := &laneState{id: in.ID, peer: p, wakeHints: in.WakeHints}
	dp.lanes[in.ID] = l
	p.lanes = append(p.lanes, l)
	dp.touch(p)
	return nil
}

// down removes a lane, and returns its peer; nil: there is no such lane.
func (dp *dispatcher) down(now Instant, id uint64) *peer {
	l := dp.lanes[id]
	if l == nil {
		return nil
	}
	delete(dp.lanes, id)
	l.peer.lanes = remove(l.peer.lanes, l)
	dp.spray.LaneDown(now, id)
	dp.touch(l.peer)
	return l.peer
}

// maxAssigned bounds the peers that get work in one event. The others get theirs with the next
// tick, which is due at once: the driver's lock is free in between.
const maxAssigned = 128

// assign gives work to the lanes of peers with new work or a turn at a rail.
func (dp *dispatcher) assign(now Instant) {
	left := maxAssigned
	for again := true; again && left > 0; again = left > 0 && dp.spray.Wake(now, dp.touchRails) {
		n := min(left, len(dp.touched))
		for i := range n {
			p := dp.touched[i]
			p.dirty = false
			dp.assignPeer(now, p)
		}
		left -= n
		rest := copy(dp.touched, dp.touched[n:])
		clear(dp.touched[rest:])
		dp.touched = dp.touched[:rest]
	}
	if left == 0 && !dp.rest.Queued() {
		dp.agenda.arm(dp.rest, now)
	}
	dp.sendLate()
	if dp.spray.Busy() && !dp.scan.Queued() {
		dp.agenda.arm(dp.scan, now+spray.TickEvery)
	}
}

func (dp *dispatcher) assignPeer(now Instant, p *peer) {
	// Expired credits are lifted here: a credit does no harm where no slice is given out.
	p.limits.Expire(now, func(r railID) { dp.spray.Credit(p.rails, r.Transport, r.Name, 0) })
	for {
		sl, ok := dp.spray.Pull(now, p.rails)
		if !ok {
			break
		}
		l := dp.lanes[sl.Lane]
		l.batch = append(l.batch, transport.Slice{Origin: &sl.Flow.Owner.(*SendPart).Origin,
			Range: sl.Range, Attempt: sl.Attempt,
			Cookie: sl.Cookie})
	}
	for _, l := range p.lanes {
		if len(l.batch) > 0 {
			a := dp.emit(Move)
			a.Lane, a.first, a.count = l.id, len(dp.outSlices), len(l.batch)
			dp.outSlices = append(dp.outSlices, l.batch...)
			clear(l.batch)
			l.batch = l.batch[:0]
		}
		if p.hint && l.wakeHints { // behind what is ready
			dp.emit(WakeHint).Lane = l.id
		}
	}
	p.hint = p.hint && len(p.lanes) == 0
}

// scanFlights lets the scheduler look for lanes without progress.
func (dp *dispatcher) scanFlights(now Instant) {
	dp.spray.Tick(now, dp.touchRails)
	dp.spray.Quiet(now, dp.askLane)
}

// moved is Exec.Moved.
func (dp *dispatcher) moved(now Instant, lane uint64) {
	if l := dp.lanes[lane]; l != nil {
		dp.spray.Moved(now, lane)
		dp.touch(l.peer)
	}
}

// quickest is Exec.Quickest.
func (dp *dispatcher) quickest(now Instant, boot transfer.Boot, transport string) (rail string,
	ok bool) {
	p := dp.peers.byBoot[boot]
	if p == nil {
		return "", false
	}
	path, ok := dp.spray.Quickest(now, p.rails, transport)
	return path.Local, ok
}
