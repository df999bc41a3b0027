package exec

import (
	"fmt"

	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// maxRanks bounds the transports that are told apart; the rest share the last rank.
const maxRanks = spray.MaxRanks

// lane is one path to a peer. What is known of it is the scheduler's.
type lane struct {
	id     uint64
	peer   *peer
	rouses bool
	batch  []transport.Slice // given to it by this event
}

func (e *Exec) touch(p *peer) {
	if !p.dirty {
		p.dirty = true
		e.touched = append(e.touched, p)
	}
}

func (e *Exec) rank(backend string) int {
	for i, t := range e.cfg.Transports {
		if t == backend {
			return min(i, maxRanks-1)
		}
	}
	return maxRanks - 1
}

// LaneUp adds a lane. An error says that it is one too many, and nothing will be given to it.
func (e *Exec) LaneUp(now Instant, in LaneInfo) error {
	p := e.peer(in.Peer)
	err := e.spray.LaneUp(now, p.rails, spray.LaneInfo{ID: in.ID, Path: spray.Path{Transport: in.Backend, Local: in.Local, Remote: in.Remote},
		Rank: e.rank(in.Backend), Tier: in.Tier, Gbps: in.Gbps, SliceBytes: in.SliceBytes, MaxSlices: in.MaxInFlight, Apart: in.Apart, Tells: in.Tells, Way: in.Way})
	if err != nil {
		return fmt.Errorf("exec: lane to peer %s: %w", in.Peer, err)
	}
	l := &lane{id: in.ID, peer: p, rouses: in.Rouses}
	e.lanes[in.ID] = l
	p.lanes = append(p.lanes, l)
	e.touch(p)
	e.assign(now)
	return nil
}

// LaneDown removes a lane. What it still held ends through Results, before or after.
func (e *Exec) LaneDown(now Instant, id uint64) {
	l := e.lanes[id]
	if l == nil {
		return
	}
	delete(e.lanes, id)
	l.peer.lanes = remove(l.peer.lanes, l)
	e.spray.LaneDown(now, id)
	e.touch(l.peer)
	if p := l.peer; !p.met && len(p.lanes) == 0 && e.peers[p.boot] == p {
		e.forgetPeer(now, p) // it was gone before its last lane came up
	}
	e.assign(now)
}

// Results ends slices.
func (e *Exec) Results(now Instant, res []transport.Result) {
	for i := range res {
		e.result(now, &res[i])
	}
	e.assign(now)
}

// verdict is what the end of a slice says to the scheduler.
func verdict(r *transport.Result) spray.Verdict {
	if r.Outcome == transfer.Landed {
		return spray.Confirmed
	}
	switch r.Reason {
	case transfer.ReasonDisowned, transfer.ReasonSourceGone, transfer.ReasonUnknownSlot, transfer.ReasonStaleGen, transfer.ReasonRevoked:
		return spray.Dropped
	case transfer.ReasonSuperseded:
		return spray.Superseded
	case transfer.ReasonLaneLost:
		return spray.Lost
	case transfer.ReasonChecksum, transfer.ReasonTimeout, transfer.ReasonNone:
		return spray.Failed
	default:
		return spray.Refused
	}
}

func (e *Exec) result(now Instant, r *transport.Result) {
	end, ok := e.spray.End(now, r.Cookie, verdict(r))
	if !ok {
		return
	}
	snd := end.Flow.Owner.(*Sending)
	e.touch(snd.peer)
	if snd.state != sendOpen {
		return
	}
	if r.Outcome == transfer.Landed {
		if end.Fresh > 0 {
			snd.moved[end.Rank] += end.Bytes
			if !snd.src.finished {
				snd.early += end.Bytes
			}
		}
		return
	}
	switch r.Reason {
	case transfer.ReasonDisowned, transfer.ReasonSourceGone:
		e.disowned(now, snd)
	case transfer.ReasonUnknownSlot, transfer.ReasonStaleGen, transfer.ReasonRevoked:
		// The receiver has closed the lease; its word is on the way.
		snd.stop()
	}
	if end.Exhausted {
		detail := r.Reason.String()
		if r.Err != nil {
			detail += ": " + r.Err.Error()
		}
		e.lose(now, snd, true, "a slice failed too often; last: "+detail)
	}
}

// stop keeps a sending from giving anything more to lanes, until the word comes that says why.
func (s *Sending) stop() {
	s.stopped = true
	s.flow.Stop()
}

// disowned stops a sending whose source is no longer valid. The engine's record says why; if none comes, the receiver is
// told to grant afresh.
func (e *Exec) disowned(now Instant, snd *Sending) {
	if snd.stopped {
		return
	}
	snd.stop()
	snd.lapse = newTimer(func(now Instant) { e.lose(now, snd, false, "the source blocks changed") })
	e.agenda.arm(snd.lapse, now+disownedWait)
}

// maxAssigned is to how many peers one event gives work. The others get theirs with the next tick,
// which is due at once, so that the driver's lock is free between them.
const maxAssigned = 128

// assign gives work to lanes of the peers that have new work or a turn at a rail.
func (e *Exec) assign(now Instant) {
	left := maxAssigned
	for again := true; again && left > 0; again = left > 0 && e.spray.Wake(now, e.touchRails) {
		n := min(left, len(e.touched))
		for i := range n {
			p := e.touched[i]
			p.dirty = false
			e.assignPeer(now, p)
		}
		left -= n
		rest := copy(e.touched, e.touched[n:])
		clear(e.touched[rest:])
		e.touched = e.touched[:rest]
	}
	if left == 0 && !e.rest.Queued() {
		e.agenda.arm(e.rest, now)
	}
	if len(e.late) > 0 {
		e.out = append(e.out, e.late...)
		clear(e.late)
		e.late = e.late[:0]
	}
	if e.spray.Busy() && !e.scan.Queued() {
		e.agenda.arm(e.scan, now+spray.TickEvery)
	}
	e.armCredits(now)
}

func (e *Exec) assignPeer(now Instant, p *peer) {
	if len(p.credits) > 0 && now >= p.expiry {
		e.expire(now, p)
	}
	for {
		sl, ok := e.spray.Pull(now, p.rails)
		if !ok {
			break
		}
		l := e.lanes[sl.Lane]
		l.batch = append(l.batch, transport.Slice{Origin: &sl.Flow.Owner.(*Sending).Origin, Range: sl.Range, Attempt: sl.Attempt,
			Cookie: sl.Cookie})
	}
	for _, l := range p.lanes {
		if len(l.batch) > 0 {
			a := e.emit(Move)
			a.Lane, a.first, a.count = l.id, len(e.outSlices), len(l.batch)
			e.outSlices = append(e.outSlices, l.batch...)
			clear(l.batch)
			l.batch = l.batch[:0]
		}
		if p.rouse && l.rouses { // behind what is ready
			e.emit(Rouse).Lane = l.id
		}
	}
	p.rouse = p.rouse && len(p.lanes) == 0
}

// scanFlights lets the scheduler look for silence.
func (e *Exec) scanFlights(now Instant) {
	e.spray.Tick(now, e.touchRails)
	e.spray.Quiet(now, e.askLane)
}

// confirmFlights counts what is still on its way as moved: the commit has overtaken its confirmation.
func (e *Exec) confirmFlights(snd *Sending) {
	e.spray.Unconfirmed(snd.flow, func(rank int, bytes uint64) { snd.moved[rank] += bytes })
}
