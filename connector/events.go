// Package connector is the sidecar's engine side: the unix socket, sessions, the registration of
// regions and layouts, the boards and the goroutines that watch them, step tracking, and
// completions to the shim.
//
// It turns messages of engines into Events for the control layer and accepts Completions from it.
// It never touches a transport.
//
// Invariants: a block id that reaches Events is inside its cache group. A lease ends once, by a
// Completion or with its worker. A lease's epoch is never used again in this process. A worker's
// memory stays mapped until WorkerGone's fenced was called. An end of file on a worker's socket
// ends nothing. A faulty engine harms only its own session.
//
// Goroutines: see Server. While a step is open the watcher sleeps on its thread without giving its
// P away, so Listen raises GOMAXPROCS by one, once per process.
package connector

import (
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/transfer"
)

// Events is the control layer's interface. Calls for one worker come in the order of its ring, from
// one goroutine at a time, and must not block. An Expect or a Copy with a stream mark comes later,
// once the engine's stream has passed it.
type Events interface {
	WorkerUp(*engines.Worker)
	// WorkerGone: its exit is proved, or a new session of the same engine took over. Every lease of
	// it must be fenced before fenced is called; its memory stays mapped until then.
	WorkerGone(w *engines.Worker, why error, fenced func())
	Intent(*engines.Worker, engines.Intent)
	Progress(*engines.Worker, []engines.Progress)
	// Announced: a step of these source leases is about to run, and reports of its layers follow.
	// Their epochs are those that its Progress will carry.
	Announced(*engines.Worker, []transfer.LeaseID)
	Expect(*engines.Worker, engines.Expect)
	// Copy opens a lease that ends like an Expect.
	Copy(*engines.Worker, Copy)
	Cancel(w *engines.Worker, lease uint64, reason string)
	// Preempt: the blocks of a source lease are lost; the lease stays open. Its next Progress
	// carries the new epoch.
	Preempt(w *engines.Worker, lease uint64)
	Hold(w *engines.Worker, lease uint64)
	// Yield: the engine needs the blocks of a source lease that is held.
	Yield(w *engines.Worker, lease uint64)
	// Await's answer goes to reply, once, from any goroutine.
	Await(a engines.Await, reply func(engines.Admission))
	Decline(d engines.Decline)
	// SchedulerGone: the session of an Await is over, and with it what its engine waits for.
	SchedulerGone(session uint64)
	// Turn returns once the control layer has made progress, which proves that it does not hang.
	Turn()
}
