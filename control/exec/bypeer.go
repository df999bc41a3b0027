// SPDX-License-Identifier: Apache-2.0

package exec

import (
	"slices"

	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// shared is what we have to do with one boot of another sidecar, so that the loss of a peer costs
// what concerns that peer. It does not end with the entry in Exec.peers: leases outlive a peer that
// was forgotten.
type shared struct {
	dests   map[*dest]struct{}    // whose newest grant went there
	inbound map[*inbound]struct{} // grants from there
	pending map[*pending]struct{} // what waits here for an intent, from there
}

// with returns the entry of a boot, a new one where there is none.
func (e *Exec) with(boot transfer.Boot) *shared {
	w := e.shared[boot]
	if w == nil {
		w = &shared{map[*dest]struct{}{}, map[*inbound]struct{}{}, map[*pending]struct{}{}}
		e.shared[boot] = w
	}
	return w
}

// without drops the entry of a boot that holds nothing any more.
func (e *Exec) without(boot transfer.Boot) {
	if w := e.shared[boot]; w != nil && len(w.dests)+len(w.inbound)+len(w.pending) == 0 {
		delete(e.shared, boot)
	}
}

// granted follows a destination lease to the peer that has its newest grant.
func (e *Exec) granted(d *dest) {
	e.ungranted(d)
	d.at = d.Peer
	e.with(d.at).dests[d] = struct{}{}
}

func (e *Exec) ungranted(d *dest) {
	if w := e.shared[d.at]; w != nil {
		delete(w.dests, d)
		e.without(d.at)
	}
}

// Shares reports whether there is any lease or grant with a peer, also one that is not bound to lanes
// yet: a grant that waits for its intent would be lost with the peer.
func (e *Exec) Shares(boot transfer.Boot) bool { return e.shared[boot] != nil }

// destsAt are the leases whose grant a peer has, in order.
func (e *Exec) destsAt(boot transfer.Boot) (all []*dest) {
	if w := e.shared[boot]; w != nil {
		for d := range w.dests {
			if d.Peer == boot && (d.State == lease.DestGranted || d.State == lease.DestLanding) {
				all = append(all, d)
			}
		}
	}
	slices.SortFunc(all, func(a, b *dest) int { return compareLeases(a.ID, b.ID) })
	return all
}

// inboundOf are the grants of a peer, in order.
func (e *Exec) inboundOf(p *peer) (all []*inbound) {
	if w := e.shared[p.boot]; w != nil {
		for in := range w.inbound {
			if in.peer == p {
				all = append(all, in)
			}
		}
	}
	slices.SortFunc(all, func(a, b *inbound) int { return compareLeases(a.id.Dest, b.id.Dest) })
	return all
}

// dropPendingOf drops what waits here for an intent on behalf of a peer.
func (e *Exec) dropPendingOf(p *peer) {
	if w := e.shared[p.boot]; w != nil {
		for q := range w.pending {
			if q.peer == p {
				e.dropPending(q)
			}
		}
	}
}
