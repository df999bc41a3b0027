package exec

import (
	"errors"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/exec/internal/endpoint"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/layouts"
	"github.com/kvspray/kvspray/transfer"
)

// Peers that come and go: what concerns several parts.

// PeerUp reports that the sidecar at addr is reached and has that boot id. addr is empty if the
// peer called us.
func (e *Exec) PeerUp(now Instant, addr string, boot transfer.Boot) {
	p := e.peers.Get(boot)
	if !p.Up() {
		p.Link = lanes.Up
		e.dests.PeerUp(boot)
		e.match.PeerUp(p)
		for _, ep := range e.endpoints.Of(p) {
			e.serve(now, ep)
		}
	}
	if addr != "" {
		ep := e.endpoints.Get(addr)
		if boot == e.core.Cfg.Boot {
			e.endpoints.IsSelf(ep)
		}
		if old := ep.Peer(); old != p {
			e.endpoints.Leads(ep, p)
			if old != nil && !old.Up() {
				e.dests.MoveOn(now, ep, old)
			}
		}
		e.serve(now, ep)
	}
	e.assign(now)
}

// serve does what waited for an endpoint.
func (e *Exec) serve(now Instant, ep *endpoint.Endpoint) {
	e.endpoints.Connected(ep)
	e.queries.Connected(now, ep)
	for _, f := range ep.Revokes() {
		e.out.Send(ep.Peer().Boot, f)
	}
	e.dests.Connected(now, ep)
	e.endpoints.Drop(ep)
}

// ConnectFailed ends a Connect without a peer. Waiting leases and queries cause another try until
// their own time is over. They end early if no process listens at the address (ErrNotListening) or
// the address is not permitted (ErrNotPossible): a wrong address or a dead sidecar must not cost
// each request its whole match timeout.
func (e *Exec) ConnectFailed(now Instant, addr string, err error) {
	ep := e.endpoints.Find(addr)
	if ep == nil {
		return
	}
	failed, hopeless := e.endpoints.Failed(now, ep, err)
	if !failed {
		return
	}
	e.dests.ConnectFailed(ep, err.Error())
	if hopeless {
		e.dests.NoListener(now, ep, err.Error())
		e.queries.NoListener(ep, err.Error())
	}
	e.endpoints.Again(ep)
}

// PeerDown reports that the control lanes to a peer are down. With over, the process has died, was
// superseded or was silent for too long: all agreements with it are void, and no Message of it
// follows. Otherwise its leases wait for the match timeout, or until no process listens at its
// address.
func (e *Exec) PeerDown(now Instant, boot transfer.Boot, over bool) {
	p := e.peers.Find(boot)
	if p == nil {
		return
	}
	if p.Link == lanes.Up {
		p.Link = lanes.Down
	}
	if over {
		e.forgetPeer(now, p)
	}
	e.dests.PeerDown(now, p, over)
	for _, ep := range e.endpoints.Of(p) {
		e.endpoints.Reach(now, ep)
	}
	e.match.PeerDown(now, p, over)
	if over {
		for _, name := range e.layouts.Of(boot) {
			e.planAgain(now, name, ErrNoAnswer)
		}
	}
	e.assign(now)
}

// forgetPeer deletes a peer, but not the leases that involve it.
func (e *Exec) forgetPeer(now Instant, p *lanes.Peer) {
	e.peers.Forget(p)
	e.dests.Forget(p)
	e.credits.Forget(p.Boot)
	for _, ep := range e.endpoints.Of(p) {
		e.endpoints.Leads(ep, nil)
		e.queries.Forget(ep)
		e.endpoints.Reach(now, ep)
		e.endpoints.Drop(ep)
	}
	e.match.Forget(p)
	e.queries.PeerGone(p.Boot)
}

// Described reports that the planner has a layout of a peer, or why not. A peer that does not
// answer (ErrNoAnswer) is asked again until the match timeout, or until it is forgotten.
func (e *Exec) Described(now Instant, boot transfer.Boot, geometry [32]byte, err error) {
	name := layouts.Name{Boot: boot, Geometry: geometry}
	if errors.Is(err, ErrNoAnswer) && e.peers.Find(boot) != nil &&
		(e.dests.NeedsLayout(name) || e.match.NeedsLayout(name)) && e.layouts.Again(now, name) {
		return
	}
	e.planAgain(now, name, err)
	e.assign(now)
}

// planAgain continues what waited for a layout.
func (e *Exec) planAgain(now Instant, name layouts.Name, err error) {
	if e.layouts.Done(name) {
		e.dests.Described(now, name, err)
		e.match.Described(now, name, err)
	}
}

// Unsent reports that a frame of Send or Offer was not sent and never will be: too many frames
// wait for the peer, or this one is too long. Whatever depends on the frame ends now with err as
// its reason: the engine recomputes sooner than by a deadline.
func (e *Exec) Unsent(now Instant, boot transfer.Boot, f *peerv1.ControlFrame, err error) {
	switch b := f.Body.(type) {
	case *peerv1.ControlFrame_Grant:
		e.dests.Unsent(now, boot, b.Grant, err)
	case *peerv1.ControlFrame_Await:
		e.queries.Unsent(boot, b.Await.Token, err)
	}
	e.assign(now)
}
