package exec

import (
	"errors"
	"maps"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// What follows in several parts when a peer comes or goes.

// PeerUp says that the sidecar at addr answers and is boot. addr may be empty where it called us.
func (e *Exec) PeerUp(now Instant, addr string, boot transfer.Boot) {
	p := e.peers.get(boot)
	if !p.up() {
		p.link = peerUp
		for _, d := range e.dests.grantedTo(boot) {
			if d.State == lease.DestLanding {
				d.MatchBy = lease.Never
			}
		}
		for _, in := range e.match.grantsFrom(p) {
			e.match.present(in)
		}
		for _, ep := range endpointsInOrder(maps.Keys(p.names)) {
			e.serve(now, ep)
		}
	}
	if addr != "" {
		ep := e.endpoints.get(addr)
		if e.endpoints.self == nil && boot == e.cfg.Boot {
			e.endpoints.self = ep
		}
		if old := ep.peer; old != p {
			e.endpoints.leads(ep, p)
			if old != nil && !old.up() {
				e.dests.moveOn(now, ep, old)
			}
		}
		e.serve(now, ep)
	}
	e.assign(now)
}

// serve does at an endpoint that is reached what was waited for.
func (e *Exec) serve(now Instant, ep *endpoint) {
	ep.trying, ep.refused, ep.again, ep.breaker = false, 0, 0, breaker{}
	e.agenda.disarm(ep.retry)
	for _, w := range queriesInOrder(maps.Keys(ep.queries)) {
		e.queries.ask(now, w)
	}
	for _, f := range ep.queuedRevokes {
		e.send(ep.peer.boot, f)
	}
	ep.queuedRevokes = nil
	for _, d := range inOrder(maps.Keys(ep.waiting)) {
		delete(ep.waiting, d)
		e.dests.grant(now, d)
	}
	e.endpoints.drop(ep)
}

// ConnectFailed ends a Connect without a peer. Those who wait for it try again until their own time is over, or until it is plain that
// nobody listens at that address (ErrNotListening), or it is not allowed (ErrNotPossible): a wrong address must not cost each request all its patience, nor a
// sidecar that died.
func (e *Exec) ConnectFailed(now Instant, addr string, err error) {
	ep := e.endpoints.byAddr[addr]
	if ep == nil {
		return
	}
	if ep.trying = false; ep.reached() {
		return // otherwise than by this try
	}
	ep.again = now + connectRetry
	ep.failed(now, err)
	ep.queuedRevokes = nil
	for d := range ep.waiting {
		d.trouble = err.Error()
	}
	if ep.refused++; !errors.Is(err, ErrNotListening) {
		ep.refused = 0
	}
	if ep.refused >= maxRefused || errors.Is(err, ErrNotPossible) {
		e.noListener(now, ep, err)
	}
	if !ep.wanted() {
		e.endpoints.drop(ep)
		return
	}
	e.agenda.arm(ep.retry, ep.again)
}

// noListener ends what waits for an address at which nobody listens. Until somebody does, those who come find it out by one try: their engines
// should compute, and a refusal is quick, so that nobody needs protection from the next one.
func (e *Exec) noListener(now Instant, ep *endpoint, err error) {
	ep.refused = maxRefused - 1
	ep.breaker = breaker{failing: now, fails: 1, why: err.Error()} // remembered, and closed
	ep.refs++                                                      // it stays until the caller has seen that nobody is left
	for _, d := range inOrder(maps.Keys(ep.waiting)) {
		e.dests.closeBy(now, d, e.dests.timeOut(d), StatusExpired, err.Error())
	}
	for _, w := range queriesInOrder(maps.Keys(ep.queries)) {
		e.queries.answer(w, connector.Admission{State: "gone", Message: err.Error()})
	}
	ep.refs--
}

// PeerDown says that the control lanes to boot are down. over: so is all that was agreed with that process, which is dead, superseded, or
// was silent for so long that it was forgotten; if it comes again it begins anew. Otherwise its leases wait for it as long as for any
// missing partner, or until nobody listens where it was.
func (e *Exec) PeerDown(now Instant, boot transfer.Boot, over bool) {
	p := e.peers.byBoot[boot]
	if p == nil {
		return
	}
	if p.link == peerUp {
		p.link = peerDown
	}
	if over {
		e.forgetPeer(now, p)
	}
	for _, d := range e.dests.grantedTo(boot) {
		switch {
		case d.State != lease.DestGranted && d.State != lease.DestLanding: // one before it ended it
		case over:
			e.dests.regrant(now, d, ByPeerLost, "the source's sidecar is gone")
		case d.ep.peer != p:
			e.dests.takeFrom(now, d)
		default:
			d.trouble = "the source's sidecar cannot be reached"
			if d.State == lease.DestLanding {
				d.MatchBy = now + d.matchTimeout
				e.agenda.arm(d.t, min(d.Deadline, d.MatchBy))
			}
			d.ep.waiting[d] = struct{}{}
		}
	}
	for _, ep := range endpointsInOrder(maps.Keys(p.names)) {
		e.endpoints.reach(now, ep)
	}
	for _, in := range e.match.grantsFrom(p) {
		if e.match.grants[in.id] == in {
			e.match.absent(now, in, over)
		}
	}
	if over {
		e.undescribed(now, boot)
	}
	e.assign(now)
}

// forgetPeer drops what is known of a peer, and not the leases that have to do with it.
func (e *Exec) forgetPeer(now Instant, p *peer) {
	delete(e.peers.byBoot, p.boot)
	p.hint = false
	e.spray.Forget(p.rails)
	e.credits.ledger.Forget(p.boot)
	for _, ep := range endpointsInOrder(maps.Keys(p.names)) {
		e.endpoints.leads(ep, nil)
		for w := range ep.queries {
			w.sent = transfer.Boot{}
		}
		e.endpoints.reach(now, ep)
		e.endpoints.drop(ep)
	}
	e.match.pending.dropOf(p)
}
