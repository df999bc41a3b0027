package lanes

import (
	"fmt"
	"slices"
	"strings"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/spray"
)

// Distances. The distance of a rail depends on the memory, at both ends: the receiver reports with
// each grant how far its rails are from its blocks, and this side has the distances of its own
// rails from the source's. Both together are a locality, for which package spray keeps a tier per
// rail pair: the larger of both.

const (
	maxDistance      = 3
	maxRailDistances = 64 // in one grant
)

// localities are those of one peer. The zero value is ready.
type localities struct {
	byName map[string]spray.Place
	list   []locality // list[i] is place i+1
	turn   int        // of list, to be used for something else
}

type locality struct {
	name   string
	w      *engines.Worker // of the source
	remote map[railID]uint8
	flows  int // that are there
}

// moves counts flows that enter and leave a locality.
func (p *localities) moves(at spray.Place, by int) {
	if at != 0 {
		p.list[at-1].flows += by
	}
}

// Distances are the distances of our rails from the memory of one worker. The zero value is ready.
type Distances struct {
	list    []*peerv1.RailDistance
	version int // the list of rails that they are of
}

// DistancesOf lists how far our rails are from the memory of a worker; nil if all are equally far.
// known is the list as of the last call for this worker.
func (rs *Rails) DistancesOf(w *engines.Worker, known *Distances) []*peerv1.RailDistance {
	if rs.Cfg.Distance == nil {
		return nil
	}
	if known.version == rs.version+1 {
		return known.list
	}
	known.list, known.version = nil, rs.version+1
	ids := make([]railID, 0, len(rs.own))
	for id := range rs.own {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, railID.Compare)
	differ := false
	for _, id := range ids[:min(len(ids), maxRailDistances)] {
		if t := rs.Cfg.Distance(w, id.Transport, id.Name); t > 0 && t <= maxDistance {
			known.list = append(known.list, &peerv1.RailDistance{Transport: id.Transport, Rail: id.Name,
				Distance: uint32(t)})
			differ = differ || uint32(t) != known.list[0].Distance
		}
	}
	if !differ {
		known.list = nil
	}
	return known.list
}

// Place names the locality of a grant: the memory of w here, and the distances of the peer's
// rails. Beyond spray.MaxPlaces it is unknown.
func (rs *Rails) Place(p *Peer, w *engines.Worker, distances []*peerv1.RailDistance) spray.Place {
	if rs.Cfg.Distance == nil && len(distances) == 0 {
		return 0
	}
	if len(distances) > maxRailDistances {
		rs.peers.logViolation(p, frame.BadDistance, "a grant with the distances of %d rails: at "+
			"most %d are looked at",
			len(distances), maxRailDistances)
		distances = distances[:maxRailDistances]
	}
	remote := map[railID]uint8{}
	var name strings.Builder
	fmt.Fprintf(&name, "%x", w.Boot)
	for _, t := range distances {
		id := railID{Transport: t.GetTransport(), Name: t.GetRail()}
		_, known := p.known[id]
		switch {
		case p.known != nil && !known:
			rs.peers.logViolation(p, frame.BadDistance,
				"the distance of rail %.64q: the peer has named no such rail of %.64q", id.Name, id.Transport)
			continue
		case t.GetDistance() < 1 || t.GetDistance() > maxDistance:
			rs.peers.logViolation(p, frame.BadDistance, "rail %.64q: distance %d: 1 to %d", id.Name,
				t.GetDistance(), maxDistance)
			continue
		}
		remote[id] = uint8(t.GetDistance())
		fmt.Fprintf(&name, " %q %q %d", id.Transport, id.Name, t.GetDistance())
	}
	if at, ok := p.places.byName[name.String()]; ok {
		return at
	}
	at := p.places.free(p.Rails)
	if at != 0 {
		p.places.list[at-1] = locality{name: name.String(), w: w, remote: remote}
		p.places.byName[name.String()] = at
	}
	return at
}

// free returns a locality without flows; 0: there is none. Rails come and go, and each change
// makes another locality of the same memory.
func (p *localities) free(rails *spray.Peer) spray.Place {
	if p.byName == nil {
		p.byName = map[string]spray.Place{}
	}
	if len(p.list) < spray.MaxPlaces-1 {
		p.list = append(p.list, locality{})
		return spray.Place(len(p.list))
	}
	for range p.list {
		i := p.turn
		p.turn = (i + 1) % len(p.list)
		if p.list[i].flows == 0 {
			delete(p.byName, p.list[i].name)
			at := spray.Place(i + 1)
			rails.ForgetPlace(at)
			return at
		}
	}
	return 0
}

// tier is the distance of a rail pair from a locality: the larger one of both ends. Package spray
// asks once per pair and place.
func (p *localities) tier(near func(w *engines.Worker, transport, rail string) int,
	path spray.Path, at spray.Place) int {
	if int(at) > len(p.list) || at == 0 {
		return 0
	}
	x := &p.list[at-1]
	here := 0
	if near != nil {
		here = near(x.w, path.Transport, path.Local)
	}
	return max(here, int(x.remote[railID{Transport: path.Transport, Name: path.Remote}]))
}
