package dest

import (
	"maps"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/agreement"
	"github.com/kvspray/kvspray/control/exec/internal/endpoint"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/layouts"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// known is what is known of the prefill engines behind a peer.
type known struct {
	// Ranks that were reported last, by the model's fingerprint; none: assumed to equal ours. Only a
	// guess for the next lease, as the peer may have several engines with the model.
	ranks map[fingerprint][]agreement.Rank
	load  map[string]uint64 // bytes of the parts that ranks owe us, by the name of the rank
}

type fingerprint = [32]byte

// maxModels bounds the models of a peer whose ranks are kept. Only models of our engines count.
const maxModels = 64

// Engines are the prefill engines behind peers.
type Engines map[*lanes.Peer]*known

// of returns what is known of a peer's engines.
func (es Engines) of(p *lanes.Peer) *known {
	at := es[p]
	if at == nil {
		at = &known{ranks: map[fingerprint][]agreement.Rank{}}
		es[p] = at
	}
	return at
}

// SetRanks records the ranks of a peer's engine with a model; nil: they are not known.
func (es Engines) SetRanks(p *lanes.Peer, model fingerprint, ranks []agreement.Rank) {
	at := es.of(p)
	if len(at.ranks) >= maxModels {
		clear(at.ranks)
	}
	if at.ranks[model] = ranks; ranks == nil {
		delete(at.ranks, model)
	}
}

// Owed returns the bytes that each rank behind a peer owes us.
func (es Engines) Owed(p *lanes.Peer) map[string]uint64 { return es.of(p).load }

// charge counts the bytes that each rank of a peer still owes us: the planner chooses between
// replicas by load. Ranks of equal name count together, also of different engines.
func (es Engines) charge(p *lanes.Peer, o *outboundGrant, on bool) {
	load := es.of(p).load
	if load == nil {
		load = map[string]uint64{}
		es.of(p).load = load
	}
	for _, l := range o.parts {
		n := load[l.Part.Rank]
		if on {
			n += l.Part.Bytes
		} else {
			n -= min(n, l.Part.Bytes)
		}
		if load[l.Part.Rank] = n; n == 0 {
			delete(load, l.Part.Rank)
		}
	}
}

// Forget drops what is known of the engines behind a peer.
func (ds *Table) Forget(p *lanes.Peer) { delete(ds.Engines, p) }

// PeerUp ends the match timeout of leases that a peer serves: frames reach it.
func (ds *Table) PeerUp(boot transfer.Boot) {
	for _, d := range ds.GrantedTo(boot) {
		if d.State == lease.DestLanding {
			d.MatchBy = lease.Never
		}
	}
}

// PeerDown continues without a peer. With over, its grants are void and are made again elsewhere.
// Otherwise its leases wait for the match timeout.
func (ds *Table) PeerDown(now Instant, p *lanes.Peer, over bool) {
	for _, d := range ds.GrantedTo(p.Boot) {
		switch {
		// ended by an earlier one in this loop
		case d.State != lease.DestGranted && d.State != lease.DestLanding:
		case over:
			ds.regrant(now, d, lease.ByPeerLost, "the source's sidecar is gone")
		case d.ep.Peer() != p:
			ds.takeFrom(now, d)
		default:
			d.trouble = "the source's sidecar cannot be reached"
			if d.State == lease.DestLanding {
				d.MatchBy = now + d.matchTimeout
				ds.Agenda.Arm(d.t, min(d.Deadline, d.MatchBy))
			}
			ds.wait(d)
		}
	}
}

// Connected grants what waited for an endpoint.
func (ds *Table) Connected(now Instant, ep *endpoint.Endpoint) {
	for _, d := range inOrder(maps.Keys(ds.waiting[ep])) {
		ds.unwait(d)
		ds.grant(now, d)
	}
}

// ConnectFailed notes why the leases of an endpoint still wait.
func (ds *Table) ConnectFailed(ep *endpoint.Endpoint, why string) {
	for d := range ds.waiting[ep] {
		d.trouble = why
	}
}

// NoListener ends the leases of an endpoint where no process listens.
func (ds *Table) NoListener(now Instant, ep *endpoint.Endpoint, why string) {
	for _, d := range inOrder(maps.Keys(ds.waiting[ep])) {
		ds.CloseBy(now, d, ds.timeOut(d), engines.StatusExpired, why)
	}
}

// NeedsLayout reports whether a lease still waits for a layout.
func (ds *Table) NeedsLayout(name layouts.Name) bool {
	for d := range ds.describing[name] {
		if d.State == lease.DestWaiting && !d.decided {
			return true
		}
	}
	return false
}

// Described continues what waited for a layout; with err it is not to be had.
func (ds *Table) Described(now Instant, name layouts.Name, err error) {
	all := inOrder(maps.Keys(ds.describing[name]))
	delete(ds.describing, name)
	for _, d := range all {
		p := d.ep.Peer()
		switch {
		case d.State != lease.DestWaiting || d.decided:
		case err != nil && p != nil && d.reported(p) == nil:
			// The known ranks may be of an engine that is gone, or that does not serve d.
			ds.Engines.SetRanks(p, d.ws.Fingerprint, nil)
			ds.grant(now, d)
		case err != nil && p != nil && p.Boot == name.Boot:
			ds.Close(now, d, engines.StatusFailed,
				"the layout of a rank of the prefill engine is not to be had: "+err.Error())
		default:
			ds.grant(now, d)
		}
	}
}

// Shares reports whether any lease involves a peer.
func (ds *Table) Shares(boot transfer.Boot) bool { return len(ds.byPeer[boot]) > 0 }
