package engines

import "github.com/kvspray/kvspray/transfer"

// EventKind is what an Event reports.
type EventKind uint8

// The events, each with the fields of Event that it sets. Those of one worker come in the order of
// its ring.
const (
	// WorkerUp(Worker) is the first event of a worker.
	WorkerUp EventKind = iota + 1
	// WorkerGone(Worker, Exited, Err, Fenced) is its last one: its exit is proved, or a new session
	// of the same engine took over. Every lease of it must be fenced before Fenced is called; its
	// memory stays mapped until then.
	WorkerGone
	// SourceOpened(Worker, Intent) opens a source lease.
	SourceOpened
	// StepAnnounced(Worker, Leases): a step of these source leases is about to run, and reports of
	// its layers follow. The epochs are those that its Progress will carry.
	StepAnnounced
	// LayersComplete(Worker, Progress) reports how many tokens layers hold.
	LayersComplete
	// Preempted(Worker, Lease): the blocks of a source lease are lost; the lease stays open. Its next
	// Progress carries the new epoch.
	Preempted
	// Held(Worker, Lease): the engine keeps the blocks of a source lease only for receivers. From now
	// on the match timeout runs.
	Held
	// Yielded(Worker, Lease): the engine needs the blocks of a source lease that is held. No receiver
	// binds any more, and bound ones finish.
	Yielded
	// DestOpened(Worker, Expect) opens a destination lease.
	DestOpened
	// DestRefused(Worker, Expect, Reason): this destination lease was not opened and has ended, so
	// that the source need not wait for it.
	DestRefused
	// Canceled(Worker, Lease, Reason) ends a lease.
	Canceled
	// Asked(Await) is an admission query.
	Asked
	// Declined(Decline) gives up a request for ranks of an engine that have no lease: one call of the
	// scheduler saves a step of every rank. If the message is lost, the source waits for its match
	// timeout. A hash of zeros stands for every prompt of the transfer.
	Declined
	// SchedulerGone(Session): the session of an Await is over, and with it what its engine waits for.
	SchedulerGone
)

// Event is what an engine did. Its Kind names the fields that are set.
type Event struct {
	Kind     EventKind
	Exited   bool // the worker's process has ended: its source leases are not presented again
	Worker   *Worker
	Lease    uint64
	Session  uint64 // of a scheduler
	Intent   *Intent
	Expect   *Expect
	Await    *Await
	Decline  *Decline
	Leases   []transfer.LeaseID
	Progress []Progress
	Reason   string
	Err      error
	Fenced   func()
}
