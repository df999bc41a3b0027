// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/route"
	"github.com/kvspray/kvspray/gpu"
	"github.com/kvspray/kvspray/transport"
)

// nodeView is the description for routers.
type nodeView struct {
	Node       string   `json:"node"`
	Boot       string   `json:"boot"`
	Version    string   `json:"version"`
	Endpoint   string   `json:"endpoint"`
	Transports []string `json:"transports"`
	Sessions   []string `json:"sessions"` // registered engine workers
	Ready      bool     `json:"ready"`
	Draining   bool     `json:"draining"`
}

func (w *web) describe() nodeView {
	v := nodeView{Node: w.cfg.Node, Boot: w.boot.String(), Version: w.version, Endpoint: w.life.Endpoint(), Transports: namesOf(w.backends), Sessions: []string{},
		Ready: w.life.Ready(), Draining: w.life.draining.Load()}
	for _, x := range w.workers() {
		v.Sessions = append(v.Sessions, x.Name)
	}
	return v
}

type laneView struct {
	Lane      uint64 `json:"lane"`
	Peer      string `json:"peer"`
	Transport string `json:"transport"`
	Local     string `json:"local"`
	Remote    string `json:"remote"`
}

// stateView is /debug/state.
type stateView struct {
	nodeView
	Leases exec.View         `json:"leases"`
	Lanes  []laneView        `json:"lanes"`
	Totals connector.Stats   `json:"totals"`
	Peers  map[string]string `json:"peers"` // boot to the address at which this node reached it; empty if it connected to this node
	// Claimed is the endpoint that each of the latter announced. By boot.
	Claimed map[string]string `json:"claimed"`
	// Releases are the versions of peers. By boot.
	Releases map[string]string `json:"releases"`
	Rails    []railView        `json:"our_rails"`
	// Links are the paths of large copies between host memory and each GPU.
	Links []gpu.PathState `json:"gpu_links"`
	// Executors are the copy methods for scattered blocks of a GPU, with their bytes.
	Executors []gpu.WayState `json:"gpu_executors"`
	// Control lanes to each peer, each as its two addresses. By boot.
	Control map[string][]string `json:"control"`
	// Routes are the paths to each peer, best first, with the reason for each unused one. By boot.
	Routes map[string][]route.Candidate `json:"routes"`
}

func (w *web) state() stateView {
	v := stateView{nodeView: w.describe(), Links: w.gpus.linkStates(),
		Executors: w.gpus.executorStates(), Totals: w.observer.stats(), Peers: map[string]string{},
		Claimed: map[string]string{}, Releases: map[string]string{}, Rails: w.rails.views(),
		Routes:  map[string][]route.Candidate{},
		Control: map[string][]string{}}
	w.driver.Do(func(ex *exec.Exec, now exec.Instant) { v.Leases = ex.View(now) })
	w.driver.Lanes(func(l transport.Lane) {
		v.Lanes = append(v.Lanes, laneView{l.ID(), l.Peer().String(), l.Backend(), l.Local(), l.Remote()})
	})
	w.dial.mu.Lock()
	for b, r := range w.dial.peers {
		v.Peers[b.String()] = r.endpoint
		v.Releases[b.String()] = r.release
		if r.endpoint == "" {
			v.Claimed[b.String()] = r.claimed
		}
		v.Routes[b.String()] = w.dial.routes(r)
		v.Control[b.String()] = w.conv.mesh.Lanes(b)
	}
	w.dial.mu.Unlock()
	return v
}
