package sidecar

import (
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/transfer"
)

// The methods of connector.Events.

var _ connector.Events = (*Node)(nil)

// WorkerUp registers an engine worker.
func (n *Node) WorkerUp(w *connector.Worker) {
	n.enter()
	n.d.ex.WorkerUp(w)
	n.leave()
}

// WorkerGone ends all leases of w, then calls fenced.
func (n *Node) WorkerGone(w *connector.Worker, why error, fenced func()) {
	n.copies.stop(w, errCopyGone)
	now := n.enter()
	n.d.fenced[w] = func() { n.copies.after(w, func() { n.giveBack(w, fenced) }) }
	n.d.ex.WorkerGone(now, w, workerDead(why), "engine worker gone: "+errText(why))
	n.leave()
}

// giveBack ends the GPUs' use of w's host memory before the memory goes. The driver is slow at
// that, and the kernel at unmapping the cache of a large host: the goroutine that performs the
// executor's actions would delay every lane meanwhile.
func (n *Node) giveBack(w *connector.Worker, fenced func()) {
	n.d.wg.Add(1)
	go func() {
		defer n.d.wg.Done()
		if n.gpus != nil {
			n.gpus.Forget(w.Regions)
		}
		fenced()
	}()
}

func errText(err error) string {
	if err == nil {
		return "no reason given"
	}
	return err.Error()
}

// Intent opens a source lease.
func (n *Node) Intent(w *connector.Worker, in connector.Intent) {
	now := n.enter()
	n.d.ex.Intent(now, w, in)
	n.leave()
}

// Progress passes complete layers to the executor.
func (n *Node) Progress(w *connector.Worker, p []connector.Progress) {
	now := n.enter()
	n.d.ex.Progress(now, w, p)
	n.leave()
}

// Expect opens a destination lease.
func (n *Node) Expect(w *connector.Worker, x connector.Expect) {
	now := n.enter()
	n.d.ex.Expect(now, w, x)
	n.leave()
}

// Copy opens a copy between two regions of w.
func (n *Node) Copy(w *connector.Worker, c connector.Copy) { n.copies.start(w, c) }

// Announced passes source leases whose layers follow.
func (n *Node) Announced(w *connector.Worker, all []transfer.LeaseID) {
	now := n.enter()
	n.d.ex.Announced(now, w, all)
	n.leave()
}

// Cancel ends a lease.
func (n *Node) Cancel(w *connector.Worker, id uint64, reason string) {
	if n.copies.cancel(w, id, reason) {
		return
	}
	now := n.enter()
	n.d.ex.Cancel(now, w, id, reason)
	n.leave()
}

// Preempt invalidates the blocks of a source lease.
func (n *Node) Preempt(w *connector.Worker, id uint64) {
	now := n.enter()
	n.d.ex.Preempt(now, w, id)
	n.leave()
}

// Hold starts the match timeout.
func (n *Node) Hold(w *connector.Worker, id uint64) {
	now := n.enter()
	n.d.ex.Hold(now, w, id)
	n.leave()
}

// Turn returns once the executor was free.
func (n *Node) Turn() {
	n.enter()
	n.leave()
}

// Decline notifies a prefill's sidecar that no rank of an engine will receive a prompt.
func (n *Node) Decline(d connector.Decline) {
	now := n.enter()
	n.d.ex.Decline(now, d)
	n.leave()
}

// Await asks a prefill's sidecar whether it has admitted a request.
func (n *Node) Await(a connector.Await, reply func(connector.Admission)) {
	now := n.enter()
	n.d.lastAwait++
	id := n.d.lastAwait
	n.d.awaits[id] = reply
	n.d.ex.Await(now, id, a)
	n.leave()
}
