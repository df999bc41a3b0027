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
	Engine  string        `json:"engine"` // the worker's name
	Peer    string        `json:"peer"`   // boot of the source's sidecar
	State   string        `json:"state"`
	Grants  int           `json:"grants"`
	Age     time.Duration `json:"age_ns"`
	Left    time.Duration `json:"left_ns"`
	Trouble string        `json:"trouble,omitempty"`
	// Arrived is how much of each equal part of the transfer space has landed, in percent. The space
	// has the layers in their order. Of the first maxArrived leases.
	Arrived []int `json:"arrived_percent,omitempty"`
}

const (
	maxArrived   = 32 // leases
	arrivedParts = 32 // parts of the transfer space
)

// View describes open leases, up to limit.
func (ds *Table) View(now Instant, limit int) (all []View) {
	for _, d := range ds.byID {
		if len(all) == limit {
			break
		}
		v := View{d.ID.String(), d.Key.String(), d.x.Req, d.ws.Name, d.Peer.String(),
			d.State.String(), d.Grants, now - d.began, d.Deadline - now, d.trouble, nil}
		if len(all) < maxArrived && d.live != nil {
			v.Arrived = d.live.arrived()
		}
		all = append(all, v)
	}
	return all
}

// arrived is the mean of the grant's parts. A part has a record of what landed once it is bound.
func (o *outboundGrant) arrived() []int {
	sums := make([]int, arrivedParts)
	var one [arrivedParts]uint8
	for _, p := range o.parts {
		if !p.bound {
			continue
		}
		p.Grant.Receipt.Shares(one[:])
		for i, share := range one {
			sums[i] += int(share)
		}
	}
	for i := range sums {
		sums[i] /= len(o.parts)
	}
	return sums
}

// Len counts the open leases.
func (ds *Table) Len() int { return len(ds.byID) }

// ServedBySeveral reports whether grants are open towards several peers.
func (ds *Table) ServedBySeveral() bool { return ds.slots.Peers() > 1 }

// Find returns an open lease; nil: there is none.
func (ds *Table) Find(id transfer.LeaseID) *Lease { return ds.byID[id] }

// Slots counts the slots that are open for a peer.
func (ds *Table) Slots(boot transfer.Boot) int { return ds.slots.Open(boot) }
