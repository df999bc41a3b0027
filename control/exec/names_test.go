package exec

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/endpoint"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// An address leads to several processes (a service, or a name with two addresses), and another one
// answers now. The first one is still up: its lanes stay, its transfers continue, and its grants
// are served.
func TestTwoPeersAtOneAddress(t *testing.T) {
	for name, shared := range map[string]bool{"an address of its own": false, "a shared one": true} {
		t.Run(name, func(t *testing.T) {
			s, p, d, pw, dw := pair(t, 11, 0)
			q := s.node("q:1", Config{Transports: []string{"shm", "tcp"}})
			q.worker()
			src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
			p.steps(src)
			dst := d.expect(dw, 1, testKey(1, 1), "p:1", 64, 0, 30*sec)
			s.until("a first transfer", 2*sec, func() bool { return src.done != nil && dst.done != nil })
			wantStatus(t, dst, engines.StatusOK)
			late := p.intent(pw, 2, testKey(1, 2), 64, 1, 30*sec)
			open := d.expect(dw, 2, testKey(1, 2), "p:1", 64, 0, 30*sec)
			s.rest(50 * time.Millisecond)
			before := d.ex.Lanes(p.boot)
			if shared {
				d.event(func() { d.ex.PeerUp(s.now, "p:1", q.boot) })
			}
			if got := d.ex.Lanes(p.boot); got != before || got == 0 {
				t.Errorf("%d open lanes to the first peer: the executor has %d", before, got)
			}
			p.steps(late)
			back := d.intent(dw, 7, testKey(2, 2), 64, 1, 30*sec)
			d.steps(back)
			asked := p.expect(pw, 7, testKey(2, 2), "d:1", 64, 0, 30*sec)
			s.until("what was open, and what the first asks", 2*sec, func() bool {
				return open.done != nil &&
					asked.done != nil
			})
			wantStatus(t, open, engines.StatusOK)
			wantStatus(t, asked, engines.StatusOK)
			if open.done.Grants > 1 {
				t.Errorf("granted %d times", open.done.Grants)
			}
		})
	}
}

// Another process answers at the address of a peer that cannot be reached. The grants of the
// unreachable peer move to the other one as soon as both facts are known, in either order. This
// does not declare the first peer dead; it receives the revokes when it returns.
func TestSuccessorAtAnAddress(t *testing.T) {
	for name, downFirst := range map[string]bool{"down, then another": true,
		"another, then down": false} {
		t.Run(name, func(t *testing.T) {
			s, p, d, pw, dw := pair(t, 11, 0)
			q := s.node("q:1", Config{Transports: []string{"shm", "tcp"}})
			s.join(q, d)
			k := testKey(1, 1)
			lost := p.intent(pw, 1, k, 64, 1, 30*sec)
			dst := d.expect(dw, 1, k, "p:1", 64, 0, 30*sec)
			s.rest(50 * time.Millisecond)
			if x := d.ex.dests.Find(dst.id); x == nil || x.State == lease.DestWaiting || x.Peer != p.boot {
				t.Fatal("not granted")
			}
			src := q.intent(q.worker(), 1, k, 64, 1, 30*sec)
			q.steps(src)
			down := func() { d.peerDown(p.boot, false) }
			up := func() { d.event(func() { d.ex.PeerUp(s.now, "p:1", q.boot) }) }
			if downFirst {
				down()
				up()
			} else {
				up()
				down()
			}
			s.until("the transfer from the other", sec, func() bool {
				return dst.done != nil &&
					lost.done != nil
			})
			wantStatus(t, dst, engines.StatusOK)
			wantStatus(t, lost, engines.StatusCancelled)
			if d.ex.peers.Find(p.boot) == nil {
				t.Error("the first peer is forgotten, and no event ended it")
			}
		})
	}
}

// Requests name one live sidecar in ever new ways. The remembered names are bounded, during the
// requests and hours later, and a name that is always in use is connected once.
func TestNamesOfOnePeerAreBounded(t *testing.T) {
	e := New(Config{Boot: transfer.Boot{1}, Endpoint: "d:1", Planner: simPlanner{}})
	peer := transfer.Boot{2}
	now := Instant(0)
	var b Batch
	connects := map[string]int{}
	id := uint64(0)
	ask := func(addr string) {
		id++
		e.Await(now, id, engines.Await{Key: testKey(3, 2), Peer: addr, TTL: 10 * time.Millisecond})
		for e.Drain(&b) {
			for _, a := range append([]Action(nil), b.Actions...) {
				if a.Kind == Connect {
					connects[a.Endpoint]++
					e.PeerUp(now, a.Endpoint, peer) // it answers there, as it does at all the others
				}
			}
		}
	}
	peak := 0
	for i := range 3 * endpoint.MaxEndpoints {
		ask(fmt.Sprintf("P%d:1", i))
		ask("p:1")
		now += 10 * time.Second // every question is answered, or over
		e.Tick(now)
		peak = max(peak, e.endpoints.Len())
	}
	if e.queries.Len() != 0 {
		t.Fatalf("%d questions are open", e.queries.Len())
	}
	if limit := endpoint.MaxIdle + 3; peak > limit { // those that are asked at, and ours
		t.Errorf("%d endpoints were known at a time: at most %d", peak, limit)
	}
	if connects["p:1"] != 1 {
		t.Errorf("the name that is used all the time was reached %d times", connects["p:1"])
	}
	before := e.endpoints.Len()
	for i := range 2 * endpoint.MaxIdle {
		e.PeerUp(now, fmt.Sprintf("D%d:1", i), transfer.Boot{1}) // so are ours
	}
	if more := e.endpoints.Len() - before; more > endpoint.MaxIdle {
		t.Errorf("%d more names of ourselves are known: at most %d", more, endpoint.MaxIdle)
	}
	if e.endpoints.Find("d:1") == nil {
		t.Error("our own address is forgotten")
	}
	names := len(e.endpoints.Of(e.peers.Find(peer)))
	if names != before-1 {
		t.Errorf("%d names, %d endpoints", names, before)
	}
	ours := e.endpoints.Len() - names
	e.PeerDown(now, peer, true)
	if e.endpoints.Len() != ours {
		t.Errorf("%d endpoints are left of a peer that is gone", e.endpoints.Len()-ours)
	}
}

// Queries for many names of one peer at a time: each is sent once the name is reached, and costs
// the same as among few.
func TestOpenNamesOfOnePeer(t *testing.T) {
	e := New(Config{Boot: transfer.Boot{1}, Endpoint: "d:1", Planner: simPlanner{}})
	peer := transfer.Boot{2}
	var b Batch
	asked := 0
	const names = DefaultMaxPending
	for i := range names {
		addr := fmt.Sprintf("P%d:1", i)
		e.Await(0, uint64(i+1), engines.Await{Key: testKey(3, 2), Peer: addr, TTL: sec})
		e.PeerUp(0, addr, peer)
	}
	for e.Drain(&b) {
		for _, a := range b.Actions {
			if a.Kind == Send && a.Frame.GetAwait() != nil {
				asked++
			}
		}
	}
	if asked != names {
		t.Errorf("asked %d times at %d names", asked, names)
	}
	for e.Next() <= 10*sec { // a tick does a part of what is due
		e.Tick(10 * sec)
	}
	if n := e.endpoints.Len(); e.queries.Len() != 0 || n > endpoint.MaxIdle+1 {
		t.Errorf("%d questions are open, %d endpoints known", e.queries.Len(), n)
	}
}
