package sidecar

import (
	"bytes"
	"cmp"
	"maps"
	"slices"
	"sync"

	"github.com/kvspray/kvspray/control/route"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// maxTroubles bounds the remembered reasons; the log has further ones.
const maxTroubles = 4096

// pairName is a local rail and a peer's rail.
type pairName struct {
	peer                     transfer.Boot
	transport, local, remote string
}

// troubles holds the reasons for missing lanes, from the last try to open each.
type troubles struct {
	mu sync.Mutex
	m  map[pairName]string // guarded by mu
}

// set remembers a reason; nil forgets it.
func (t *troubles) set(p pairName, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err == nil {
		delete(t.m, p)
		return
	}
	if t.m == nil {
		t.m = map[pairName]string{}
	}
	if _, known := t.m[p]; known || len(t.m) < maxTroubles {
		t.m[p] = err.Error()
	}
}

// forget drops the reasons of a peer.
func (t *troubles) forget(peer transfer.Boot) {
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.DeleteFunc(t.m, func(p pairName, _ string) bool { return p.peer == peer })
}

func (t *troubles) of(p pairName) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.m[p]
}

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
func (n *Node) reach() reachView {
	v := reachView{Node: n.cfg.Node, Boot: n.boot.String(), Peers: []peerReach{}}
	lanes := map[pairName]int{}
	n.d.bindMu.RLock()
	for _, e := range n.d.lanes {
		lanes[nameOf(e.lane)]++
	}
	n.d.bindMu.RUnlock()
	n.dial.mu.Lock()
	defer n.dial.mu.Unlock()
	for boot, r := range n.dial.peers {
		if boot == n.boot {
			continue
		}
		p := peerReach{Boot: boot.String(), Node: r.node, Endpoint: r.endpoint, Claimed: r.claimed, Dials: bytes.Compare(n.boot[:], boot[:]) <= 0, Pairs: []pairReach{}}
		for _, c := range n.routes(r) {
			name := pairName{boot, c.Transport, c.Local, c.Remote}
			x := pairReach{Transport: c.Transport, Kind: c.Kind, Local: c.Local, Remote: c.Remote, Lanes: lanes[name], Why: c.Why}
			if x.Lanes > 0 {
				x.Why = ""
			} else if x.Why == "" {
				if x.Why = n.troubles.of(name); x.Why == "" {
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
