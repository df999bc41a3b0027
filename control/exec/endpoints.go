package exec

import (
	"errors"
	"maps"
	"slices"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
)

// endpoint is a sidecar as engines name it.
type endpoint struct {
	addr     string
	peer     *peer // nil while it is not known
	trying   bool
	refused  int                    // tries in a row at which nobody listened there
	again    Instant                // not tried before that
	refs     int                    // leases and questions that name it
	waiting  map[*dest]struct{}     // want a grant there, or have one from a peer that is out of reach
	awaits   map[*await]struct{}    // want an answer from there
	partings []*peerv1.ControlFrame // are said once it is reached
	retry    *timer
	breaker
}

// maxPartings bounds the words for one address that nobody waits for: past it a source learns by its own time that nobody comes.
const maxPartings = 256

// maxIdleNames bounds the names of one peer that are remembered while nothing names them. An honest one has its address and a name or two; whoever
// sends requests may spell it in any number of ways, and one that is forgotten is reached again by a hello.
const maxIdleNames = 16

// peer is one boot of another sidecar, or of ourselves.
type peer struct {
	names map[*endpoint]struct{} // that lead to it
	idle  []*endpoint            // of these, that nobody used when it was last looked at, the longest first; at most maxIdleNames

	boot    transfer.Boot
	up      bool
	met     bool // it was up
	lanes   []*lane
	rails   *spray.Peer
	pending int
	known   map[railID]bool    // its rails: whether their links are down; nil: it has not said
	credits map[railID]Instant // when what it wants in flight at most is forgotten
	expiry  Instant            // of the first of them

	places places

	told  toldOf
	dirty bool
	rouse bool              // its lanes, as soon as there are any
	ranks []Rank            // of the engine there that we heard of last; nil: suppose that it is as ours
	load  map[string]uint64 // bytes of the parts that its ranks owe us, by rank
}

func (e *Exec) peer(boot transfer.Boot) *peer {
	p := e.peers[boot]
	if p == nil {
		p = &peer{boot: boot, names: map[*endpoint]struct{}{}}
		p.rails = e.spray.Peer(boot, p)
		p.rails.Tier = func(path spray.Path, at spray.Place) int { return e.tierAt(p, path, at) }
		e.peers[boot] = p
	}
	return p
}

// endpoint returns the entry of an address.
func (e *Exec) endpoint(addr string) *endpoint {
	ep := e.endpoints[addr]
	if ep == nil {
		ep = &endpoint{addr: addr, waiting: map[*dest]struct{}{}, awaits: map[*await]struct{}{}}
		ep.retry = newTimer(func(now Instant) { e.reach(now, ep) })
		e.endpoints[addr] = ep
	}
	return ep
}

// reached reports whether what is sent there arrives.
func (ep *endpoint) reached() bool { return ep.peer != nil && ep.peer.up }

// wanted reports whether anybody waits for it to be reached.
func (ep *endpoint) wanted() bool { return len(ep.waiting)+len(ep.awaits)+len(ep.partings) > 0 }

// used reports whether anything needs the entry.
func (ep *endpoint) used() bool { return ep.trying || ep.refs > 0 || ep.wanted() }

// dropEndpoint forgets an address that nobody waits for and nobody answers at; later, where its breaker is to be remembered. One of a peer is
// remembered as long as the peer, among its last few.
func (e *Exec) dropEndpoint(ep *endpoint) {
	switch p := ep.peer; {
	case ep.used() || e.endpoints[ep.addr] != ep:
	case p != nil && ep == e.self: // dialling it would only tell us so
	case p != nil:
		p.idle = append(remove(p.idle, ep), ep)
		for len(p.idle) > maxIdleNames || len(p.idle) > 0 && len(e.endpoints) > maxEndpoints {
			old := p.idle[0]
			p.idle = slices.Delete(p.idle, 0, 1)
			if !old.used() {
				e.leads(old, nil)
				e.deleteEndpoint(old)
			}
		}
	case ep.until() > 0 && len(e.endpoints) <= maxEndpoints:
		e.agenda.arm(ep.retry, ep.until())
	default:
		e.deleteEndpoint(ep)
	}
}

func (e *Exec) deleteEndpoint(ep *endpoint) {
	e.agenda.disarm(ep.retry)
	delete(e.endpoints, ep.addr)
}

// leads says which peer is at an address; nil: it is not known.
func (e *Exec) leads(ep *endpoint, p *peer) {
	if old := ep.peer; old != nil {
		delete(old.names, ep)
		old.idle = remove(old.idle, ep)
	}
	if ep.peer = p; p != nil {
		p.names[ep] = struct{}{}
	}
}

// reach tries to reach a sidecar that somebody waits for. However many do, there is one try at a time, and a pause between two.
func (e *Exec) reach(now Instant, ep *endpoint) {
	switch {
	case ep.trying || ep.reached():
	case !ep.wanted():
		ep.breaker = breaker{}
		e.dropEndpoint(ep)
	case now < ep.again:
		e.agenda.arm(ep.retry, ep.again)
	default:
		ep.trying = true
		e.emit(Connect).Endpoint = ep.addr
	}
}

// PeerUp says that the sidecar at addr answers and is boot. addr may be empty where it called us.
func (e *Exec) PeerUp(now Instant, addr string, boot transfer.Boot) {
	p := e.peer(boot)
	if !p.up {
		p.up, p.met = true, true
		for _, d := range e.destsAt(boot) {
			if d.State == lease.DestLanding {
				d.Partner = lease.Never
			}
		}
		for _, in := range e.inboundOf(p) {
			e.present(in)
		}
		for _, ep := range endpointsInOrder(maps.Keys(p.names)) {
			e.serve(now, ep)
		}
	}
	if addr != "" {
		ep := e.endpoint(addr)
		if e.self == nil && boot == e.cfg.Boot {
			e.self = ep
		}
		if old := ep.peer; old != p {
			e.leads(ep, p)
			if old != nil && !old.up {
				e.moveOn(now, ep, old)
			}
		}
		e.serve(now, ep)
	}
	e.assign(now)
}

// moveOn grants leases to whoever is at an address now, which the peer that was there before has and cannot be reached. One that can be reached keeps
// them: then the address is that of several processes. Whether that peer is gone is not for us to say.
func (e *Exec) moveOn(now Instant, ep *endpoint, old *peer) {
	for _, d := range inOrder(maps.Keys(ep.waiting)) {
		if d.Peer == old.boot && (d.State == lease.DestGranted || d.State == lease.DestLanding) {
			e.takeFrom(now, d)
		}
	}
}

// takeFrom takes a lease back from a peer that cannot be reached, for it to be granted to the one that is at its address now. Where the first comes back,
// it hears that nothing is wanted of it any more.
func (e *Exec) takeFrom(now Instant, d *dest) {
	why := "the source's sidecar cannot be reached, and another answers at " + d.ep.addr
	e.send(d.Peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{Revoke: &peerv1.Revoke{
		Destination: leaseMsg(d.ID), Gen: d.live.gen, Reason: why}}})
	e.regrant(now, d, ByPeerLost, why)
}

// serve does at an endpoint that is reached what was waited for.
func (e *Exec) serve(now Instant, ep *endpoint) {
	ep.trying, ep.refused, ep.again, ep.breaker = false, 0, 0, breaker{}
	e.agenda.disarm(ep.retry)
	for _, w := range awaitsInOrder(maps.Keys(ep.awaits)) {
		e.ask(now, w)
	}
	for _, f := range ep.partings {
		e.send(ep.peer.boot, f)
	}
	ep.partings = nil
	for _, d := range inOrder(maps.Keys(ep.waiting)) {
		delete(ep.waiting, d)
		e.grant(now, d)
	}
	e.dropEndpoint(ep)
}

// ConnectFailed ends a Connect without a peer. Those who wait for it try again until their own time is over, or until it is plain that
// nobody listens at that address (ErrNobody), or it is not allowed (ErrNever): a wrong address must not cost each request all its patience, nor a
// sidecar that died.
func (e *Exec) ConnectFailed(now Instant, addr string, err error) {
	ep := e.endpoints[addr]
	if ep == nil {
		return
	}
	if ep.trying = false; ep.reached() {
		return // otherwise than by this try
	}
	ep.again = now + connectRetry
	ep.failed(now, err)
	ep.partings = nil
	for d := range ep.waiting {
		d.trouble = err.Error()
	}
	if ep.refused++; !errors.Is(err, ErrNobody) {
		ep.refused = 0
	}
	if ep.refused >= maxRefused || errors.Is(err, ErrNever) {
		e.nobody(now, ep, err)
	}
	if !ep.wanted() {
		e.dropEndpoint(ep)
		return
	}
	e.agenda.arm(ep.retry, ep.again)
}

// nobody ends what waits for an address at which nobody listens. Until somebody does, those who come find it out by one try: their engines
// should compute, and a refusal is quick, so that nobody needs protection from the next one.
func (e *Exec) nobody(now Instant, ep *endpoint, err error) {
	ep.refused = maxRefused - 1
	ep.breaker = breaker{failing: now, fails: 1, why: err.Error()} // remembered, and closed
	ep.refs++                                                      // it stays until the caller has seen that nobody is left
	for _, d := range inOrder(maps.Keys(ep.waiting)) {
		e.closeDestBy(now, d, e.timeOut(d), StatusExpired, err.Error())
	}
	for _, w := range awaitsInOrder(maps.Keys(ep.awaits)) {
		e.answer(w, connector.Admission{State: "gone", Message: err.Error()})
	}
	ep.refs--
}

// PeerDown says that the control lanes to boot are down. over: so is all that was agreed with that process, which is dead, superseded, or
// was silent for so long that it was forgotten; if it comes again it begins anew. Otherwise its leases wait for it as long as for any
// missing partner, or until nobody listens where it was.
func (e *Exec) PeerDown(now Instant, boot transfer.Boot, over bool) {
	p := e.peers[boot]
	if p == nil {
		return
	}
	p.up = false
	if over {
		e.forgetPeer(now, p)
	}
	for _, d := range e.destsAt(boot) {
		switch {
		case d.State != lease.DestGranted && d.State != lease.DestLanding: // one before it ended it
		case over:
			e.regrant(now, d, ByPeerLost, "the source's sidecar is gone")
		case d.ep.peer != p:
			e.takeFrom(now, d)
		default:
			d.trouble = "the source's sidecar cannot be reached"
			if d.State == lease.DestLanding {
				d.Partner = now + d.partner
				e.agenda.arm(d.t, min(d.Deadline, d.Partner))
			}
			d.ep.waiting[d] = struct{}{}
		}
	}
	for _, ep := range endpointsInOrder(maps.Keys(p.names)) {
		e.reach(now, ep)
	}
	for _, in := range e.inboundOf(p) {
		if e.inbound[in.id] == in {
			e.absent(now, in, over)
		}
	}
	if over {
		e.undescribed(now, boot)
	}
	e.assign(now)
}

// forgetPeer drops what is known of a peer, and not the leases that have to do with it.
func (e *Exec) forgetPeer(now Instant, p *peer) {
	delete(e.peers, p.boot)
	e.spray.Forget(p.rails)
	e.forgetCredits(p)
	for _, ep := range endpointsInOrder(maps.Keys(p.names)) {
		e.leads(ep, nil)
		for w := range ep.awaits {
			w.sent = transfer.Boot{}
		}
		e.reach(now, ep)
		e.dropEndpoint(ep)
	}
	e.dropPendingOf(p)
}
