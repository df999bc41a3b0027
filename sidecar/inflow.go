// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"maps"
	"sync"
	"sync/atomic"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transfer"
)

// inflowName is one of our rails and who sends over it.
type inflowName struct {
	peer            transfer.Boot
	transport, rail string
}

// inflow is what comes from one peer over one of our rails. Lanes come and go, it stays as long as
// the peer.
type inflow struct {
	name   inflowName
	bytes  atomic.Uint64 // since it was measured last
	listed atomic.Bool   // in inflows.grew
	gone   atomic.Bool   // its peer is forgotten
	gbps   float64       // what the rail claims; protected by inflows.mu
}

// inflows lists those that grew, so that a measurement costs what flows and not what is connected.
// mu may be taken while the executor is held.
type inflows struct {
	mu   sync.Mutex
	all  map[inflowName]*inflow
	grew []*inflow
	told bool          // the executor has been told that something comes
	out  []exec.Inflow // the executor's, until the next measurement
}

// of returns the entry of a name, and brings the rail's claim up to date.
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
func (n *Node) came(f *inflow, bytes uint64) {
	f.bytes.Add(bytes)
	if f.listed.Load() || f.listed.Swap(true) {
		return
	}
	i := &n.d.inflows
	i.mu.Lock()
	i.grew = append(i.grew, f)
	first := !i.told
	i.told = true
	i.mu.Unlock()
	if first {
		n.d.ex.Incoming(n.enter())
		n.leave()
	}
}

// measure tells the executor what has come over each rail, and from whom. It holds the executor
// throughout: what comes after an empty list is told by Incoming, and must not be told before it.
func (n *Node) measure() {
	i := &n.d.inflows
	now := n.enter()
	i.mu.Lock()
	i.out = i.out[:0]
	for _, f := range i.grew {
		f.listed.Store(false) // what comes from here on lists it again
		if b := f.bytes.Swap(0); b > 0 && !f.gone.Load() {
			i.out = append(i.out, exec.Inflow{Peer: f.name.peer, Transport: f.name.transport,
				Rail: f.name.rail, Gbps: f.gbps, Bytes: b})
		}
	}
	clear(i.grew)
	i.grew = i.grew[:0]
	i.told = len(i.out) > 0
	i.mu.Unlock()
	n.d.ex.Measured(now, i.out)
	n.leave()
}

// forgetInflows drops what was counted of a peer that is not known any more.
func (n *Node) forgetInflows(boot transfer.Boot) {
	i := &n.d.inflows
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
