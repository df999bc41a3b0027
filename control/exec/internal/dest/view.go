// SPDX-License-Identifier: Apache-2.0

package dest

import (
	"maps"
	"slices"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/workers"
	"github.com/kvspray/kvspray/transfer"
)

// View is one destination lease.
type View struct {
	Lease   string        `json:"lease"`
	Key     string        `json:"key"`
	Req     string        `json:"req"`
	State   string        `json:"state"`
	Grants  int           `json:"grants"`
	Age     time.Duration `json:"age_ns"`
	Left    time.Duration `json:"left_ns"`
	Trouble string        `json:"trouble,omitempty"`
}

// View describes open leases, at most so many.
func (ds *Table) View(now Instant, most int) (all []View) {
	for _, d := range ds.byID {
		if len(all) == most {
			break
		}
		all = append(all, View{d.ID.String(), d.Key.String(), d.x.Req, d.State.String(), d.Grants,
			now - d.began, d.Deadline - now, d.trouble})
	}
	return all
}

// Len counts the open leases.
func (ds *Table) Len() int { return len(ds.byID) }

// Shares reports whether any lease involves a peer.
func (ds *Table) Shares(boot transfer.Boot) bool { return len(ds.byPeer[boot]) > 0 }

// ServedBySeveral reports whether grants are open towards several peers.
func (ds *Table) ServedBySeveral() bool { return ds.slots.Peers() > 1 }

// CloseAll ends every lease with StatusFailed.
func (ds *Table) CloseAll(now Instant, reason string) {
	for _, d := range inOrder(maps.Values(ds.byID)) {
		ds.CloseBy(now, d, ByDrain, engines.StatusFailed, reason)
	}
}

// Of returns the destination leases of a worker, in order.
func Of(ws *workers.Worker) []*Lease {
	var all []*Lease
	for _, l := range ws.Leases {
		if d, ok := l.(*Lease); ok {
			all = append(all, d)
		}
	}
	return inOrder(slices.Values(all))
}

// Find returns an open lease; nil: there is none.
func (ds *Table) Find(id transfer.LeaseID) *Lease { return ds.byID[id] }

// Slots counts the slots that are open for a peer.
func (ds *Table) Slots(boot transfer.Boot) int { return ds.slots.Open(boot) }
