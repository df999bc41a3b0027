package web

import (
	"math"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/route"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/nodeapi/debug"
	"github.com/kvspray/kvspray/transport"
)

func (w *Server) problems() []string {
	if w.o.Problems == nil {
		return nil
	}
	return w.o.Problems()
}

func (w *Server) health() nodeapi.Health {
	if w.o.Health == nil {
		return nodeapi.Health{}
	}
	return w.o.Health()
}

func (w *Server) describe() nodeapi.Node {
	leaving, health := w.o.Life.Leaving(), w.health()
	v := nodeapi.Node{Node: w.o.Node, Boot: w.o.Boot.String(), Version: w.o.Version,
		Endpoint: w.o.Life.Endpoint(), Transports: w.o.Transports(), Workers: []string{},
		Ready: w.o.Life.Ready(), Draining: w.o.Life.Draining(),
		Leaving: leaving > 0 || health.Leaving, Health: health,
		LeavingSeconds: int(math.Ceil(leaving.Seconds())),
		SourceLeases:   w.o.Life.SourceLeases(), Problems: append([]string{}, w.problems()...)}
	for _, x := range w.o.Workers() {
		v.Workers = append(v.Workers, x.Name)
	}
	return v
}

// State reads /debug/state.
func (w *Server) State() debug.State {
	v := debug.State{Node: w.describe(), Links: w.o.Links(),
		Executors: w.o.Executors(), Totals: w.o.Totals(), Peers: map[string]string{},
		Claimed: map[string]string{}, Releases: map[string]string{}, Rails: w.o.Rails(),
		Routes:  map[string][]route.Candidate{},
		Control: map[string][]string{}, Store: w.o.Store()}
	w.o.Driver.Do(func(ex *exec.Exec, now exec.Instant) { v.Leases = ex.View(now) })
	w.o.Driver.Lanes(func(l transport.Lane) {
		v.Lanes = append(v.Lanes, nodeapi.Lane{Lane: l.ID(), Peer: l.Peer().String(),
			Transport: l.Backend(), Local: l.Local(), Remote: l.Remote()})
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
