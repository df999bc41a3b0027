package web

import (
	"cmp"
	"slices"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/transfer"
)

// links holds the executor for one peer at a time, because there may be a thousand peers.
func (w *Server) links() nodeapi.Links {
	v := nodeapi.Links{Node: w.o.Node, Boot: w.o.Boot.String(), Peers: []nodeapi.PeerLinks{}}
	peers := map[transfer.Boot]nodeapi.PeerLinks{}
	for _, r := range w.o.Peers.Peers() {
		if r.Boot != w.o.Boot {
			peers[r.Boot] = nodeapi.PeerLinks{Boot: r.Boot.String(), Node: r.Node, Endpoint: r.Endpoint,
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
		p.Links = make([]nodeapi.Link, len(links))
		for i, l := range links {
			p.Links[i] = nodeapi.Link{Transport: l.Path.Transport, Local: l.Path.Local,
				Remote: l.Path.Remote, State: l.State, Lanes: l.Lanes, Rate: l.Rate, Samples: l.Samples,
				Age: l.Age.Seconds(), InFlight: l.InFlight, Window: l.Window, Delay: l.Delay.Seconds(),
				Fixed: l.Fixed.Seconds(), Factor: l.Factor, Error: l.Error}
		}
		slices.SortFunc(p.Links, func(a, b nodeapi.Link) int {
			return cmp.Or(cmp.Compare(a.Transport, b.Transport), cmp.Compare(a.Local, b.Local),
				cmp.Compare(a.Remote, b.Remote))
		})
		v.Peers = append(v.Peers, p)
	}
	slices.SortFunc(v.Peers, func(a, b nodeapi.PeerLinks) int {
		return cmp.Or(cmp.Compare(a.Endpoint, b.Endpoint), cmp.Compare(a.Boot, b.Boot))
	})
	return v
}
