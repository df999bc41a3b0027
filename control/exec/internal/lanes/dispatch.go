package lanes

import (
	"fmt"

	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/control/exec/internal/index"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Dispatcher gives work to lanes.
type Dispatcher struct {
	*core.Core
	peers   *Peers
	out     Actions
	origin  func(owner any) *transport.Origin // of a flow
	lanes   map[uint64]*laneState
	touched []*Peer      // with new work, until Assign
	scan    *timer.Timer // of what is in flight
	rest    *timer.Timer // of what Assign left to the next tick

	touchRails func(*spray.Peer)
	askLane    func(lane uint64)
}

// NewDispatcher returns a dispatcher without lanes. origin returns the origin of a flow's owner.
func NewDispatcher(c *core.Core, ps *Peers, out Actions,
	origin func(owner any) *transport.Origin) *Dispatcher {
	dp := &Dispatcher{Core: c, peers: ps, out: out, origin: origin, lanes: map[uint64]*laneState{}}
	dp.scan = timer.New(dp.scanFlights)
	dp.rest = timer.New(func(Instant) {}) // Tick assigns after every timer
	dp.touchRails = func(p *spray.Peer) { dp.Touch(p.Owner.(*Peer)) }
	dp.askLane = out.Ask
	return dp
}

// Len counts the lanes.
func (dp *Dispatcher) Len() int { return len(dp.lanes) }

// Hint asks for a wake-up hint to a peer, behind what is ready for it.
func (dp *Dispatcher) Hint(p *Peer) {
	p.hint = true
	dp.Touch(p)
}

// laneState is one lane to a peer. The scheduler has the rest of its state.
type laneState struct {
	id        uint64
	peer      *Peer
	wakeHints bool
	batch     []transport.Slice // given to it by this event
}

// Touch marks a peer with new work, until Assign.
func (dp *Dispatcher) Touch(p *Peer) {
	if !p.dirty {
		p.dirty = true
		dp.touched = append(dp.touched, p)
	}
}

func (dp *Dispatcher) rank(backend string) int {
	for i, t := range dp.Cfg.Transports {
		if t == backend {
			return min(i, spray.MaxRanks-1)
		}
	}
	return spray.MaxRanks - 1
}

// Up is Exec.LaneUp.
func (dp *Dispatcher) Up(now Instant, to transfer.Boot, in spray.LaneInfo, hints bool) error {
	p := dp.peers.Get(to)
	in.Rank = dp.rank(in.Path.Transport)
	if err := dp.Spray.LaneUp(now, p.Rails, in); err != nil {
		return fmt.Errorf("exec: lane to peer %s: %w", to, err)
	}
	l := &laneState{id: in.ID, peer: p, wakeHints: hints}
	dp.lanes[in.ID] = l
	p.lanes = append(p.lanes, l)
	dp.Touch(p)
	return nil
}

// Down removes a lane, and returns its peer; nil: there is no such lane.
func (dp *Dispatcher) Down(now Instant, id uint64) *Peer {
	l := dp.lanes[id]
	if l == nil {
		return nil
	}
	delete(dp.lanes, id)
	l.peer.lanes = index.Remove(l.peer.lanes, l)
	dp.Spray.LaneDown(now, id)
	dp.Touch(l.peer)
	return l.peer
}

// MaxAssigned bounds the peers that get work in one event. The others get theirs with the next
// tick, which is due at once: the driver's lock is free in between.
const MaxAssigned = 128

// Assign gives work to the lanes of peers with new work or a turn at a rail.
func (dp *Dispatcher) Assign(now Instant) {
	left := MaxAssigned
	for again := true; again && left > 0; again = left > 0 && dp.Spray.Wake(now, dp.touchRails) {
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
		dp.Agenda.Arm(dp.rest, now)
	}
	if dp.Spray.Busy() && !dp.scan.Queued() {
		dp.Agenda.Arm(dp.scan, now+spray.TickEvery)
	}
}

func (dp *Dispatcher) assignPeer(now Instant, p *Peer) {
	// Expired credits are lifted here: a credit does no harm where no slice is given out.
	p.limits.Expire(now, func(r railID) { dp.Spray.Credit(p.Rails, r.Transport, r.Name, 0) })
	for {
		sl, ok := dp.Spray.Pull(now, p.Rails)
		if !ok {
			break
		}
		l := dp.lanes[sl.Lane]
		l.batch = append(l.batch, transport.Slice{Origin: dp.origin(sl.Flow.Owner),
			Range: sl.Range, Attempt: sl.Attempt,
			Cookie: sl.Cookie})
	}
	for _, l := range p.lanes {
		if len(l.batch) > 0 {
			dp.out.Move(l.id, l.batch)
			clear(l.batch)
			l.batch = l.batch[:0]
		}
		if p.hint && l.wakeHints { // behind what is ready
			dp.out.WakeHint(l.id)
		}
	}
	p.hint = p.hint && len(p.lanes) == 0
}

// scanFlights lets the scheduler look for lanes without progress.
func (dp *Dispatcher) scanFlights(now Instant) {
	dp.Spray.Tick(now, dp.touchRails)
	dp.Spray.Quiet(now, dp.askLane)
}

// Moved is Exec.Moved.
func (dp *Dispatcher) Moved(now Instant, lane uint64) {
	if l := dp.lanes[lane]; l != nil {
		dp.Spray.Moved(now, lane)
		dp.Touch(l.peer)
	}
}

// Quickest is Exec.Quickest.
func (dp *Dispatcher) Quickest(now Instant, boot transfer.Boot, transport string) (rail string,
	ok bool) {
	p := dp.peers.Find(boot)
	if p == nil {
		return "", false
	}
	path, ok := dp.Spray.Quickest(now, p.Rails, transport)
	return path.Local, ok
}
