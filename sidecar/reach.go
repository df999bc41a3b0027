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

// maxTroubles bounds the reasons that are remembered; what is beyond is seen in the log.
const maxTroubles = 4096

// pairName is a rail of ours and one of a peer's.
type pairName struct {
	peer                     transfer.Boot
	transport, local, remote string
}

// troubles are why lanes that are wanted are not there, as the last try to open one said.
type troubles struct {
	mu sync.Mutex
	m  map[pairName]string // guarded by mu
}

// set remembers why; nil forgets.
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

// forget drops what was remembered of a peer.
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

// reachView is /v1/reach: which rail of ours reaches which rail of each peer, over which transport, and why not.
type reachView struct {
	Node  string      `json:"node"`
	Boot  string      `json:"boot"`
	Peers []peerReach `json:"peers"` // by endpoint
}

type peerReach struct {
	Boot     string      `json:"boot"`
	Node     string      `json:"node"`     // as it calls itself
	Endpoint string      `json:"endpoint"` // where we reached it; empty where it came to us
	Claimed  string      `json:"claimed"`  // where it says that it serves
	Dials    bool        `json:"dials"`    // this node opens the lanes, and knows why one is not there; of two it is the one with the lower boot
	Pairs    []pairReach `json:"pairs"`    // in the order of preference
}

type pairReach struct {
	Transport string     `json:"transport"`
	Kind      route.Kind `json:"kind"`
	Local     string     `json:"local"`
	Remote    string     `json:"remote"`
	Lanes     int        `json:"lanes"`
	Why       string     `json:"why,omitempty"`  // why there is none
	Idle      bool       `json:"idle,omitempty"` // there is none because no request needs one
}

// reach looks at routes, lanes, and what the last tries to open one said. Our own sidecar, which is its own peer, is left out.
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
					x.Why = "no lane was opened yet"
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
