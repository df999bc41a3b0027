package driver

import (
	"sync/atomic"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// receiver is the receiving end of one part.
type receiver struct {
	d       *Driver
	landing *exec.ReceivePart
	space   *transfer.Space
	full    atomic.Bool

	quarantined atomic.Bool // its fence failed, and is retried
}

func newReceiver(d *Driver, l *exec.ReceivePart) *receiver {
	r := &receiver{d: d, landing: l, space: l.Plan.Space()}
	l.Grant.Receipt.Reset(r.space.NumChunks())
	l.Grant.Memory, l.Grant.Landed = d.cfg.Memory.Receiver(l), r.landed
	return r
}

// landed is the grant's Landed.
func (r *receiver) landed(l transport.Lane, chunks transfer.Range, fresh uint32) {
	d := r.d
	n, err := r.space.Bytes(chunks)
	if err != nil {
		return
	}
	e := d.lanes.find(l.ID())
	if e == nil { // it is not up any more
		e, _ = d.laneOf(l)
	}
	if e.inflow != nil {
		d.came(e.inflow, n)
	}
	if fresh == 0 {
		return
	}
	full := r.landing.Grant.Receipt.Add(e.backend, n)
	d.cfg.Observer.Landed(e.transport, e.rail, e.backend, n)
	if full && !r.full.Swap(true) {
		now := d.enter()
		d.ex.Full(now, r.landing)
		d.leave()
	}
}
