package exec

import (
	"slices"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
)

// endpoints are the sidecars that engines name, and ourselves.
type endpoints struct {
	*core
	byAddr map[string]*endpoint
	self   *endpoint // our own address; never deleted
}

// endpoint is a sidecar as engines name it.
type endpoint struct {
	addr          string
	peer          *peer // nil while it is not known
	trying        bool
	refused       int                    // consecutive tries without a listener
	again         Instant                // no try before this
	refs          int                    // leases and questions that name it
	waiting       map[*dest]struct{}     // want a grant there, or their peer is unreachable
	queries       map[*query]struct{}    // wait for an answer
	queuedRevokes []*peerv1.ControlFrame // are sent once it is reached
	retry         *timer
	breaker
}

// maxQueuedRevokes bounds the revokes that wait for one address. The source of a dropped one waits
// for its match timeout.
const maxQueuedRevokes = 256

// maxIdleNames bounds the unused addresses of one peer that are remembered. A sidecar normally has
// two or three; requests may spell its name in any number of ways. A forgotten address costs one
// more connect.
const maxIdleNames = 16

// get returns the entry of an address, a new one if there is none.
func (es *endpoints) get(addr string) *endpoint {
	ep := es.byAddr[addr]
	if ep == nil {
		ep = &endpoint{addr: addr, waiting: map[*dest]struct{}{}, queries: map[*query]struct{}{}}
		ep.retry = newTimer(func(now Instant) { es.reach(now, ep) })
		es.byAddr[addr] = ep
	}
	return ep
}

// reached reports whether frames reach the sidecar.
func (ep *endpoint) reached() bool { return ep.peer != nil && ep.peer.up() }

// wanted reports whether a lease, a query or a revoke waits for the connection.
func (ep *endpoint) wanted() bool {
	return len(ep.waiting)+len(ep.queries)+len(
		ep.queuedRevokes) > 0
}

// used reports whether anything needs the entry.
func (ep *endpoint) used() bool { return ep.trying || ep.refs > 0 || ep.wanted() }

// drop deletes an unused address. An entry with failures stays until its circuit breaker is stale;
// an entry with a peer stays among the last few of that peer.
func (es *endpoints) drop(ep *endpoint) {
	switch p := ep.peer; {
	case ep.used() || es.byAddr[ep.addr] != ep:
	case p != nil && ep == es.self:
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

// leads records the peer at an address; nil: unknown.
func (es *endpoints) leads(ep *endpoint, p *peer) {
	if old := ep.peer; old != nil {
		delete(old.names, ep)
		old.idle = remove(old.idle, ep)
	}
	if ep.peer = p; p != nil {
		p.names[ep] = struct{}{}
	}
}

// reach connects to a sidecar that is wanted: one connect at a time, with a pause between two.
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
