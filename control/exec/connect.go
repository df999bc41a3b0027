package exec

import (
	"errors"
	"maps"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// Peers that come and go: what concerns several parts.

// PeerUp reports that the sidecar at addr is reached and has that boot id. addr is empty if the
// peer called us.
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

// serve does what waited for an endpoint.
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

// ConnectFailed ends a Connect without a peer. Waiting leases and queries cause another try until
// their own time is over. They end early if no process listens at the address (ErrNotListening) or
// the address is not permitted (ErrNotPossible): a wrong address or a dead sidecar must not cost
// each request its whole match timeout.
func (e *Exec) ConnectFailed(now Instant, addr string, err error) {
	ep := e.endpoints.byAddr[addr]
	if ep == nil {
		return
	}
	if ep.trying = false; ep.reached() {
		return // by another connection
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

// noListener ends everything that waits for an address without a listener. One try decides for
// later requests: a refused connect is quick, so the circuit breaker stays closed.
func (e *Exec) noListener(now Instant, ep *endpoint, err error) {
	ep.refused = maxRefused - 1
	// failures are remembered; the breaker is closed
	ep.breaker = breaker{failing: now, fails: 1, why: err.Error()}
	ep.refs++ // the caller still uses the entry
	for _, d := range inOrder(maps.Keys(ep.waiting)) {
		e.dests.closeBy(now, d, e.dests.timeOut(d), engines.StatusExpired, err.Error())
	}
	for _, w := range queriesInOrder(maps.Keys(ep.queries)) {
		e.queries.answer(w, engines.Admission{State: "gone", Message: err.Error()})
	}
	ep.refs--
}

// PeerDown reports that the control lanes to a peer are down. With over, the process has died, was
// superseded or was silent for too long: all agreements with it are void. Otherwise its leases
// wait for the match timeout, or until no process listens at its address.
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
		// ended by an earlier one in this loop
		case d.State != lease.DestGranted && d.State != lease.DestLanding:
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

// forgetPeer deletes a peer, but not the leases that involve it.
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
