package source

import (
	"maps"
	"slices"
	"time"

	"github.com/kvspray/kvspray/transport"
)

// View is one source lease.
type View struct {
	Lease   string        `json:"lease"`
	Key     string        `json:"key"`
	Req     string        `json:"req"`
	Engine  string        `json:"engine"` // the worker's name
	State   string        `json:"state"`
	Serving int           `json:"serving"`
	Served  int           `json:"served"`
	Origins int           `json:"origins"`
	Age     time.Duration `json:"age_ns"`
	Left    time.Duration `json:"left_ns"`
	// Layers have been computed to the end of the prompt, of LayersAll.
	Layers    int    `json:"layers_computed"`
	LayersAll int    `json:"layers"`
	Bytes     uint64 `json:"bytes"` // that receivers have proved
}

// View describes open leases, up to limit.
func (ss *Table) View(now Instant, limit int) (all []View) {
	for ws := range ss.workers.All() {
		for _, l := range ws.Leases {
			s, ok := l.(*Lease)
			if !ok {
				continue
			}
			if len(all) == limit {
				return all
			}
			v := View{s.ID.String(), s.Key.String(), s.in.Req, s.ws.Name, s.State.String(), s.Serving(),
				s.Served, s.Origins(), now - s.began, s.Deadline - now, 0, len(s.layers), s.bytes}
			for _, layer := range s.layers {
				if layer.final {
					v.Layers++
				}
			}
			all = append(all, v)
		}
	}
	return all
}

// Counts are the sizes of a Matcher's tables.
type Counts struct {
	Grants      int // of peers
	Absent      int // those whose sidecar is out of reach or gone
	Waiting     int // queries, grants, parts and declines that wait for an intent
	WaitingKeys int // their keys
}

// Counts returns the sizes of the tables.
func (mt *Matcher) Counts() Counts {
	c := Counts{Grants: len(mt.grants), Absent: len(mt.absents), WaitingKeys: len(mt.pending.byKey)}
	for _, l := range mt.pending.byKey {
		c.Waiting += len(l)
	}
	return c
}

// Refusals counts the refused grants by reason.
func (mt *Matcher) Refusals() map[string]uint64 { return mt.refused.Counts() }

// OriginOf returns the origin of a flow's owner, which is a Part.
func OriginOf(owner any) *transport.Origin { return &owner.(*Part).Origin }

// Comparing returns the comparisons in progress, in no order.
func (mt *Matcher) Comparing() []Comparison { return slices.Collect(maps.Keys(mt.comparing)) }

// Sending returns the open parts that are sent, in no order.
func (mt *Matcher) Sending() (all []*Part) {
	for _, in := range mt.grants {
		for _, c := range in.bindings {
			if c.snd != nil && c.snd.state.open() {
				all = append(all, c.snd)
			}
		}
	}
	return all
}

// Waits counts the keys that engines wait for.
func (ss *Table) Waits() int { return len(ss.waits.byKey) }

// Keys counts the keys of open leases, and their transfers.
func (ss *Table) Keys() (keys, transfers int) { return len(ss.byKey), len(ss.byXfer) }
