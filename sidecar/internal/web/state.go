// SPDX-License-Identifier: Apache-2.0

package web

import (
	"math"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/route"
	"github.com/kvspray/kvspray/gpu"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/transport"
)

// Node is /v1/node, the description for routers.
type Node struct {
	Node       string   `json:"node"`
	Boot       string   `json:"boot"`
	Version    string   `json:"version"`
	Endpoint   string   `json:"endpoint"`
	Transports []string `json:"transports"`
	Sessions   []string `json:"sessions"` // registered engine workers
	Ready      bool     `json:"ready"`
	Draining   bool     `json:"draining"`
	Leaving    bool     `json:"leaving"` // routers choose other engines
	// LeavingSeconds is how long Leaving still lasts without a renewal, rounded up.
	LeavingSeconds int `json:"leaving_seconds"`
	// SourceLeases are those of engines: blocks that wait to be fetched
	SourceLeases int `json:"source_leases"`
	// Problems need an operator, or end by themselves; kvspray status and doctor show them.
	Problems []string `json:"problems"`
}

func (w *Server) problems() []string {
	if w.o.Problems == nil {
		return nil
	}
	return w.o.Problems()
}

func (w *Server) describe() Node {
	leaving := w.o.Life.Leaving()
	v := Node{Node: w.o.Node, Boot: w.o.Boot.String(), Version: w.o.Version,
		Endpoint: w.o.Life.Endpoint(), Transports: w.o.Transports(), Sessions: []string{},
		Ready: w.o.Life.Ready(), Draining: w.o.Life.Draining(),
		Leaving: leaving > 0, LeavingSeconds: int(math.Ceil(leaving.Seconds())),
		SourceLeases: w.o.Life.SourceLeases(), Problems: append([]string{}, w.problems()...)}
	for _, x := range w.o.Workers() {
		v.Sessions = append(v.Sessions, x.Name)
	}
	return v
}

// Lane is a lane of a node.
type Lane struct {
	Lane      uint64 `json:"lane"`
	Peer      string `json:"peer"`
	Transport string `json:"transport"`
	Local     string `json:"local"`
	Remote    string `json:"remote"`
}

// Totals are counts since the node's start.
type Totals struct {
	Transfers map[string]uint64 // by outcome
	Bytes     map[string]uint64 // by transport
}

// State is /debug/state.
type State struct {
	Node
	Leases exec.View `json:"leases"`
	Lanes  []Lane    `json:"lanes"`
	Totals Totals    `json:"totals"`
	// boot to the address at which this node reached it; empty if it connected to this node
	Peers map[string]string `json:"peers"`
	// Claimed is the endpoint that each of the latter announced. By boot.
	Claimed map[string]string `json:"claimed"`
	// Releases are the versions of peers. By boot.
	Releases map[string]string `json:"releases"`
	Rails    []Rail            `json:"our_rails"`
	// Links are the paths of large copies between host memory and each GPU.
	Links []gpu.PathState `json:"gpu_links"`
	// Executors are the copy methods for scattered blocks of a GPU, with their bytes.
	Executors []policy.RouteState `json:"gpu_executors"`
	// Store is the page store; nil: the node has none.
	Store *Store `json:"store,omitempty"`
	// Control lanes to each peer, each as its two addresses. By boot.
	Control map[string][]string `json:"control"`
	// Routes are the paths to each peer, best first, with the reason for each unused one. By boot.
	Routes map[string][]route.Candidate `json:"routes"`
}

// State reads /debug/state.
func (w *Server) State() State {
	v := State{Node: w.describe(), Links: w.o.Links(),
		Executors: w.o.Executors(), Totals: w.o.Totals(), Peers: map[string]string{},
		Claimed: map[string]string{}, Releases: map[string]string{}, Rails: w.o.Rails(),
		Routes:  map[string][]route.Candidate{},
		Control: map[string][]string{}, Store: w.o.Store()}
	w.o.Driver.Do(func(ex *exec.Exec, now exec.Instant) { v.Leases = ex.View(now) })
	w.o.Driver.Lanes(func(l transport.Lane) {
		v.Lanes = append(v.Lanes, Lane{l.ID(), l.Peer().String(), l.Backend(), l.Local(), l.Remote()})
	})
	for _, p := range w.o.Peers.Peers() {
		b := p.Boot.String()
		v.Peers[b] = p.Endpoint
		v.Releases[b] = p.Release
		if p.Endpoint == "" {
			v.Claimed[b] = p.Claimed
		}
		v.Routes[b] = w.o.Peers.Routes(p.Boot)
		v.Control[b] = w.o.Peers.ControlLanes(p.Boot)
	}
	return v
}

// Rail is a local rail in /debug/state.
type Rail struct {
	Transport string  `json:"transport"`
	Rail      string  `json:"rail"`
	Address   string  `json:"address"`
	Interface string  `json:"interface,omitempty"`
	Gbps      float64 `json:"gbps,omitempty"`
	MTU       int     `json:"mtu,omitempty"`
	NUMA      int     `json:"numa"`
	Down      bool    `json:"down"`
	Auto      bool    `json:"auto"` // by a pattern
}
