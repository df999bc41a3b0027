package exec

import (
	"cmp"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/dest"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/source"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Refusals counts the refused grants of peers by reason.
func (e *Exec) Refusals() map[string]uint64 {
	return e.match.Refusals()
}

// Handle takes events of engines, in order.
func (e *Exec) Handle(now Instant, events []engines.Event) {
	for i := range events {
		e.handle(now, &events[i])
	}
	e.assign(now)
}

func (e *Exec) handle(now Instant, ev *engines.Event) {
	switch w := ev.Worker; ev.Kind {
	case engines.WorkerUp:
		e.workers.Up(w)
	case engines.WorkerGone:
		e.workerGone(now, ev)
	case engines.SourceOpened:
		e.sources.Open(now, w, *ev.Intent)
	case engines.StepAnnounced:
		e.sources.Announced(now, w, ev.Leases)
	case engines.LayersComplete:
		e.sources.Progress(now, w, ev.Progress)
	case engines.Preempted:
		e.sources.Preempt(now, w, ev.Lease)
	case engines.Held:
		e.sources.Hold(now, w, ev.Lease)
	case engines.Yielded:
		e.sources.Yield(now, w, ev.Lease)
	case engines.DestOpened:
		e.dests.Open(now, w, *ev.Expect)
	case engines.DestRefused:
		e.dests.Refused(now, w, *ev.Expect, ev.Reason)
	case engines.Canceled:
		e.cancel(now, ev)
	case engines.Asked:
		e.queries.Open(now, ev.Await)
	case engines.Declined:
		e.dests.Decline(now, *ev.Decline)
	case engines.SchedulerGone:
		e.queries.SessionOver(ev.Session)
	}
}

// workerGone ends every lease of a worker; WorkerFenced follows. Destination leases end even if the
// engine lives: the shim ends them by itself (docs/protocol.md, Restart).
func (e *Exec) workerGone(now Instant, ev *engines.Event) {
	ws := e.workers.Find(ev.Worker)
	if ws == nil {
		e.out.workerFenced(ev.Worker, ev.Fenced)
		return
	}
	if ws.Gone {
		return
	}
	ws.Gone, ws.Fenced = true, ev.Fenced
	if e.workers.Vacant() {
		e.workers.Vacated = now
	}
	for _, d := range dest.Of(ws) {
		e.dests.CloseBy(now, d, lease.ByEngineGone, engines.StatusFailed, ev.Err.Error())
	}
	for _, s := range source.Of(ws) {
		e.sources.Close(now, s, engines.StatusFailed, ev.Err.Error(), ev.Exited)
	}
	e.workers.Idle(ws)
}

func (e *Exec) cancel(now Instant, ev *engines.Event) {
	ws := e.workers.Find(ev.Worker)
	if ws == nil {
		return
	}
	reason := cmp.Or(ev.Reason, "cancelled by the engine")
	switch l := ws.Leases[ev.Lease].(type) {
	case *dest.Lease:
		e.dests.Close(now, l, engines.StatusCancelled, reason)
	case *source.Lease:
		e.sources.Close(now, l, engines.StatusCancelled, reason, true)
	}
}

// Incoming reports bytes after a time without any: since the start, or since an empty measurement.
func (e *Exec) Incoming(now Instant) {
	e.credits.Incoming()
	e.assign(now)
}

// Measured answers Measure with what came since the last measurement. After an empty one, the
// driver must call Incoming for the next byte.
func (e *Exec) Measured(now Instant, grew []Inflow) {
	e.credits.Measured(now, grew)
	e.assign(now)
}

// Full reports that every chunk of a part has landed.
func (e *Exec) Full(now Instant, l *ReceivePart) {
	e.dests.Full(now, l)
	e.assign(now)
}

// FenceDone reports that every backend has fenced l, or that one of them failed. A failed fence is
// repeated, and the blocks stay withheld.
func (e *Exec) FenceDone(now Instant, l *ReceivePart, err error) {
	e.dests.FenceDone(now, l, err)
	e.assign(now)
}

// LaneUp adds a lane to a peer; its rank is set here. hints: it is a transport.WakeHinter. After an
// error there are too many, and the lane gets no slices.
func (e *Exec) LaneUp(now Instant, to transfer.Boot, in spray.LaneInfo, hints bool) error {
	err := e.dispatch.Up(now, to, in, hints)
	e.assign(now)
	return err
}

// LaneDown removes a lane. Its slices end through Results, before or after.
func (e *Exec) LaneDown(now Instant, id uint64) {
	p := e.dispatch.Down(now, id)
	if p != nil && p.Link == lanes.Unmet && p.Lanes() == 0 && e.peers.Find(p.Boot) == p {
		e.forgetPeer(now, p) // it was gone before its last lane came up
	}
	e.assign(now)
}

// Results ends slices.
func (e *Exec) Results(now Instant, res []transport.Result) {
	e.sources.Results(now, res)
	e.assign(now)
}

// Compared reports in which fields two caches differ, with both values, or why that is unknown.
func (e *Exec) Compared(now Instant, name Comparison, difference string) {
	e.match.Compared(now, name, difference)
	e.assign(now)
}

// ReportViolation counts a protocol violation that another package found. It reports whether the
// log should have it: the first of its kind from a known peer.
func (e *Exec) ReportViolation(boot transfer.Boot, what Violation) (first bool) {
	return e.peers.Report(boot, what)
}

// Violations counts the protocol violations of peers by the invalid field.
func (e *Exec) Violations() (counts map[string]uint64) {
	return e.peers.Violations()
}

// Quickest names the local rail of a transport over which a short message reaches a peer soonest.
// Control frames wait in the same egress queues as slices, and an urgent transfer waits for some
// of these frames. It returns false if no rail is in use.
func (e *Exec) Quickest(now Instant, boot transfer.Boot, transport string) (rail string, ok bool) {
	return e.dispatch.Quickest(now, boot, transport)
}

// SetRails sets our rails. Pairs over a rail that is down or absent are out of use at once; other
// lanes take over their slices.
func (e *Exec) SetRails(now Instant, rails []Rail) {
	e.rails.Set(now, rails)
	e.assign(now)
}

// PeerRails sets the rails of a peer, as the peer reported them.
func (e *Exec) PeerRails(now Instant, boot transfer.Boot, rails []Rail) {
	e.rails.SetPeer(now, boot, rails)
	e.assign(now)
}

// Moved answers Ask: the other host received bytes of this lane since the last Ask.
func (e *Exec) Moved(now Instant, lane uint64) {
	e.dispatch.Moved(now, lane)
	e.assign(now)
}

// OriginClosed reports that every backend has stopped to read through the origin of snd, or that
// one of them failed. A failed close is repeated.
func (e *Exec) OriginClosed(now Instant, snd *SendPart, err error) {
	e.sources.OriginClosed(now, snd, err)
	e.assign(now)
}

// SourceBroken ends a part that cannot be read: its block tables or its memory are unusable.
func (e *Exec) SourceBroken(now Instant, snd *SendPart, reason string) {
	e.sources.Broken(now, snd, reason)
	e.assign(now)
}
