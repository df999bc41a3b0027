// SPDX-License-Identifier: Apache-2.0

package web

import (
	"cmp"
	"slices"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
)

// Links is /v1/links: this sidecar's learned speeds, as a sender, of each rail pair to each
// peer, for programs that estimate a transfer before they request it. docs/protocol.md has the
// units.
type Links struct {
	Node  string      `json:"node"`
	Boot  string      `json:"boot"`
	Peers []PeerLinks `json:"peers"` // by endpoint
}

// PeerLinks has the rail pairs to one peer.
type PeerLinks struct {
	Boot string `json:"boot"`
	Node string `json:"node"` // its own name
	// address at which this node reached it; empty if it connected to this node
	Endpoint string            `json:"endpoint"`
	Claimed  string            `json:"claimed"` // endpoint that it announced
	Waiting  map[string]uint64 `json:"waiting_bytes"`
	Links    []Link            `json:"links"` // by transport and rails
}

// Link is one rail pair.
type Link struct {
	Transport string  `json:"transport"`
	Local     string  `json:"local"`
	Remote    string  `json:"remote"`
	State     string  `json:"state"`
	Lanes     int     `json:"lanes"`
	Rate      float64 `json:"bytes_per_second"`
	Samples   int     `json:"samples"`
	Age       float64 `json:"sample_age_seconds"`
	InFlight  uint64  `json:"in_flight_bytes"`
	Window    uint64  `json:"window_bytes"`
	Delay     float64 `json:"least_delay_seconds"`
	Fixed     float64 `json:"fixed_seconds"`
	Factor    float64 `json:"factor"`
	Error     float64 `json:"prediction_error"`
}

// links holds the executor for one peer at a time, because there may be a thousand peers.
func (w *Server) links() Links {
	v := Links{Node: w.o.Node, Boot: w.o.Boot.String(), Peers: []PeerLinks{}}
	peers := map[transfer.Boot]PeerLinks{}
	for _, r := range w.o.Peers.Peers() {
		if r.Boot != w.o.Boot {
			peers[r.Boot] = PeerLinks{Boot: r.Boot.String(), Node: r.Node, Endpoint: r.Endpoint,
				Claimed: r.Claimed}
		}
	}
	for boot, p := range peers {
		var links []spray.Link
		var waiting [spray.Priorities]uint64
		w.o.Driver.Do(func(ex *exec.Exec, now exec.Instant) { links, waiting = ex.Links(now, boot) })
		p.Waiting = make(map[string]uint64, len(waiting))
		for prio, bytes := range waiting {
			p.Waiting[spray.Priority(prio).String()] = bytes
		}
		p.Links = make([]Link, len(links))
		for i, l := range links {
			p.Links[i] = Link{l.Path.Transport, l.Path.Local, l.Path.Remote, l.State, l.Lanes,
				l.Rate, l.Samples, l.Age.Seconds(), l.InFlight, l.Window, l.Delay.Seconds(),
				l.Fixed.Seconds(), l.Factor, l.Error}
		}
		slices.SortFunc(p.Links, func(a, b Link) int {
			return cmp.Or(cmp.Compare(a.Transport, b.Transport), cmp.Compare(a.Local, b.Local),
				cmp.Compare(a.Remote, b.Remote))
		})
		v.Peers = append(v.Peers, p)
	}
	slices.SortFunc(v.Peers, func(a, b PeerLinks) int {
		return cmp.Or(cmp.Compare(a.Endpoint, b.Endpoint), cmp.Compare(a.Boot, b.Boot))
	})
	return v
}
