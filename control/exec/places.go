package exec

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/spray"
)

// Tiers. How near a rail is depends on the memory at hand, at both ends: the receiver says with each grant how near its rails are to its
// blocks, we know how near ours are to the source's. The two together are a place, of which package spray keeps a tier per pair of rails;
// the farther end counts.

const (
	maxTier      = 3
	maxRailTiers = 64 // in one grant
)

// places are those of one peer. The zero value is ready.
type places struct {
	byName map[string]spray.Place
	list   []place // list[i] is place i+1
	turn   int     // of list, to be used for something else
}

type place struct {
	name   string
	w      *connector.Worker // of the source
	remote map[railID]uint8
	flows  int // that are there
}

// moves counts flows in and out of a place.
func (p *places) moves(at spray.Place, by int) {
	if at != 0 {
		p.list[at-1].flows += by
	}
}

// tiersOf says how near our rails are to the memory of a worker; nothing where all are as near.
func (e *Exec) tiersOf(ws *worker) []*peerv1.RailTier {
	if e.cfg.Near == nil {
		return nil
	}
	if ws.tiersOf == e.railsNo+1 {
		return ws.tiers
	}
	ws.tiers, ws.tiersOf = nil, e.railsNo+1
	ids := make([]railID, 0, len(e.rails))
	for id := range e.rails {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, func(a, b railID) int {
		return cmp.Or(strings.Compare(a.transport, b.transport), strings.Compare(a.name, b.name))
	})
	differ := false
	for _, id := range ids[:min(len(ids), maxRailTiers)] {
		if t := e.cfg.Near(ws.w, id.transport, id.name); t > 0 && t <= maxTier {
			ws.tiers = append(ws.tiers, &peerv1.RailTier{Transport: id.transport, Rail: id.name, Tier: uint32(t)})
			differ = differ || uint32(t) != ws.tiers[0].Tier
		}
	}
	if !differ {
		ws.tiers = nil
	}
	return ws.tiers
}

// place names where the memory of a grant lies: that of w here, and there what is as near to the peer's rails as tiers say. Past
// spray.MaxPlaces it is unknown.
func (e *Exec) place(p *peer, w *connector.Worker, tiers []*peerv1.RailTier) spray.Place {
	if e.cfg.Near == nil && len(tiers) == 0 {
		return 0
	}
	if len(tiers) > maxRailTiers {
		e.complain(p, BadTier, "a grant with the tiers of %d rails: at most %d are looked at", len(tiers), maxRailTiers)
		tiers = tiers[:maxRailTiers]
	}
	remote := map[railID]uint8{}
	var name strings.Builder
	fmt.Fprintf(&name, "%x", w.Boot)
	for _, t := range tiers {
		id := railID{t.GetTransport(), t.GetRail()}
		_, known := p.known[id]
		switch {
		case p.known != nil && !known:
			e.complain(p, BadTier, "the tier of rail %.64q: the peer has named no such rail of %.64q", id.name, id.transport)
			continue
		case t.GetTier() < 1 || t.GetTier() > maxTier:
			e.complain(p, BadTier, "rail %.64q: tier %d: 1 to %d", id.name, t.GetTier(), maxTier)
			continue
		}
		remote[id] = uint8(t.GetTier())
		fmt.Fprintf(&name, " %q %q %d", id.transport, id.name, t.GetTier())
	}
	if at, ok := p.places.byName[name.String()]; ok {
		return at
	}
	at := e.newPlace(p)
	if at != 0 {
		p.places.list[at-1] = place{name: name.String(), w: w, remote: remote}
		p.places.byName[name.String()] = at
	}
	return at
}

// newPlace is one that nothing is at; 0: there is none. Rails come and go, and each time the same memory is another place.
func (e *Exec) newPlace(p *peer) spray.Place {
	x := &p.places
	if x.byName == nil {
		x.byName = map[string]spray.Place{}
	}
	if len(x.list) < spray.MaxPlaces-1 {
		x.list = append(x.list, place{})
		return spray.Place(len(x.list))
	}
	for range x.list {
		i := x.turn
		x.turn = (i + 1) % len(x.list)
		if x.list[i].flows == 0 {
			delete(x.byName, x.list[i].name)
			at := spray.Place(i + 1)
			p.rails.ForgetPlace(at)
			return at
		}
	}
	return 0
}

// tierAt is what package spray asks for once per pair and place.
func (e *Exec) tierAt(p *peer, path spray.Path, at spray.Place) int {
	if int(at) > len(p.places.list) || at == 0 {
		return 0
	}
	x := &p.places.list[at-1]
	here := 0
	if e.cfg.Near != nil {
		here = e.cfg.Near(x.w, path.Transport, path.Local)
	}
	return max(here, int(x.remote[railID{path.Transport, path.Remote}]))
}
