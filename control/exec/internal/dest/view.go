// SPDX-License-Identifier: Apache-2.0

package dest

import (
	"time"

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

// ServedBySeveral reports whether grants are open towards several peers.
func (ds *Table) ServedBySeveral() bool { return ds.slots.Peers() > 1 }

// Find returns an open lease; nil: there is none.
func (ds *Table) Find(id transfer.LeaseID) *Lease { return ds.byID[id] }

// Slots counts the slots that are open for a peer.
func (ds *Table) Slots(boot transfer.Boot) int { return ds.slots.Open(boot) }
