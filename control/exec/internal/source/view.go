// SPDX-License-Identifier: Apache-2.0

package source

import (
	"maps"
	"slices"
	"time"

	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// View is one source lease.
type View struct {
	Lease   string        `json:"lease"`
	Key     string        `json:"key"`
	Req     string        `json:"req"`
	State   string        `json:"state"`
	Serving int           `json:"serving"`
	Served  int           `json:"served"`
	Origins int           `json:"origins"`
	Age     time.Duration `json:"age_ns"`
	Left    time.Duration `json:"left_ns"`
}

// View describes open leases, at most so many.
func (ss *Table) View(now Instant, most int) (all []View) {
	for ws := range ss.workers.All() {
		for _, l := range ws.Leases {
			s, ok := l.(*Lease)
			if !ok {
				continue
			}
			if len(all) == most {
				return all
			}
			all = append(all, View{s.ID.String(), s.Key.String(), s.in.Req, s.State.String(), s.Serving(),
				s.Served, s.Origins(), now - s.began, s.Deadline - now})
		}
	}
	return all
}

// Len counts the grants of peers.
func (mt *Matcher) Len() int { return len(mt.grants) }

// Waiting counts what waits for an intent.
func (mt *Matcher) Waiting() (n int) {
	for _, l := range mt.pending.byKey {
		n += len(l)
	}
	return n
}

// WaitingKeys counts the keys that wait for an intent.
func (mt *Matcher) WaitingKeys() int { return len(mt.pending.byKey) }

// Shares reports whether any grant or query involves a peer.
func (mt *Matcher) Shares(boot transfer.Boot) bool {
	return len(mt.grantsOf[boot])+len(mt.pending.byPeer[boot]) > 0
}

// Refusals counts the refused grants by reason.
func (mt *Matcher) Refusals() map[string]uint64 { return mt.refused.Counts() }

// PeerUp ends the absence of a peer's grants.
func (mt *Matcher) PeerUp(p *lanes.Peer) {
	for _, in := range mt.grantsFrom(p) {
		mt.present(in)
	}
}

// PeerDown keeps the places of a peer's grants until the match timeout. With over, the peer is gone.
func (mt *Matcher) PeerDown(now Instant, p *lanes.Peer, over bool) {
	for _, in := range mt.grantsFrom(p) {
		if mt.grants[in.id] == in {
			mt.absent(now, in, over)
		}
	}
}

// Forget drops what of a peer waits for an intent.
func (mt *Matcher) Forget(p *lanes.Peer) { mt.pending.dropOf(p) }

// OriginOf returns the origin of a flow's owner, which is a Part.
func OriginOf(owner any) *transport.Origin { return &owner.(*Part).Origin }

// Absent counts the grants whose sidecar is out of reach or gone.
func (mt *Matcher) Absent() int { return len(mt.absents) }

// Comparing returns the comparisons in progress, in no order.
func (mt *Matcher) Comparing() []Comparison { return slices.Collect(maps.Keys(mt.comparing)) }

// Sending returns the open parts that are sent, in no order.
func (mt *Matcher) Sending() (all []*Part) {
	for _, in := range mt.grants {
		for _, c := range in.claims {
			if c.snd != nil && c.snd.state.open() {
				all = append(all, c.snd)
			}
		}
	}
	return all
}

// Keys counts the keys of open leases, and their transfers.
func (ss *Table) Keys() (keys, transfers int) { return len(ss.byKey), len(ss.byXfer) }
