package exec

import (
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Refusals is how many grants of peers were refused, by reason.
func (e *Exec) Refusals() map[string]uint64 {
	return e.match.refusals()
}

// Await asks the sidecar at a.Peer; Answer with that id follows.
func (e *Exec) Await(now Instant, id uint64, a connector.Await) {
	e.queries.open(now, id, a)
}

// Incoming says that something has come after a time in which nothing did: since the start, or
// since Measured was told of nothing.
func (e *Exec) Incoming(now Instant) {
	e.credits.ledger.Incoming()
	e.assign(now)
}

// Measured answers Measure with what has come since the last one. After an answer of nothing,
// Incoming must say when something comes again.
func (e *Exec) Measured(now Instant, grew []Inflow) {
	e.credits.ledger.Measured(now, grew)
	e.assign(now)
}

// Decline says that a whole engine gives up a request that none of its ranks has a lease for: its scheduler's one word stands for all of them, so
// that ranks need not be stepped for it. A word that gets lost costs the source's engine its patience with a missing partner. A hash of zeros
// stands for every prompt of the transfer.
func (e *Exec) Decline(now Instant, d connector.Decline) {
	e.dests.declineAll(now, d)
	e.assign(now)
}

// Expect opens a destination lease.
func (e *Exec) Expect(now Instant, w *connector.Worker, x connector.Expect) {
	e.dests.open(now, w, x)
	e.assign(now)
}

// Full says that every chunk of a landing is in place.
func (e *Exec) Full(now Instant, l *ReceivePart) {
	e.dests.full(now, l)
	e.assign(now)
}

// FenceDone is the acknowledgement of every backend that nothing can be written through l any more, or the failure of one. A
// failed fence is tried again, and the blocks stay where they are.
func (e *Exec) FenceDone(now Instant, l *ReceivePart, err error) {
	e.dests.fenceDone(now, l, err)
	e.assign(now)
}

// WorkerUp introduces an engine worker.
func (e *Exec) WorkerUp(w *connector.Worker) {
	e.workers.up(w)
}

// LaneUp adds a lane. An error says that it is one too many, and nothing will be given to it.
func (e *Exec) LaneUp(now Instant, in LaneInfo) error {
	err := e.dispatch.up(now, in)
	e.assign(now)
	return err
}

// LaneDown removes a lane. What it still held ends through Results, before or after.
func (e *Exec) LaneDown(now Instant, id uint64) {
	p := e.dispatch.down(now, id)
	if p != nil && p.link == peerUnmet && len(p.lanes) == 0 && e.peers.byBoot[p.boot] == p {
		e.forgetPeer(now, p) // it was gone before its last lane came up
	}
	e.assign(now)
}

// Results ends slices.
func (e *Exec) Results(now Instant, res []transport.Result) {
	e.sources.results(now, res)
	e.assign(now)
}

// Compared says in what two caches differ, every field with both values, or why that cannot be said.
func (e *Exec) Compared(now Instant, name Comparison, difference string) {
	e.match.compared(now, name, difference)
	e.assign(now)
}

// ReportViolation counts nonsense of a peer that somebody else found, and reports whether it is to be told.
func (e *Exec) ReportViolation(boot transfer.Boot, what Violation) (first bool) {
	return e.peers.report(boot, what)
}

// Violation is how often peers said what no honest one says, by what was wrong.
func (e *Exec) Violations() (counts map[string]uint64) {
	return e.peers.violations()
}

// Quickest names our rail of a transport over which a short message gets to boot soonest: control frames stand in the same queues in front of a
// rail as slices do, and an urgent transfer waits for some of them. False: no rail there is in use.
func (e *Exec) Quickest(now Instant, boot transfer.Boot, transport string) (rail string, ok bool) {
	return e.dispatch.quickest(now, boot, transport)
}

// SetRails says what our rails are. Pairs over one that is down or gone are out of use at once; what they carried goes to others.
func (e *Exec) SetRails(now Instant, rails []Rail) {
	e.rails.set(now, rails)
	e.assign(now)
}

// PeerRails says what the rails of boot are, by its own word.
func (e *Exec) PeerRails(now Instant, boot transfer.Boot, rails []Rail) {
	e.rails.setPeer(now, boot, rails)
	e.assign(now)
}

// Moved answers Ask: bytes of what the lane carries were received since it was asked last.
func (e *Exec) Moved(now Instant, lane uint64) {
	e.dispatch.moved(now, lane)
	e.assign(now)
}

// Intent opens a source lease.
func (e *Exec) Intent(now Instant, w *connector.Worker, in connector.Intent) {
	e.sources.open(now, w, in)
	e.assign(now)
}

// Hold says that the engine keeps the blocks only for us: from now on partners have limited time to come.
func (e *Exec) Hold(now Instant, w *connector.Worker, id uint64) {
	e.sources.hold(now, w, id)
}

// Progress takes what layers hold now.
func (e *Exec) Progress(now Instant, w *connector.Worker, all []connector.Progress) {
	e.sources.progress(now, w, all)
	e.assign(now)
}

// Announced says that a step of these leases is about to run: their layers follow.
func (e *Exec) Announced(now Instant, w *connector.Worker, all []transfer.LeaseID) {
	e.sources.announced(now, w, all)
	e.assign(now)
}

// Preempt says that the blocks of a source lease are lost; the lease stays for a later attempt.
func (e *Exec) Preempt(now Instant, w *connector.Worker, id uint64) {
	e.sources.preempt(now, w, id)
	e.assign(now)
}

// OriginClosed is the acknowledgement of every backend that nobody reads through snd's origin any more, or the failure of
// one, which is tried again.
func (e *Exec) OriginClosed(now Instant, snd *SendPart, err error) {
	e.sources.closed(now, snd, err)
	e.assign(now)
}

// SourceBroken says that a sending cannot be read at all: its tables or its memory are unusable.
func (e *Exec) SourceBroken(now Instant, snd *SendPart, reason string) {
	e.sources.broken(now, snd, reason)
	e.assign(now)
}
