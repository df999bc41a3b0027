package source

import (
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/agreement"
	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/index"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
	"github.com/kvspray/kvspray/control/exec/internal/workers"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Part is one part of a grant on the sender: a source lease serves it through one origin.
type Part struct {
	Origin transport.Origin // Memory, Lease and Valid are the driver's
	Worker *engines.Worker
	Lease  transfer.LeaseID // source, at the epoch that the bytes are read under; set by Bind
	Dest   transfer.LeaseID
	Key    transfer.Key
	Prompt uint32            // its tokens
	Skip   []uint32          // per block table: tokens that the receiver had
	Tokens map[string][]byte // per transport, as the receiver's backends made them
	Plan   agreement.Plan
	// as of Bind, which may be before the step that has all of them: Update follows; never changed in
	// place
	Blocks [][]uint32

	partState
}

// partState is what only the executor has of a Part.
type partState struct {
	src       *Lease
	peer      *lanes.Peer
	binding   *partBinding
	state     sendState
	version   uint32 // of the source's blocks that the origin has
	committed bool

	flow        *spray.Flow
	at          spray.Place
	readyTo     []uint32     // per segment: one past the last chunk released
	revokeTimer *timer.Timer // ends a part whose source was invalidated
	opened      Instant
	early       uint64 // bytes landed before the last flag
	moved       [spray.MaxRanks]uint64
	record      core.Send
}

// revokeWait is the time for the engine's record of an invalidated source.
const revokeWait = time.Second

// sendState is the state of a Part.
//
//	state    origin   slices  leaves by
//	waiting  none     none    Bind: live; the end of the part: closed
//	live     open     yes     stop: stopped; the end: closing
//	stopped  open     none    the end: closing
//	closing  closing  none    OriginClosed of every backend: closed
//	closed   none     none
//
// A part is stopped when the receiver refuses its slices or its source was invalidated; a message
// of the receiver, a record of the engine or revokeTimer then ends it.
type sendState uint8

const (
	sendWaiting sendState = iota
	sendLive
	sendStopped
	sendClosing
	sendClosed
)

// open reports whether the part has not ended.
func (s sendState) open() bool { return s < sendClosing }

// prepare does early what would delay the first layer: it opens the origin and hints sleeping
// peers.
func (ss *Table) prepare(snd *Part) {
	s := snd.src
	if s.prefill != prefillAnnounced {
		return
	}
	if s.blocks != nil { // after a preemption they come with the first layer
		ss.bind(snd)
	}
	ss.dispatch.Hint(snd.peer)
}

// bind opens the origin of a part whose epoch is known: bytes are read under it.
func (ss *Table) bind(snd *Part) {
	if s := snd.src; snd.state == sendWaiting {
		snd.state = sendLive
		snd.Lease, snd.Blocks, snd.version = s.ID, s.blocks, s.version
		s.OriginOpened()
		ss.out.Bind(snd)
	}
}

// sameTables reports whether two tables are the same slice in memory: progress of many layers in
// one step shares it.
func sameTables(a, b [][]uint32) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// release gives the scheduler what layer l adds.
func (ss *Table) release(snd *Part, l int) {
	s := snd.src
	if s.layers[l] == (layerState{}) {
		return
	}
	ss.bind(snd)
	if snd.version != s.version {
		ss.out.Update(snd, s.blocks)
		snd.version = s.version
	}
	for _, seg := range snd.Plan.Feeds(l) {
		// A segment may need several layers of the source (K and V in separate layers).
		tokens, final := s.layers[l].tokens, s.layers[l].final
		for _, o := range snd.Plan.From(seg) {
			tokens, final = min(tokens, s.layers[o].tokens), final && s.layers[o].final
		}
		r := snd.Plan.Ready(seg, tokens, final)
		if from := max(snd.readyTo[seg], r.First); from < r.End() {
			snd.flow.Ready(transfer.Range{First: from, Count: r.End() - from})
			snd.readyTo[seg] = r.End()
			ss.dispatch.Touch(snd.peer)
		}
	}
}

// verdict is the outcome of a slice as the scheduler counts it.
func verdict(r *transport.Result) spray.Verdict {
	if r.Outcome == transfer.Landed {
		return spray.Confirmed
	}
	switch r.Reason {
	case transfer.ReasonInvalidated, transfer.ReasonSourceGone, transfer.ReasonUnknownSlot,
		transfer.ReasonStaleGen, transfer.ReasonRevoked:
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

// Results is Exec.Results.
func (ss *Table) Results(now Instant, res []transport.Result) {
	for i := range res {
		ss.result(now, &res[i])
	}
}

func (ss *Table) result(now Instant, r *transport.Result) {
	flight := ss.Spray.Flight(r.Cookie)
	end, ok := ss.Spray.End(now, r.Cookie, verdict(r))
	if !ok {
		return
	}
	snd := end.Flow.Owner.(*Part)
	ss.dispatch.Touch(snd.peer)
	if !snd.state.open() {
		return
	}
	bytes := end.Bytes
	if end.Fresh == 0 {
		bytes = 0
	}
	snd.record.Slice(now, flight, bytes, r.Outcome == transfer.Landed)
	switch {
	case end.Fresh > 0:
		snd.moved[end.Rank] += end.Bytes
		if snd.src.prefill != prefillComplete {
			snd.early += end.Bytes
		}
	case r.Outcome == transfer.Landed, r.Outcome == transfer.InDoubt:
		// Of a stopped flow no chunk is fresh: a receiver that has all bytes revokes copies of them.
		snd.record.Doubt(flight.Path, end.Rank, end.Bytes)
	}
	if r.Outcome == transfer.Landed {
		return
	}
	switch r.Reason {
	case transfer.ReasonInvalidated, transfer.ReasonSourceGone:
		ss.invalidated(now, snd)
	case transfer.ReasonUnknownSlot, transfer.ReasonStaleGen, transfer.ReasonRevoked:
		// The receiver has closed the lease; its message is on the way.
		snd.stop()
	}
	if end.Exhausted {
		detail := r.Reason.String()
		if r.Err != nil {
			detail += ": " + r.Err.Error()
		}
		ss.lose(now, snd, true, "a slice failed too often; last: "+detail)
	}
}

// stop withholds the rest of a part from the lanes until its end.
func (s *Part) stop() {
	s.state = sendStopped
	s.flow.Stop()
}

// invalidated stops a part whose source blocks changed during a read. A record of the engine has
// the reason; without one the receiver is asked for another grant.
func (ss *Table) invalidated(now Instant, snd *Part) {
	if snd.state == sendStopped {
		return
	}
	snd.stop()
	snd.revokeTimer = timer.New(func(now Instant) {
		ss.lose(now, snd, false, "the source blocks changed")
	})
	ss.Agenda.Arm(snd.revokeTimer, now+revokeWait)
}

// confirmFlights counts unconfirmed slices as moved: the commit has overtaken their confirmation.
// Some of them may have failed already, for example because it took too long.
func (ss *Table) confirmFlights(now Instant, snd *Part) {
	ss.Spray.Unconfirmed(snd.flow, func(rank int, bytes uint64, at spray.Flight) {
		snd.moved[rank] += bytes
		snd.record.Slice(now, at, bytes, true)
	})
	rest := snd.Plan.Space().TotalBytes()
	for _, n := range snd.moved {
		rest -= min(rest, n)
	}
	snd.record.Settle(rest, func(rank int, bytes uint64) { snd.moved[rank] += bytes })
}

// lose ends a part whose bytes will not come, and informs the receiver.
func (ss *Table) lose(now Instant, snd *Part, final bool, reason string) {
	if !snd.state.open() {
		return
	}
	ss.out.Send(snd.peer.Boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_SourceLost{
		SourceLost: &peerv1.SourceLost{
			Destination: frame.Lease(snd.Dest), Source: frame.Lease(snd.src.ID), Final: final,
			Reason: reason,
			Gen:    snd.binding.in.msg.Gen}}})
	ss.endSending(now, snd)
}

// endSending closes the origin of a part; lanes get no more of its slices.
func (ss *Table) endSending(now Instant, snd *Part) {
	if !snd.state.open() {
		return
	}
	if r := &snd.record; len(snd.src.last.Sends) < core.MaxSends {
		if r.Ended, r.Committed = now, snd.committed; r.Committed {
			r.Bytes = snd.Plan.Space().TotalBytes()
		}
		snd.src.last.Sends = append(snd.src.last.Sends, *r)
	}
	live := snd.state != sendWaiting
	snd.state = sendClosing
	snd.src.sends = index.Remove(snd.src.sends, snd)
	ss.follow(snd.src.ws, -1)
	snd.flow.Close()
	snd.peer.Moves(snd.at, -1)
	ss.dispatch.Touch(snd.peer)
	if snd.revokeTimer != nil {
		ss.Agenda.Disarm(snd.revokeTimer)
	}
	if snd.binding.snd == snd {
		snd.binding.snd = nil
	}
	if live {
		ss.closeOrigin(snd)
		return
	}
	ss.originClosed(now, snd)
}

func (ss *Table) closeOrigin(snd *Part) {
	ss.out.CloseOrigin(snd, snd.committed)
}

// OriginClosed is Exec.OriginClosed.
func (ss *Table) OriginClosed(now Instant, snd *Part, err error) {
	if snd.state != sendClosing {
		return
	}
	if err != nil {
		ss.Agenda.Arm(timer.New(func(Instant) { ss.closeOrigin(snd) }), now+ss.Cfg.Grace)
		return
	}
	snd.src.OriginClosed()
	ss.originClosed(now, snd)
}

// originClosed ends a part: no backend reads through its origin.
func (ss *Table) originClosed(now Instant, snd *Part) {
	snd.state = sendClosed
	ss.complete(now, snd.src)
}

// follow counts what is sent from the memory of a worker, and informs the connector when the count
// leaves or reaches zero.
func (ss *Table) follow(ws *workers.Worker, by int) {
	before := ws.Sends > 0
	ws.Sends += by
	if now := ws.Sends > 0; now != before {
		ss.out.Follow(ws.Worker, now)
	}
}

// Broken is Exec.SourceBroken.
func (ss *Table) Broken(now Instant, snd *Part, reason string) {
	ss.lose(now, snd, true, reason)
}
