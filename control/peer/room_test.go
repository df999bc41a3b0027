// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/transfer"
)

func numbered(i int) (b transfer.Boot) {
	binary.BigEndian.PutUint32(b[:], uint32(i+1))
	return b
}

// One member invents as many boots as the table has places: it has its share of them, and a
// newcomer is let in at once.
func TestInventedBoots(t *testing.T) {
	c, err := keys.NewCluster()
	if err != nil {
		t.Fatal(err)
	}
	sec := secured(t, c)
	victim, evil, honest := start(t, func(o *Options) { sec(o); slow(o) }), start(t, sec),
		start(t, sec)
	err = evil.call(t.Context(), victim.Endpoint(), func(ctx context.Context,
		c peerv1.PeerClient) error {
		for i := range MaxPeers {
			if _, err := c.Hello(ctx, helloAs(evil.Mesh, numbered(i), fmt.Sprintf("127.0.0.1:%d", i+1),
				1)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	victim.Mesh.mu.Lock()
	known := len(victim.sessions)
	victim.Mesh.mu.Unlock()
	if most := maxOwned / unprovedPart; known > most {
		t.Errorf("%d sessions of one certificate that proved nothing, at most %d", known, most)
	}
	began := time.Now()
	join(t, honest, victim)
	t.Logf("an honest newcomer was in after %v", time.Since(began))
}

// Of one that shows so many certificates that no quota holds it, the oldest sessions make room.
func TestInventedCertificates(t *testing.T) {
	victim, honest := start(t, slow), start(t, nil)
	v := &service{m: victim.Mesh}
	for i := range 2 * MaxPeers {
		if _, err := v.Hello(t.Context(), helloAs(victim.Mesh, numbered(i), "127.0.0.1:1",
			1)); err != nil {
			t.Fatal(i, err)
		}
	}
	join(t, honest, victim)
	victim.Mesh.mu.Lock()
	defer victim.Mesh.mu.Unlock()
	if n := len(victim.sessions); n != MaxPeers {
		t.Errorf("%d sessions, want %d", n, MaxPeers)
	}
	if victim.sessions[numbered(0)] != nil || victim.sessions[numbered(2*MaxPeers-1)] == nil {
		t.Error("another one than the oldest made room")
	}
}

// up gives a session a lane that goes nowhere.
func (n *node) up(t *testing.T, boot transfer.Boot) *session {
	s := n.session(boot)
	if s == nil {
		t.Fatalf("no session with %s", boot)
	}
	a, b := net.Pipe()
	t.Cleanup(func() { _, _ = a.Close(), b.Close() })
	s.mu.Lock()
	defer s.mu.Unlock()
	l := &lane{conn: a}
	l.heard.Store(time.Now().Add(time.Hour).UnixNano())
	s.met, s.lanes = true, []*lane{l}
	return s
}

func (n *node) down(s *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropLaneLocked(s.lanes[0])
}

// A thousand peers restart in ten minutes, each under a new address and boot, and no one is
// refused. Sessions with leases stay.
func TestRollingRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{t: t, got: map[transfer.Boot][]uint64{}, busy: map[transfer.Boot]bool{},
			wake: make(chan struct{})}
		m, err := New(Options{Boot: transfer.Boot{255}, Listen: "127.0.0.1:0", Handler: n})
		if err != nil {
			t.Fatal(err)
		}
		n.Mesh = m
		m.ctx = t.Context()
		v := &service{m: m}
		const peers = 1000
		meet := func(i int) *session {
			addr := fmt.Sprintf("10.0.%d.%d:7650", i>>8&0xff, i&0xff)
			if _, err := v.Hello(t.Context(), helloAs(m, numbered(i), addr, 1)); err != nil {
				t.Fatalf("peer %d after %v: %v", i, time.Since(time.Unix(946684800, 0)), err)
			}
			return n.up(t, numbered(i))
		}
		all := make([]*session, peers)
		for i := range all {
			all[i] = meet(i)
		}
		leased := all[0]
		n.busy[leased.boot] = true
		for i := range all {
			n.down(all[i])
			time.Sleep(10 * time.Minute / peers)
			all[i] = meet(peers + i)
			if i%10 == 9 { // the tick that this takes the place of ends no session that met a lane
				m.mu.Lock()
				var each []*session
				for _, s := range m.sessions {
					each = append(each, s)
				}
				m.mu.Unlock()
				for _, s := range each {
					s.mu.Lock()
					s.dialing = true // nobody is there to dial
					s.mu.Unlock()
					m.look(s, time.Now())
				}
			}
		}
		for _, s := range all {
			if m.session(s.boot) != s {
				t.Errorf("the session with %s, which has a lane, is gone", s.boot)
			}
		}
		if m.session(leased.boot) != leased {
			t.Error("a session with leases made room")
		}
	})
}

// A session whose hello no lane follows is forgotten soon.
func TestUnprovedExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{t: t, busy: map[transfer.Boot]bool{}, wake: make(chan struct{})}
		m, err := New(Options{Boot: transfer.Boot{255}, Listen: "127.0.0.1:0", Handler: n})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := (&service{m: m}).Hello(t.Context(), helloAs(m, numbered(1), "127.0.0.1:1",
			1)); err != nil {
			t.Fatal(err)
		}
		s := m.session(numbered(1))
		time.Sleep(openTimeout)
		if m.look(s, time.Now()); m.session(s.boot) == nil {
			t.Fatal("forgotten while a lane may still come")
		}
		time.Sleep(time.Millisecond)
		if m.look(s, time.Now()); m.session(s.boot) != nil {
			t.Error("a session that never proved itself stays")
		}
	})
}

// unstarted is a mesh that nobody reaches; the clock of a synctest may be its own.
func unstarted(t *testing.T) (*node, *service) {
	n := &node{t: t, busy: map[transfer.Boot]bool{}, wake: make(chan struct{})}
	m, err := New(Options{Boot: transfer.Boot{255}, Listen: "127.0.0.1:0", Handler: n})
	if err != nil {
		t.Fatal(err)
	}
	n.Mesh, m.ctx = m, t.Context()
	return n, &service{m: m}
}

// known meets a boot that a request needs, or none does, as one with a certificate at an address.
func (n *node) known(boot transfer.Boot, id identity, from string, acquaint bool) error {
	w := who{id: id, from: admit.SourceOf(netip.MustParseAddr(from)), acquaint: acquaint}
	_, err := n.meet(w, hello{version: Protocol.Max, boot: boot, node: "n",
		endpoint: "127.0.0.1:1", addrs: []string{"127.0.0.1:1"}, share: make([]byte, 32)})
	return err
}

// All nodes of a cluster may show one certificate: each has an address of its own, and none is
// refused. One address, or one IPv6 /64, has its share, whatever it calls itself.
func TestSharedCertificate(t *testing.T) {
	shared := identity{7}
	for name, x := range map[string]struct {
		from func(i int) string
		most int
	}{
		"each at an address of its own": {func(i int) string {
			return fmt.Sprintf("10.0.%d.%d",
				i>>8, i&255)
		}, MaxPeers},
		"one address": {func(int) string { return "10.0.0.1" }, maxOwned},
		"each in a /64 of its own": {
			func(i int) string { return fmt.Sprintf("2001:db8:0:%x::1", i) }, MaxPeers},
		"one /64": {func(i int) string {
			return fmt.Sprintf("2001:db8::%x",
				i)
		}, maxOwnedNet},
	} {
		t.Run(name, func(t *testing.T) {
			n, _ := unstarted(t)
			in := 0
			for ; in < MaxPeers; in++ {
				if err := n.known(numbered(in), shared, x.from(in), false); err != nil {
					if !strings.Contains(err.Error(), "give each node a certificate of its own") {
						t.Error(err)
					}
					break
				}
				n.up(t, numbered(in))
			}
			if in != x.most {
				t.Errorf("%d were let in, want %d", in, x.most)
			}
			if in < MaxPeers {
				if err := n.known(numbered(MaxPeers), identity{8}, x.from(0), false); err != nil {
					t.Errorf("a newcomer with another certificate: %v", err)
				}
			}
		})
	}
}

// Gossip names more members than there are places: those that no request needs leave places for
// those that one does, at the end that is called too. With all places taken, one that a request
// needs takes the place of one that has been quiet, and of no other.
func TestMoreMembersThanPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, _ := unstarted(t)
		in := 0
		for i := range 2 * MaxPeers {
			switch err := n.known(numbered(i), identity{}, "10.0.0.1", true); {
			case err == nil:
				in++
				n.up(t, numbered(i))
			case !errors.Is(err, ErrAcquainted):
				t.Fatal(err)
			}
		}
		if in != meetMost {
			t.Errorf("%d members were met, want %d", in, meetMost)
		}
		need := func(i int) error {
			return n.known(numbered(4*MaxPeers+i), identity{}, "10.0.0.1",
				false)
		}
		for i := range MaxPeers - meetMost {
			if err := need(i); err != nil {
				t.Fatal(i, err)
			}
			n.up(t, numbered(4*MaxPeers+i))
		}
		if err := need(MaxPeers); err == nil || !strings.Contains(err.Error(),
			"have lanes or leases") {
			t.Errorf("all have just done something: %v", err)
		}
		time.Sleep(2 * idleForget)
		const quiet = 10
		busy, waits, moved := numbered(0), numbered(1), numbered(2)
		for boot := range n.sessions {
			n.busy[boot] = true
		}
		for i := 1; i < 3+quiet; i++ {
			delete(n.busy, numbered(i))
		}
		for boot, f := range map[transfer.Boot]func(*session){
			waits: func(s *session) { s.unacked = make([]outgoing, 1) },
			moved: func(s *session) { s.business = time.Now() }} {
			s := n.session(boot)
			s.mu.Lock()
			f(s)
			s.mu.Unlock()
		}
		for i := range quiet {
			if err := need(2*MaxPeers + i); err != nil {
				t.Fatal(i, err)
			}
			n.up(t, numbered(6*MaxPeers+i))
		}
		for _, boot := range []transfer.Boot{busy, waits, moved} {
			if n.session(boot) == nil {
				t.Errorf("the session with %s had something to do, and made room", boot)
			}
		}
		if err := need(5 * MaxPeers); err == nil {
			t.Error("one more took the place of one that has something to do")
		}
	})
}

// Where every place is taken by a peer with lanes, the error names the bound.
func TestNoRoom(t *testing.T) {
	n := &node{t: t, busy: map[transfer.Boot]bool{}, wake: make(chan struct{})}
	m, err := New(Options{Boot: transfer.Boot{255}, Listen: "127.0.0.1:0", Handler: n})
	if err != nil {
		t.Fatal(err)
	}
	n.Mesh = m
	v := &service{m: m}
	for i := range MaxPeers {
		if _, err := v.Hello(t.Context(), helloAs(m, numbered(i), "127.0.0.1:1", 1)); err != nil {
			t.Fatal(err)
		}
		n.up(t, numbered(i))
	}
	_, err = v.Hello(t.Context(), helloAs(m, numbered(MaxPeers), "127.0.0.1:1", 1))
	if err == nil || !strings.Contains(err.Error(), fmt.Sprint(MaxPeers, " peers have lanes")) {
		t.Errorf("one too many: %v", err)
	}
	c, over, err := m.tenants(numbered(MaxPeers), who{id: identity{1}})
	if !over || c.own > 0 || err != nil {
		t.Errorf("over %t, own %d, %v", over, c.own, err)
	}
}

// A session that made room for another is not opened again for nothing, and is where a request
// needs it.
func TestMadeRoomStaysOut(t *testing.T) {
	victim, a := start(t, slow), start(t, nil)
	for i := range meetMost {
		if err := victim.known(numbered(i), identity{}, "10.0.0.1", true); err != nil {
			t.Fatal(err)
		}
		victim.up(t, numbered(i))
	}
	for range 2 {
		if err := a.reach(victim.Endpoint(), victim.opt.Boot); err != nil {
			t.Fatal(err)
		}
		s := victim.session(a.opt.Boot)
		poll(t, "nothing is under way", func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.business = time.Now().Add(-2 * idleForget)
			return s.quietLocked()
		})
		a.mu.Lock()
		downs := len(a.downs)
		a.mu.Unlock()
		victim.endQuiet(s, errQuiet)
		a.until("it is over at the other end, too",
			func() bool { return slices.ContainsFunc(a.downs[downs:], proved) })
		// The handler is called before the session is dropped.
		poll(t, "no session is left, since no request needs one", func() bool {
			return victim.session(a.opt.Boot) == nil && a.session(victim.opt.Boot) == nil
		})
	}
}
