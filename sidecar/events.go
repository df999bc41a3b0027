package sidecar

import (
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/transfer"
)

// What the connector calls: connector.Events.

var _ connector.Events = (*Node)(nil)

// WorkerUp introduces an engine worker.
func (n *Node) WorkerUp(w *connector.Worker) {
	n.enter()
	n.d.ex.WorkerUp(w)
	n.leave()
}

// WorkerGone ends all that w has open, then calls fenced.
func (n *Node) WorkerGone(w *connector.Worker, why error, fenced func()) {
	n.copies.stop(w, errCopyGone)
	now := n.enter()
	n.d.fenced[w] = func() { n.copies.after(w, func() { n.giveBack(w, fenced) }) }
	n.d.ex.WorkerGone(now, w, workerDead(why), "engine worker gone: "+errText(why))
	n.leave()
}

// giveBack ends what GPUs have of w's host memory before it goes. The driver takes its time for that, and the kernel for unmapping the cache of a
// large host: whoever performs the executor's actions would hold up every lane meanwhile.
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

// Progress releases layers.
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

// Announced says that layers of source leases follow.
func (n *Node) Announced(w *connector.Worker, all []transfer.LeaseID) {
	now := n.enter()
	n.d.ex.Announced(now, w, all)
	n.leave()
}

// Cancel gives a lease back.
func (n *Node) Cancel(w *connector.Worker, id uint64, reason string) {
	if n.copies.cancel(w, id, reason) {
		return
	}
	now := n.enter()
	n.d.ex.Cancel(now, w, id, reason)
	n.leave()
}

// Preempt takes the blocks from a source lease.
func (n *Node) Preempt(w *connector.Worker, id uint64) {
	now := n.enter()
	n.d.ex.Preempt(now, w, id)
	n.leave()
}

// Hold starts the partner's time.
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

// Decline tells a prefill's sidecar that nobody of an engine comes for a prompt.
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
