package sidecar

import (
	"bytes"
	"cmp"
	"slices"

	"github.com/kvspray/kvspray/control/route"
	"github.com/kvspray/kvspray/transport"
)

// reachView is /v1/reach: the lanes between local rails and each peer's rails, by transport, with
// reasons for missing ones.
type reachView struct {
	Node  string      `json:"node"`
	Boot  string      `json:"boot"`
	Peers []peerReach `json:"peers"` // by endpoint
}

type peerReach struct {
	Boot     string      `json:"boot"`
	Node     string      `json:"node"`     // its own name
	Endpoint string      `json:"endpoint"` // address at which this node reached it; empty if it connected to this node
	Claimed  string      `json:"claimed"`  // endpoint that it announced
	Dials    bool        `json:"dials"`    // this node opens the lanes and has the reasons; of two nodes it is the one with the lower boot
	Pairs    []pairReach `json:"pairs"`    // in the order of preference
}

type pairReach struct {
	Transport string     `json:"transport"`
	Kind      route.Kind `json:"kind"`
	Local     string     `json:"local"`
	Remote    string     `json:"remote"`
	Lanes     int        `json:"lanes"`
	Why       string     `json:"why,omitempty"`  // reason without a lane
	Idle      bool       `json:"idle,omitempty"` // no lane, because no request needs one
}

// reach combines routes, lanes, and the results of the last tries. It omits this node, which is its
// own peer.
func (w *web) reach() reachView {
	v := reachView{Node: w.cfg.Node, Boot: w.boot.String(), Peers: []peerReach{}}
	lanes := map[pairName]int{}
	w.driver.Lanes(func(l transport.Lane) { lanes[nameOf(l)]++ })
	w.dial.mu.Lock()
	defer w.dial.mu.Unlock()
	for boot, r := range w.dial.peers {
		if boot == w.boot {
			continue
		}
		p := peerReach{Boot: boot.String(), Node: r.node, Endpoint: r.endpoint, Claimed: r.claimed, Dials: bytes.Compare(w.boot[:], boot[:]) <= 0, Pairs: []pairReach{}}
		for _, c := range w.dial.routes(r) {
			name := pairName{boot, c.Transport, c.Local, c.Remote}
			x := pairReach{Transport: c.Transport, Kind: c.Kind, Local: c.Local, Remote: c.Remote, Lanes: lanes[name], Why: c.Why}
			if x.Lanes > 0 {
				x.Why = ""
			} else if x.Why == "" {
				if x.Why = w.dial.troubles.of(name); x.Why == "" {
					x.Idle = !r.wanted
				}
				if x.Why == "" && !x.Idle {
					x.Why = "no lane has been opened yet"
				}
			}
			p.Pairs = append(p.Pairs, x)
		}
		v.Peers = append(v.Peers, p)
	}
	slices.SortFunc(v.Peers, func(a, b peerReach) int {
		return cmp.Or(cmp.Compare(a.Endpoint, b.Endpoint), cmp.Compare(a.Boot, b.Boot))
	})
	return v
}

func nameOf(l transport.Lane) pairName {
	return pairName{l.Peer(), l.Backend(), l.Local(), l.Remote()}
}
