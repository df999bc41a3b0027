package driver

import (
	"maps"
	"sync"
	"sync/atomic"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transfer"
)

// inflowName is a local rail and the peer that sends over it.
type inflowName struct {
	peer            transfer.Boot
	transport, rail string
}

// inflow counts the bytes from one peer over one local rail. Lanes come and go; it stays as long as
// the peer.
type inflow struct {
	name   inflowName
	bytes  atomic.Uint64 // bytes since the last measurement
	listed atomic.Bool   // in inflows.grew
	gone   atomic.Bool   // its peer was forgotten
	gbps   float64       // nominal speed of the rail; protected by inflows.mu
}

// inflows lists those that grew, so that a measurement costs as much as there is traffic, not as
// there are connections. mu may be taken while the executor is held.
type inflows struct {
	mu        sync.Mutex
	all       map[inflowName]*inflow
	grew      []*inflow
	announced bool          // the executor has been notified of incoming data
	out       []exec.Inflow // owned by the executor until the next measurement
}

// of returns the entry of a name, and updates the rail's nominal speed.
func (i *inflows) of(name inflowName, gbps float64) *inflow {
	i.mu.Lock()
	defer i.mu.Unlock()
	f := i.all[name]
	if f == nil {
		f = &inflow{name: name}
		i.all[name] = f
	}
	f.gbps = gbps
	return f
}

// came counts bytes. Called by lanes, concurrently.
func (d *Driver) came(f *inflow, bytes uint64) {
	f.bytes.Add(bytes)
	if f.listed.Load() || f.listed.Swap(true) {
		return
	}
	i := &d.inflows
	i.mu.Lock()
	i.grew = append(i.grew, f)
	first := !i.announced
	i.announced = true
	i.mu.Unlock()
	if first {
		d.ex.Incoming(d.enter())
		d.leave()
	}
}

// measure reports to the executor the bytes over each rail, by sender. It holds the executor
// throughout: bytes after an empty list are announced by Incoming, which must not come before that
// list.
func (d *Driver) measure() {
	i := &d.inflows
	now := d.enter()
	i.mu.Lock()
	i.out = i.out[:0]
	for _, f := range i.grew {
		f.listed.Store(false) // bytes from here on list it again
		if b := f.bytes.Swap(0); b > 0 && !f.gone.Load() {
			i.out = append(i.out, exec.Inflow{Peer: f.name.peer, Transport: f.name.transport,
				Rail: f.name.rail, Gbps: f.gbps, Bytes: b})
		}
	}
	clear(i.grew)
	i.grew = i.grew[:0]
	i.announced = len(i.out) > 0
	i.mu.Unlock()
	d.ex.Measured(now, i.out)
	d.leave()
}

// ForgetPeer drops the counts of a peer that is no longer known.
func (d *Driver) ForgetPeer(boot transfer.Boot) {
	i := &d.inflows
	i.mu.Lock()
	defer i.mu.Unlock()
	maps.DeleteFunc(i.all, func(k inflowName, f *inflow) bool {
		if k.peer != boot {
			return false
		}
		f.gone.Store(true)
		return true
	})
}
