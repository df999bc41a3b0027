package web

import (
	"bytes"
	"cmp"
	"slices"

	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Reach combines routes, lanes, and the results of the last tries. It omits this node, which is its
// own peer.
func (w *Server) Reach() nodeapi.Reach {
	v := nodeapi.Reach{Node: w.o.Node, Boot: w.o.Boot.String(), Peers: []nodeapi.PeerReach{}}
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
		p := nodeapi.PeerReach{Boot: r.Boot.String(), Node: r.Node, Endpoint: r.Endpoint,
			Claimed: r.Claimed, Dials: bytes.Compare(w.o.Boot[:], r.Boot[:]) <= 0,
			Pairs: []nodeapi.PairReach{}}
		for _, c := range w.o.Peers.Routes(r.Boot) {
			x := nodeapi.PairReach{Transport: c.Transport, Kind: string(c.Kind), Local: c.Local,
				Remote: c.Remote, Lanes: lanes[pair{r.Boot, c.Transport, c.Local, c.Remote}], Why: c.Why}
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
	slices.SortFunc(v.Peers, func(a, b nodeapi.PeerReach) int {
		return cmp.Or(cmp.Compare(a.Endpoint, b.Endpoint), cmp.Compare(a.Boot, b.Boot))
	})
	return v
}
