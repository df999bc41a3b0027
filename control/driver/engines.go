// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transfer"
)

// The events of engines, in the form of connector.Events.

// answers holds the admission queries without an answer.
type answers struct {
	open map[uint64]func(connector.Admission)
	last uint64
}

// WorkerUp registers an engine worker.
func (d *Driver) WorkerUp(w *connector.Worker) {
	d.enter()
	d.ex.WorkerUp(w)
	d.leave()
}

// WorkerGone ends all leases of w, then calls fenced. dead: the exit of its process is proved.
func (d *Driver) WorkerGone(w *connector.Worker, dead bool, why string, fenced func()) {
	now := d.enter()
	d.fenced[w] = fenced
	d.ex.WorkerGone(now, w, dead, why)
	d.leave()
}

func (d *Driver) workerFenced(w *connector.Worker) {
	d.lock.Lock()
	done := d.fenced[w]
	delete(d.fenced, w)
	d.cfg.Engines.Forget(w)
	d.lock.Unlock()
	if done != nil {
		done()
	}
}

// Intent opens a source lease.
func (d *Driver) Intent(w *connector.Worker, in connector.Intent) {
	now := d.enter()
	d.ex.Intent(now, w, in)
	d.leave()
}

// Progress passes complete layers to the executor.
func (d *Driver) Progress(w *connector.Worker, p []connector.Progress) {
	now := d.enter()
	d.ex.Progress(now, w, p)
	d.leave()
}

// Expect opens a destination lease.
func (d *Driver) Expect(w *connector.Worker, x connector.Expect) {
	now := d.enter()
	d.ex.Expect(now, w, x)
	d.leave()
}

// Announced passes source leases whose layers follow.
func (d *Driver) Announced(w *connector.Worker, all []transfer.LeaseID) {
	now := d.enter()
	d.ex.Announced(now, w, all)
	d.leave()
}

// Cancel ends a lease.
func (d *Driver) Cancel(w *connector.Worker, id uint64, reason string) {
	now := d.enter()
	d.ex.Cancel(now, w, id, reason)
	d.leave()
}

// Preempt invalidates the blocks of a source lease.
func (d *Driver) Preempt(w *connector.Worker, id uint64) {
	now := d.enter()
	d.ex.Preempt(now, w, id)
	d.leave()
}

// Hold starts the match timeout.
func (d *Driver) Hold(w *connector.Worker, id uint64) {
	now := d.enter()
	d.ex.Hold(now, w, id)
	d.leave()
}

// Turn returns once the executor was free.
func (d *Driver) Turn() {
	d.enter()
	d.leave()
}

// Decline notifies a prefill's sidecar that no rank of an engine will receive a prompt.
func (d *Driver) Decline(x connector.Decline) {
	now := d.enter()
	d.ex.Decline(now, x)
	d.leave()
}

// Await asks a prefill's sidecar whether it has admitted a request.
func (d *Driver) Await(a connector.Await, reply func(connector.Admission)) {
	now := d.enter()
	d.answers.last++
	id := d.answers.last
	d.answers.open[id] = reply
	d.ex.Await(now, id, a)
	d.leave()
}

func (d *Driver) answer(a *exec.Action) {
	d.lock.Lock()
	reply := d.answers.open[a.Await]
	delete(d.answers.open, a.Await)
	d.lock.Unlock()
	if reply != nil {
		reply(a.Admission)
	}
}
