package driver

import (
	"sync/atomic"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Receiver is the receiving end of one part. It implements transport.Sink.
type Receiver struct {
	d       *Driver
	landing *exec.ReceivePart
	memory  ReceiveMemory
	space   *transfer.Space
	full    atomic.Bool

	quarantined atomic.Bool // its fence failed, and is retried
}

var (
	_ transport.Sink     = (*Receiver)(nil)
	_ transport.OnDevice = (*Receiver)(nil)
)

func newReceiver(d *Driver, l *exec.ReceivePart) *Receiver {
	space := l.Plan.Space()
	l.Grant.Receipt.Reset(space.NumChunks())
	return &Receiver{d: d, landing: l, memory: d.cfg.Memory.Receiver(l), space: space}
}

// Resolve implements transport.Sink.
func (r *Receiver) Resolve(dst []mem.Block, chunks transfer.Range) ([]mem.Block, error) {
	return r.memory.Resolve(dst, chunks)
}

// Device implements transport.OnDevice.
func (r *Receiver) Device() mem.Device { return r.memory.Device() }

// Bytes implements transport.Sink.
func (r *Receiver) Bytes(chunks transfer.Range) (uint64, error) { return r.space.Bytes(chunks) }

// Landed implements transport.Sink.
func (r *Receiver) Landed(l transport.Lane, chunks transfer.Range) {
	d := r.d
	n, err := r.space.Bytes(chunks)
	if err != nil {
		return
	}
	receipt := &r.landing.Grant.Receipt
	fresh := receipt.Set(chunks)
	if e := d.lanes.find(l.ID()); e != nil && e.inflow != nil {
		d.came(e.inflow, n)
	}
	if fresh > 0 {
		i, _ := d.backendOf(l.Backend())
		receipt.Add(i, n)
		d.cfg.Observer.Landed(l, i, n)
	}
	if receipt.Full() && !r.full.Swap(true) {
		now := d.enter()
		d.ex.Full(now, r.landing)
		d.leave()
	}
}
