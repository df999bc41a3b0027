package exec

import (
	"strings"
	"testing"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// rest advances virtual time.
func (s *sim) rest(d time.Duration) { s.run(s.now+d, func() bool { return false }) }

// again is the receiver's lease as its engine presents it to another sidecar: with the same id and
// another epoch.
func (n *simNode) again(w *engines.Worker, l *simLease, k transfer.Key, peer string,
	deadline time.Duration) *simLease {
	id := l.id
	id.Epoch++
	m := &simLease{id: id, w: w, receive: true, opened: n.s.now, deadline: deadline, key: l.key,
		tokens: l.tokens}
	n.leases[id] = m
	n.event(func() {
		n.ex.Expect(n.s.now, w, engines.Expect{Lease: id, Key: k, Peer: peer, Tokens: l.tokens,
			Skip: []uint32{0}, Deadline: deadline, MatchTimeout: deadline / 2})
	})
	return m
}

// The receiver's sidecar dies during a transfer. The source keeps the blocks. When the engine
// presents its lease to the next sidecar, the transfer completes, whether or not the death of the
// first sidecar is proved by then.
func TestDestinationSidecarDies(t *testing.T) {
	for name, order := range map[string]struct{ down, grant, over time.Duration }{
		"down, proof, grant": {100 * time.Millisecond, 3 * sec, 200 * time.Millisecond},
		"down, grant, proof": {100 * time.Millisecond, 300 * time.Millisecond, 2 * sec},
		"grant, down, proof": {sec, 100 * time.Millisecond, 2 * sec},
		"grant, proof":       {0, 100 * time.Millisecond, sec},
		"never a proof":      {sec, 100 * time.Millisecond, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s, p, d, pw, dw := pair(t, 12, 0)
			k := testKey(1, 1)
			src := p.intent(pw, 1, k, 512, 1, 60*sec)
			dst := d.expect(dw, 1, k, "p:1", 512, 0, 30*sec)
			s.rest(50 * time.Millisecond)
			p.step(src, 0, 512)
			s.rest(50 * time.Millisecond)
			if dst.done != nil || dst.chunksIn() == 0 {
				t.Fatal("not in mid transfer")
			}
			d.dead = true
			delete(s.byAddr, "d:1")
			if order.down > 0 {
				s.after(order.down, func() { p.peerDown(d.boot, false) })
			}
			if order.over > 0 {
				s.after(order.over, func() { p.peerDown(d.boot, true) })
			}
			var next *simLease
			var d2 *simNode
			s.after(order.grant, func() {
				d2 = s.node("d:1", Config{Transports: []string{"shm", "tcp"}})
				w := d2.worker()
				w.Boot = dw.Boot
				next = d2.again(w, dst, k, "p:1", 20*sec)
			})
			s.rest(4 * sec)
			if src.done != nil || next.done != nil {
				t.Fatalf("ended before the rest was computed: %+v, %+v", src.done, next.done)
			}
			p.steps(src)
			s.until("transfer", sec, func() bool { return src.done != nil && next.done != nil })
			wantStatus(t, src, engines.StatusOK)
			wantStatus(t, next, engines.StatusOK)
			if src.done.Grants != 1 || p.ex.match.Counts().Grants+p.ex.match.Counts().Absent != 0 {
				t.Errorf("served %d; %d grants and %d absent ones are left", src.done.Grants,
					p.ex.match.Counts().Grants, p.ex.match.Counts().Absent)
			}
		})
	}
}

// No sidecar presents the lease again: the source ends after the match timeout, long before its
// deadline. A sidecar that only seemed dead receives a message about it.
func TestDestinationSidecarStaysAway(t *testing.T) {
	for _, over := range []bool{false, true} {
		s, p, d, pw, dw := pair(t, 12, 0)
		src := p.intent(pw, 1, testKey(1, 1), 512, 1, 60*sec)
		dst := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 60*sec)
		s.rest(50 * time.Millisecond)
		p.peerDown(d.boot, over)
		s.rest(core.DefaultMatchTimeout - 100*time.Millisecond)
		if src.done != nil {
			t.Fatalf("over %v: gave up early: %s", over, src.done.Reason)
		}
		s.until("the source's end", 200*time.Millisecond, func() bool { return src.done != nil })
		if wantStatus(t, src, engines.StatusFailed); !strings.Contains(src.done.Reason,
			"presented the lease again") {
			t.Errorf("over %v: reason %q", over, src.done.Reason)
		}
		if !over {
			s.until("the receiver's end", sec, func() bool { return dst.done != nil })
			wantStatus(t, dst, engines.StatusFailed)
		}
	}
}

// The sidecar was only out of reach and returns: nothing is lost.
func TestDestinationSidecarComesBack(t *testing.T) {
	s, p, d, pw, dw := pair(t, 12, 0)
	src := p.intent(pw, 1, testKey(1, 1), 512, 1, 60*sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 60*sec)
	s.rest(50 * time.Millisecond)
	p.peerDown(d.boot, false)
	s.rest(9 * sec)
	p.event(func() { p.ex.PeerUp(s.now, "", d.boot) })
	s.rest(9 * sec)
	p.steps(src)
	s.until("transfer", sec, func() bool { return src.done != nil && dst.done != nil })
	wantStatus(t, src, engines.StatusOK)
	wantStatus(t, dst, engines.StatusOK)
}

// Only the same lease of the same prompt takes the place of a grant whose sidecar is absent. Other
// grants wait for a place of their own.
func TestPlacesOfAbsentGrantsAreKept(t *testing.T) {
	tg := newTarget()
	send := func(from transfer.Boot, g *peerv1.Grant) (gives int, replies []*peerv1.GrantReply) {
		t.Helper()
		if err := tg.ex.Message(3, from, grantFrame(g)); err != nil {
			t.Fatal(err)
		}
		return tg.drain()
	}
	if gives, _ := send(tg.peer, goodGrant()); gives == 0 {
		t.Fatal("the first grant is not served")
	}
	// While the sidecar is reachable, no other sidecar may speak for the lease.
	other := transfer.Boot{14}
	tg.ex.PeerUp(2, "", other)
	if gives, replies := send(other, goodGrant()); gives != 0 || len(replies) != 0 {
		t.Errorf("another sidecar speaks for a lease whose own is there: %d actions, %v", gives, replies)
	}
	tg.ex.PeerDown(4, other, true)
	tg.ex.PeerDown(4, tg.peer, true)
	tg.drain()
	next := transfer.Boot{15}
	tg.ex.PeerUp(5, "", next)
	for what, change := range map[string]func(*peerv1.Grant){
		"another lease":  func(g *peerv1.Grant) { g.Destination.Id++; g.Team[0] = 7 },
		"another engine": func(g *peerv1.Grant) { g.Destination.Boot[3]++; g.Team[0] = 8 },
		"another prompt": func(g *peerv1.Grant) { g.Hash[0]++; g.Team[0] = 9 },
	} {
		g := goodGrant()
		g.Destination.Epoch, g.Gen = 5, 1
		change(g)
		if gives, replies := send(next, g); gives != 0 || len(replies) != 0 {
			t.Errorf("%s has the place: %d actions, %v", what, gives, replies)
		}
	}
	g := goodGrant()
	g.Destination.Epoch, g.Gen = 6, 1
	if gives, replies := send(next, g); gives == 0 || len(replies) != 1 ||
		replies[0].Code != peerv1.GrantReply_BOUND {
		t.Errorf("the lease itself, presented again: %d actions, %v", gives, replies)
	}
}

// An engine's worker begins a new session with the same sidecar. The shim ends its destination
// leases and presents none of them again, so a Revoke ends them at the source, which keeps no
// blocks for them.
func TestSessionTakenOver(t *testing.T) {
	for name, granted := range map[string]bool{"granted": true, "not yet": false} {
		t.Run(name, func(t *testing.T) {
			s, p, d, pw, dw := pair(t, 13, 0)
			k := testKey(1, 1)
			src := p.intent(pw, 1, k, 512, 1, 30*sec)
			if granted {
				d.expect(dw, 1, k, "p:1", 512, 0, 30*sec)
				s.rest(50 * time.Millisecond)
				p.step(src, 0, 512)
				s.rest(10 * time.Millisecond)
			} else {
				d.ex.PeerUp(s.now, "p:1", p.boot)
				d.ex.PeerDown(s.now, p.boot, false)
				d.expect(dw, 1, k, "p:1", 512, 0, 30*sec)
				d.event(func() { d.ex.PeerUp(s.now, "p:1", p.boot) })
			}
			d.event(func() { d.ex.WorkerGone(s.now, dw, false, "superseded") })
			s.until("the fence", sec, func() bool { return d.fenced[dw] })
			s.until("the source's end", sec, func() bool { return src.done != nil })
			if wantStatus(t, src, engines.StatusCancelled); !strings.Contains(src.done.Reason,
				"the receiver gave up: ") ||
				p.ex.match.Counts().Grants+p.ex.match.Counts().Absent != 0 {
				t.Errorf("%q; %d grants and %d absent ones are left", src.done.Reason,
					p.ex.match.Counts().Grants,
					p.ex.match.Counts().Absent)
			}
		})
	}
}

// If no process listens any more at the address of a source's sidecar, its receivers wait two
// seconds, those with a grant and new ones alike. If the sidecar is silent, they wait for the match
// timeout.
func TestSourceSidecarNeverReturns(t *testing.T) {
	s, p, d, _, dw := pair(t, 12, 0)
	first := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 30*sec)
	s.rest(50 * time.Millisecond)
	if x := d.ex.dests.Find(first.id); x == nil || x.State != lease.DestGranted {
		t.Fatal("not granted")
	}
	p.dead = true
	delete(s.byAddr, "p:1")
	d.peerDown(p.boot, false)
	s.rest(sec)
	// Many leases wait for the same connect; one failure does not count once for each lease.
	late := make([]*simLease, 50)
	for i := range late {
		late[i] = d.expect(dw, uint64(10+i), testKey(2, byte(i)), "p:1", 512, 0, 30*sec)
	}
	if first.done != nil || late[0].done != nil {
		t.Fatal("gave up at once: a sidecar that starts anew takes a second")
	}
	s.until("their end", 2*sec, func() bool {
		for _, l := range late {
			if l.done == nil {
				return false
			}
		}
		return first.done != nil
	})
	for _, l := range append(late, first) {
		if wantStatus(t, l, engines.StatusExpired); !strings.Contains(l.done.Reason, "refused") {
			t.Errorf("reason %q", l.done.Reason)
		}
	}
}

// No lease waits for an address that the configuration forbids.
func TestForbiddenAddress(t *testing.T) {
	s, _, d, _, dw := pair(t, 4, 0)
	s.never = "q:1"
	l := d.expect(dw, 1, testKey(3, 1), "q:1", 64, 0, 20*sec)
	s.rest(100 * time.Millisecond)
	if wantStatus(t, l, engines.StatusExpired); !strings.Contains(l.done.Reason,
		ErrNotPossible.Error()) {
		t.Errorf("reason %q", l.done.Reason)
	}
}

// An address without a listener is tried ten times in two seconds, however many requests name it.
func TestManyWaitForOneTry(t *testing.T) {
	s, _, d, _, dw := pair(t, 4, 0)
	for i := range 40 {
		s.after(time.Duration(i)*20*time.Millisecond, func() {
			d.expect(dw, uint64(1+i), testKey(3, byte(i)), "q:1", 64, 0, 20*sec)
		})
	}
	s.rest(1500 * time.Millisecond)
	for _, l := range d.leases {
		if l.done != nil {
			t.Fatalf("after %v a request gave up: %s", l.done.Took, l.done.Reason)
		}
	}
	s.rest(sec)
	for _, l := range d.leases {
		wantStatus(t, l, engines.StatusExpired)
	}
}
