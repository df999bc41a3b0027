package exec

import (
	"slices"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
)

// endpoints are the sidecars that engines name, and ourselves.
type endpoints struct {
	*core
	byAddr map[string]*endpoint
	self   *endpoint // where we are reached ourselves; never forgotten
}

// endpoint is a sidecar as engines name it.
type endpoint struct {
	addr          string
	peer          *peer // nil while it is not known
	trying        bool
	refused       int                    // tries in a row at which nobody listened there
	again         Instant                // not tried before that
	refs          int                    // leases and questions that name it
	waiting       map[*dest]struct{}     // want a grant there, or have one from a peer that is out of reach
	queries       map[*query]struct{}    // want an answer from there
	queuedRevokes []*peerv1.ControlFrame // are said once it is reached
	retry         *timer
	breaker
}

// maxQueuedRevokes bounds the words for one address that nobody waits for: past it a source learns by its own time that nobody comes.
const maxQueuedRevokes = 256

// maxIdleNames bounds the names of one peer that are remembered while nothing names them. An honest one has its address and a name or two; whoever
// sends requests may spell it in any number of ways, and one that is forgotten is reached again by a hello.
const maxIdleNames = 16

// endpoint returns the entry of an address.
func (es *endpoints) get(addr string) *endpoint {
	ep := es.byAddr[addr]
	if ep == nil {
		ep = &endpoint{addr: addr, waiting: map[*dest]struct{}{}, queries: map[*query]struct{}{}}
		ep.retry = newTimer(func(now Instant) { es.reach(now, ep) })
		es.byAddr[addr] = ep
	}
	return ep
}

// reached reports whether what is sent there arrives.
func (ep *endpoint) reached() bool { return ep.peer != nil && ep.peer.up() }

// wanted reports whether anybody waits for it to be reached.
func (ep *endpoint) wanted() bool { return len(ep.waiting)+len(ep.queries)+len(ep.queuedRevokes) > 0 }

// used reports whether anything needs the entry.
func (ep *endpoint) used() bool { return ep.trying || ep.refs > 0 || ep.wanted() }

// dropEndpoint forgets an address that nobody waits for and nobody answers at; later, where its breaker is to be remembered. One of a peer is
// remembered as long as the peer, among its last few.
func (es *endpoints) drop(ep *endpoint) {
	switch p := ep.peer; {
	case ep.used() || es.byAddr[ep.addr] != ep:
	case p != nil && ep == es.self: // dialling it would only tell us so
	case p != nil:
		p.idle = append(remove(p.idle, ep), ep)
		for len(p.idle) > maxIdleNames || len(p.idle) > 0 && len(es.byAddr) > maxEndpoints {
			old := p.idle[0]
			p.idle = slices.Delete(p.idle, 0, 1)
			if !old.used() {
				es.leads(old, nil)
				es.remove(old)
			}
		}
	case ep.until() > 0 && len(es.byAddr) <= maxEndpoints:
		es.agenda.arm(ep.retry, ep.until())
	default:
		es.remove(ep)
	}
}

func (es *endpoints) remove(ep *endpoint) {
	es.agenda.disarm(ep.retry)
	delete(es.byAddr, ep.addr)
}

// leads says which peer is at an address; nil: it is not known.
func (es *endpoints) leads(ep *endpoint, p *peer) {
	if old := ep.peer; old != nil {
		delete(old.names, ep)
		old.idle = remove(old.idle, ep)
	}
	if ep.peer = p; p != nil {
		p.names[ep] = struct{}{}
	}
}

// reach tries to reach a sidecar that somebody waits for. However many do, there is one try at a time, and a pause between two.
func (es *endpoints) reach(now Instant, ep *endpoint) {
	switch {
	case ep.trying || ep.reached():
	case !ep.wanted():
		ep.breaker = breaker{}
		es.drop(ep)
	case now < ep.again:
		es.agenda.arm(ep.retry, ep.again)
	default:
		ep.trying = true
		es.emit(Connect).Endpoint = ep.addr
	}
}
