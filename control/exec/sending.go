package exec

import (
	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// sendPartState is what only the executor knows of a SendPart.
type sendPartState struct {
	src       *source
	peer      *peer
	binding   *partBinding
	state     sendState
	version   uint32 // of the source's blocks that the origin has
	committed bool

	flow        *spray.Flow
	at          spray.Place
	readyTo     []uint32 // per segment: one past the last chunk released
	revokeTimer *timer   // ends a part whose source was invalidated
	opened      Instant
	early       uint64 // bytes landed before the last flag
	moved       [maxRanks]uint64
}

// sendState is the state of a SendPart.
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
func (ss *sources) prepare(snd *SendPart) {
	s := snd.src
	if s.prefill != prefillAnnounced {
		return
	}
	if s.blocks != nil { // after a preemption they come with the first layer
		ss.bind(snd)
	}
	snd.peer.hint = true
	ss.dispatch.touch(snd.peer)
}

// bind opens the origin of a part whose epoch is known: bytes are read under it.
func (ss *sources) bind(snd *SendPart) {
	if s := snd.src; snd.state == sendWaiting {
		snd.state = sendLive
		snd.Lease, snd.Blocks, snd.version = s.ID, s.blocks, s.version
		s.OriginOpened()
		ss.emit(Bind).SendPart = snd
	}
}

// sameTables reports whether two tables are the same slice in memory: progress of many layers in
// one step shares it.
func sameTables(a, b [][]uint32) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// release gives the scheduler what layer l adds.
func (ss *sources) release(snd *SendPart, l int) {
	s := snd.src
	if s.layers[l] == (layerState{}) {
		return
	}
	ss.bind(snd)
	if snd.version != s.version {
		a := ss.emit(Update)
		a.SendPart, a.Blocks = snd, s.blocks
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
			ss.dispatch.touch(snd.peer)
		}
	}
}

// verdict is the outcome of a slice as the scheduler counts it.
func verdict(r *transport.Result) spray.Verdict {
	if r.Outcome == transfer.Landed {
		return spray.Confirmed
	}
	switch r.Reason {
	case transfer.ReasonDisowned, transfer.ReasonSourceGone, transfer.ReasonUnknownSlot,
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

// results is Exec.Results.
func (ss *sources) results(now Instant, res []transport.Result) {
	for i := range res {
		ss.result(now, &res[i])
	}
}

func (ss *sources) result(now Instant, r *transport.Result) {
	end, ok := ss.spray.End(now, r.Cookie, verdict(r))
	if !ok {
		return
	}
	snd := end.Flow.Owner.(*SendPart)
	ss.dispatch.touch(snd.peer)
	if !snd.state.open() {
		return
	}
	if r.Outcome == transfer.Landed {
		if end.Fresh > 0 {
			snd.moved[end.Rank] += end.Bytes
			if snd.src.prefill != prefillComplete {
				snd.early += end.Bytes
			}
		}
		return
	}
	switch r.Reason {
	case transfer.ReasonDisowned, transfer.ReasonSourceGone:
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
func (s *SendPart) stop() {
	s.state = sendStopped
	s.flow.Stop()
}

// invalidated stops a part whose source blocks changed during a read. A record of the engine has
// the reason; without one the receiver is asked for another grant.
func (ss *sources) invalidated(now Instant, snd *SendPart) {
	if snd.state == sendStopped {
		return
	}
	snd.stop()
	snd.revokeTimer = newTimer(func(now Instant) {
		ss.lose(now, snd, false,
			"the source blocks changed")
	})
	ss.agenda.arm(snd.revokeTimer, now+revokeWait)
}

// confirmFlights counts unconfirmed slices as moved: the commit has overtaken their confirmation.
func (ss *sources) confirmFlights(snd *SendPart) {
	ss.spray.Unconfirmed(snd.flow, func(rank int, bytes uint64) { snd.moved[rank] += bytes })
}

// lose ends a part whose bytes will not come, and tells the receiver.
func (ss *sources) lose(now Instant, snd *SendPart, final bool, reason string) {
	if !snd.state.open() {
		return
	}
	ss.send(snd.peer.boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_SourceLost{
		SourceLost: &peerv1.SourceLost{
			Destination: leaseMsg(snd.Dest), Source: leaseMsg(snd.src.ID), Final: final, Reason: reason,
			Gen: snd.binding.in.msg.Gen}}})
	ss.endSending(now, snd)
}

// endSending closes the origin of a part; lanes get no more of its slices.
func (ss *sources) endSending(now Instant, snd *SendPart) {
	if !snd.state.open() {
		return
	}
	live := snd.state != sendWaiting
	snd.state = sendClosing
	snd.src.sends = remove(snd.src.sends, snd)
	ss.follow(snd.src.ws, -1)
	snd.flow.Close()
	snd.peer.places.moves(snd.at, -1)
	ss.dispatch.touch(snd.peer)
	if snd.revokeTimer != nil {
		ss.agenda.disarm(snd.revokeTimer)
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

func (ss *sources) closeOrigin(snd *SendPart) {
	a := ss.emit(CloseOrigin)
	a.SendPart, a.Committed = snd, snd.committed
}

// closed is Exec.OriginClosed.
func (ss *sources) closed(now Instant, snd *SendPart, err error) {
	if snd.state != sendClosing {
		return
	}
	if err != nil {
		ss.agenda.arm(newTimer(func(Instant) { ss.closeOrigin(snd) }), now+ss.cfg.Grace)
		return
	}
	snd.src.OriginClosed()
	ss.originClosed(now, snd)

}

// originClosed is Exec.OriginClosed.
func (ss *sources) originClosed(now Instant, snd *SendPart) {
	snd.state = sendClosed
	ss.complete(now, snd.src)
}

// follow counts what is sent from the memory of a worker, and tells the connector when the count
// leaves or reaches zero.
func (ss *sources) follow(ws *worker, by int) {
	before := ws.sends > 0
	ws.sends += by
	if now := ws.sends > 0; now != before {
		a := ss.emit(Follow)
		a.Worker, a.On = ws.w, now
	}
}

// broken is Exec.SourceBroken.
func (ss *sources) broken(now Instant, snd *SendPart, reason string) {
	ss.lose(now, snd, true, reason)

}
