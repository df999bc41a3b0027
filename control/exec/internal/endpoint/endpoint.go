// Package endpoint has the addresses of sidecars that engines name, the peers behind them, and the
// circuit breaker of each. It decides when the driver connects.
package endpoint

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/exec/internal/index"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
)

// Instant is a point in time: the duration since the owner's start.
type Instant = timer.Instant

// Retry is the time between tries to reach a peer that a lease waits for.
const Retry = 200 * time.Millisecond

// ErrNotListening is wrapped by the error of Failed if no process listens at the address.
var ErrNotListening = errors.New("connection refused")

// ErrNotPossible is wrapped by the error of Failed if a retry cannot succeed soon: the
// configuration forbids the address, or the release of the sidecar there is incompatible.
var ErrNotPossible = errors.New("not possible")

// Table has the sidecars that engines name, and ourselves.
type Table struct {
	agenda  *timer.Agenda
	connect func(addr string)
	byAddr  map[string]*Endpoint
	self    *Endpoint // our own address; never deleted
	names   map[*lanes.Peer]*names
}

// names are the addresses of one peer.
type names struct {
	all  map[*Endpoint]struct{}
	idle []*Endpoint // unused ones of these, oldest first; at most MaxIdle
}

// New returns an empty table, which calls connect to reach an address. Connected or Failed follows.
func New(agenda *timer.Agenda, connect func(addr string)) *Table {
	return &Table{agenda: agenda, connect: connect, byAddr: map[string]*Endpoint{},
		names: map[*lanes.Peer]*names{}}
}

// Endpoint is a sidecar as engines name it.
type Endpoint struct {
	addr    string
	peer    *lanes.Peer // nil while it is not known
	trying  bool
	refused int                    // consecutive tries without a listener
	again   Instant                // no try before this
	refs    int                    // leases and queries that name it
	waits   int                    // leases and queries that wait for the connection, or for an answer
	revokes []*peerv1.ControlFrame // are sent once it is reached
	retry   *timer.Timer
	breaker
}

// MaxRevokes bounds the revokes that wait for one address. The source of a dropped one waits for
// its match timeout.
const MaxRevokes = 256

// MaxIdle bounds the unused addresses of one peer that are remembered. A sidecar normally has two
// or three; requests may spell its name in any number of ways. A forgotten address costs one more
// connect.
const MaxIdle = 16

// maxRefused bounds the tries at an address without a listener: 2 s, enough for a sidecar to
// restart.
const maxRefused = 10

// Find returns the entry of an address; nil: there is none.
func (t *Table) Find(addr string) *Endpoint { return t.byAddr[addr] }

// Len counts the addresses.
func (t *Table) Len() int { return len(t.byAddr) }

// Get returns the entry of an address, a new one if there is none.
func (t *Table) Get(addr string) *Endpoint {
	ep := t.byAddr[addr]
	if ep == nil {
		ep = &Endpoint{addr: addr}
		ep.retry = timer.New(func(now Instant) { t.Reach(now, ep) })
		t.byAddr[addr] = ep
	}
	return ep
}

// Of returns the addresses of a peer, in order.
func (t *Table) Of(p *lanes.Peer) []*Endpoint {
	n := t.names[p]
	if n == nil {
		return nil
	}
	return slices.SortedFunc(maps.Keys(n.all), func(a, b *Endpoint) int {
		return cmp.Compare(a.addr, b.addr)
	})
}

// Addr is the address, as engines name it.
func (ep *Endpoint) Addr() string { return ep.addr }

// Peer is the sidecar there; nil while it is not known.
func (ep *Endpoint) Peer() *lanes.Peer { return ep.peer }

// Reached reports whether frames reach the sidecar.
func (ep *Endpoint) Reached() bool { return ep.peer != nil && ep.peer.Up() }

// Hold counts a user of the entry, which Drop does not delete before its Release.
func (ep *Endpoint) Hold() { ep.refs++ }

// Release ends a Hold.
func (t *Table) Release(ep *Endpoint) {
	ep.refs--
	t.Drop(ep)
}

// Wait counts a user that waits for the connection, or for an answer.
func (ep *Endpoint) Wait() { ep.waits++ }

// Waited ends a Wait.
func (ep *Endpoint) Waited() { ep.waits-- }

// wanted reports whether a lease, a query or a revoke waits for the connection.
func (ep *Endpoint) wanted() bool { return ep.waits+len(ep.revokes) > 0 }

// used reports whether anything needs the entry.
func (ep *Endpoint) used() bool { return ep.trying || ep.refs > 0 || ep.wanted() }

// Drop deletes an unused address. An entry with failures stays until its circuit breaker is stale;
// an entry with a peer stays among the last few of that peer.
func (t *Table) Drop(ep *Endpoint) {
	switch p := ep.peer; {
	case ep.used() || t.byAddr[ep.addr] != ep:
	case p != nil && ep == t.self:
	case p != nil:
		n := t.names[p]
		n.idle = append(index.Remove(n.idle, ep), ep)
		for len(n.idle) > MaxIdle || len(n.idle) > 0 && len(t.byAddr) > MaxEndpoints {
			old := n.idle[0]
			n.idle = slices.Delete(n.idle, 0, 1)
			if !old.used() {
				t.Leads(old, nil)
				t.remove(old)
			}
		}
	case ep.until() > 0 && len(t.byAddr) <= MaxEndpoints:
		t.agenda.Arm(ep.retry, ep.until())
	default:
		t.remove(ep)
	}
}

func (t *Table) remove(ep *Endpoint) {
	t.agenda.Disarm(ep.retry)
	delete(t.byAddr, ep.addr)
}

// Leads records the peer at an address; nil: unknown.
func (t *Table) Leads(ep *Endpoint, p *lanes.Peer) {
	if n := t.names[ep.peer]; n != nil {
		delete(n.all, ep)
		n.idle = index.Remove(n.idle, ep)
		if len(n.all) == 0 {
			delete(t.names, ep.peer)
		}
	}
	if ep.peer = p; p == nil {
		return
	}
	if t.names[p] == nil {
		t.names[p] = &names{all: map[*Endpoint]struct{}{}}
	}
	t.names[p].all[ep] = struct{}{}
}

// IsSelf records our own address.
func (t *Table) IsSelf(ep *Endpoint) {
	if t.self == nil {
		t.self = ep
	}
}

// Revoke keeps a revoke for an address until it is reached. Beyond a bound it drops the revoke.
func (t *Table) Revoke(now Instant, ep *Endpoint, f *peerv1.ControlFrame) {
	if len(ep.revokes) < MaxRevokes {
		ep.revokes = append(ep.revokes, f)
		t.Reach(now, ep)
	}
}

// Reach connects to a sidecar that is wanted: one connect at a time, with a pause between two.
func (t *Table) Reach(now Instant, ep *Endpoint) {
	switch {
	case ep.trying || ep.Reached():
	case !ep.wanted():
		ep.breaker = breaker{}
		t.Drop(ep)
	case now < ep.again:
		t.agenda.Arm(ep.retry, ep.again)
	default:
		ep.trying = true
		t.connect(ep.addr)
	}
}

// Connected ends the tries for an address, and closes its circuit breaker.
func (t *Table) Connected(ep *Endpoint) {
	ep.trying, ep.refused, ep.again, ep.breaker = false, 0, 0, breaker{}
	t.agenda.Disarm(ep.retry)
}

// Queued counts the revokes that wait for an address.
func (ep *Endpoint) Queued() int { return len(ep.revokes) }

// Revokes takes the revokes that waited for an address.
func (ep *Endpoint) Revokes() []*peerv1.ControlFrame {
	all := ep.revokes
	ep.revokes = nil
	return all
}

// Failed ends a connect without a peer. It returns false if the sidecar was reached by another
// connection. Otherwise hopeless is true if everything that waits for the address has to end:
// nothing will listen there soon. The entry stays until Again.
func (t *Table) Failed(now Instant, ep *Endpoint, err error) (failed, hopeless bool) {
	if ep.trying = false; ep.Reached() {
		return false, false
	}
	ep.again = now + Retry
	ep.failed(now, err)
	ep.revokes = nil
	if ep.refused++; !errors.Is(err, ErrNotListening) {
		ep.refused = 0
	}
	if hopeless = ep.refused >= maxRefused || errors.Is(err, ErrNotPossible); hopeless {
		// One try decides for later requests. A refused connect is quick, so the circuit breaker stays
		// closed; failures are remembered.
		ep.refused = maxRefused - 1
		ep.breaker = breaker{failing: now, fails: 1, why: err.Error()}
	}
	ep.refs++
	return true, hopeless
}

// Again follows Failed. It schedules the next try if one is wanted.
func (t *Table) Again(ep *Endpoint) {
	ep.refs--
	if !ep.wanted() {
		t.Drop(ep)
		return
	}
	t.agenda.Arm(ep.retry, ep.again)
}
