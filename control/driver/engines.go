package driver

import (
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transfer"
)

// Events brings the events of engines to a driver, in the form of connector.Events. The fields
// below are protected by the driver's lock.
type Events struct {
	d       *Driver
	queries map[uint64]func(engines.Admission) // admission queries without an answer
	last    uint64                             // query
	fenced  map[*engines.Worker]func()         // called after a worker's last lease
}

// WorkerUp registers an engine worker.
func (e *Events) WorkerUp(w *engines.Worker) {
	e.d.enter()
	e.d.ex.WorkerUp(w)
	e.d.leave()
}

// WorkerGone ends all leases of w, then calls fenced. dead: the exit of its process is proved.
func (e *Events) WorkerGone(w *engines.Worker, dead bool, why string, fenced func()) {
	now := e.d.enter()
	e.fenced[w] = fenced
	e.d.ex.WorkerGone(now, w, dead, why)
	e.d.leave()
}

func (e *Events) workerFenced(w *engines.Worker) {
	e.d.lock.Lock()
	done := e.fenced[w]
	delete(e.fenced, w)
	e.d.cfg.Engines.Forget(w)
	e.d.lock.Unlock()
	if done != nil {
		done()
	}
}

// Intent opens a source lease.
func (e *Events) Intent(w *engines.Worker, in engines.Intent) {
	now := e.d.enter()
	e.d.ex.Intent(now, w, in)
	e.d.leave()
}

// Progress passes complete layers to the executor.
func (e *Events) Progress(w *engines.Worker, p []engines.Progress) {
	now := e.d.enter()
	e.d.ex.Progress(now, w, p)
	e.d.leave()
}

// Expect opens a destination lease.
func (e *Events) Expect(w *engines.Worker, x engines.Expect) {
	now := e.d.enter()
	e.d.ex.Expect(now, w, x)
	e.d.leave()
}

// Announced passes source leases whose layers follow.
func (e *Events) Announced(w *engines.Worker, all []transfer.LeaseID) {
	now := e.d.enter()
	e.d.ex.Announced(now, w, all)
	e.d.leave()
}

// Cancel ends a lease.
func (e *Events) Cancel(w *engines.Worker, id uint64, reason string) {
	now := e.d.enter()
	e.d.ex.Cancel(now, w, id, reason)
	e.d.leave()
}

// Preempt invalidates the blocks of a source lease.
func (e *Events) Preempt(w *engines.Worker, id uint64) {
	now := e.d.enter()
	e.d.ex.Preempt(now, w, id)
	e.d.leave()
}

// Hold starts the match timeout.
func (e *Events) Hold(w *engines.Worker, id uint64) {
	now := e.d.enter()
	e.d.ex.Hold(now, w, id)
	e.d.leave()
}

// Yield ends a hold whose blocks the engine needs.
func (e *Events) Yield(w *engines.Worker, id uint64) {
	now := e.d.enter()
	e.d.ex.Yield(now, w, id)
	e.d.leave()
}

// SchedulerGone ends what the engine behind a scheduler's session waits for.
func (e *Events) SchedulerGone(session uint64) {
	now := e.d.enter()
	e.d.ex.SchedulerGone(now, session)
	e.d.leave()
}

// Turn returns once the executor was free.
func (e *Events) Turn() {
	e.d.enter()
	e.d.leave()
}

// Decline notifies a prefill's sidecar that no rank of an engine will receive a prompt.
func (e *Events) Decline(x engines.Decline) {
	now := e.d.enter()
	e.d.ex.Decline(now, x)
	e.d.leave()
}

// Await asks a prefill's sidecar whether it has admitted a request.
func (e *Events) Await(a engines.Await, reply func(engines.Admission)) {
	now := e.d.enter()
	e.last++
	id := e.last
	e.queries[id] = reply
	e.d.ex.Await(now, id, a)
	e.d.leave()
}

func (e *Events) answer(a *exec.Action) {
	e.d.lock.Lock()
	reply := e.queries[a.Await]
	delete(e.queries, a.Await)
	e.d.lock.Unlock()
	if reply != nil {
		reply(a.Admission)
	}
}
