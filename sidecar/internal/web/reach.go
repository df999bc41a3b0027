package web

import (
	"bytes"
	"cmp"
	"slices"

	"github.com/kvspray/kvspray/control/route"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Reach is /v1/reach: the lanes between local rails and each peer's rails, by transport, with
// reasons for missing ones.
type Reach struct {
	Node  string      `json:"node"`
	Boot  string      `json:"boot"`
	Peers []PeerReach `json:"peers"` // by endpoint
}

// PeerReach has the rail pairs to one peer.
type PeerReach struct {
	Boot string `json:"boot"`
	Node string `json:"node"` // its own name
	// address at which this node reached it; empty if it connected to this node
	Endpoint string `json:"endpoint"`
	Claimed  string `json:"claimed"` // endpoint that it announced
	// this node opens the lanes and has the reasons; of two nodes it is the one with the lower boot
	Dials bool        `json:"dials"`
	Pairs []PairReach `json:"pairs"` // in the order of preference
}

// PairReach is one rail pair.
type PairReach struct {
	Transport string     `json:"transport"`
	Kind      route.Kind `json:"kind"`
	Local     string     `json:"local"`
	Remote    string     `json:"remote"`
	Lanes     int        `json:"lanes"`
	Why       string     `json:"why,omitempty"`  // reason without a lane
	Idle      bool       `json:"idle,omitempty"` // no lane, because no request needs one
}

// Reach combines routes, lanes, and the results of the last tries. It omits this node, which is its
// own peer.
func (w *Server) Reach() Reach {
	v := Reach{Node: w.o.Node, Boot: w.o.Boot.String(), Peers: []PeerReach{}}
	type pair struct {
		peer                     transfer.Boot
		transport, local, remote string
	}
	lanes := map[pair]int{}
	w.o.Driver.Lanes(func(l transport.Lane) {
		lanes[pair{l.Peer(), l.Backend(), l.Local(),
			l.Remote()}]++
	})
	for _, r := range w.o.Peers.Peers() {
		if r.Boot == w.o.Boot {
			continue
		}
		p := PeerReach{Boot: r.Boot.String(), Node: r.Node, Endpoint: r.Endpoint, Claimed: r.Claimed,
			Dials: bytes.Compare(w.o.Boot[:], r.Boot[:]) <= 0, Pairs: []PairReach{}}
		for _, c := range w.o.Peers.Routes(r.Boot) {
			x := PairReach{Transport: c.Transport, Kind: c.Kind, Local: c.Local, Remote: c.Remote,
				Lanes: lanes[pair{r.Boot, c.Transport, c.Local, c.Remote}], Why: c.Why}
			if x.Lanes > 0 {
				x.Why = ""
			} else if x.Why == "" {
				if x.Why = w.o.Peers.Trouble(r.Boot, c); x.Why == "" {
					x.Idle = !r.Wanted
				}
				if x.Why == "" && !x.Idle {
					x.Why = "no lane has been opened yet"
				}
			}
			p.Pairs = append(p.Pairs, x)
		}
		v.Peers = append(v.Peers, p)
	}
	slices.SortFunc(v.Peers, func(a, b PeerReach) int {
		return cmp.Or(cmp.Compare(a.Endpoint, b.Endpoint), cmp.Compare(a.Boot, b.Boot))
	})
	return v
}
