package exec

import (
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Refusals counts the refused grants of peers by reason.
func (e *Exec) Refusals() map[string]uint64 {
	return e.match.Refusals()
}

// Await sends an admission query to the sidecar at a.Peer. An Answer with that id follows.
func (e *Exec) Await(now Instant, id uint64, a engines.Await) {
	e.queries.Open(now, id, a)
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

// Decline gives up a request for all ranks of an engine, before any of them has a lease: one call
// of the scheduler saves a step of every rank. If the message is lost, the source waits for its
// match timeout. A hash of zeros stands for every prompt of the transfer.
func (e *Exec) Decline(now Instant, d engines.Decline) {
	e.dests.DeclineAll(now, d)
	e.assign(now)
}

// Expect opens a destination lease.
func (e *Exec) Expect(now Instant, w *engines.Worker, x engines.Expect) {
	e.dests.Open(now, w, x)
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

// WorkerUp introduces an engine worker.
func (e *Exec) WorkerUp(w *engines.Worker) {
	e.workers.Up(w)
}

// LaneUp adds a lane. After an error there are too many, and the lane gets no slices.
func (e *Exec) LaneUp(now Instant, in LaneInfo) error {
	err := e.dispatch.Up(now, in)
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

// Intent opens a source lease.
func (e *Exec) Intent(now Instant, w *engines.Worker, in engines.Intent) {
	e.sources.Open(now, w, in)
	e.assign(now)
}

// Hold reports that the engine keeps the blocks only for receivers. From now on the match timeout
// runs.
func (e *Exec) Hold(now Instant, w *engines.Worker, id uint64) {
	e.sources.Hold(now, w, id)
}

// Yield reports that the engine needs the blocks of a lease that is held: no receiver binds any
// more, and bound ones finish.
func (e *Exec) Yield(now Instant, w *engines.Worker, id uint64) {
	e.sources.Yield(now, w, id)
	e.assign(now)
}

// SchedulerGone reports that a scheduler's session is over. The sidecars that were asked in it hold
// no prompt for it any more.
func (e *Exec) SchedulerGone(now Instant, session uint64) {
	e.queries.SessionOver(session)
	e.assign(now)
}

// Progress reports how many tokens layers hold.
func (e *Exec) Progress(now Instant, w *engines.Worker, all []engines.Progress) {
	e.sources.Progress(now, w, all)
	e.assign(now)
}

// Announced reports that a step of these leases is about to run: their layers follow.
func (e *Exec) Announced(now Instant, w *engines.Worker, all []transfer.LeaseID) {
	e.sources.Announced(now, w, all)
	e.assign(now)
}

// Preempt reports that the blocks of a source lease are lost. The lease stays for a later attempt.
func (e *Exec) Preempt(now Instant, w *engines.Worker, id uint64) {
	e.sources.Preempt(now, w, id)
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
