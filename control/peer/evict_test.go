package peer

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
)

func numbered(i int) (b transfer.Boot) {
	binary.BigEndian.PutUint32(b[:], uint32(i+1))
	return b
}

// One member invents as many boots as the table has places. It gets its share of them, and another
// member is accepted at once.
func TestInventedBoots(t *testing.T) {
	c, err := keys.NewCluster()
	if err != nil {
		t.Fatal(err)
	}
	sec := secured(t, c)
	victim, evil, honest := start(t, func(o *Options) { sec(o); slow(o) }), start(t, sec),
		start(t, sec)
	const each = 64 // hellos of a call, which has five seconds
	for from := 0; from < maxPeers; from += each {
		err = evil.caller.Call(t.Context(), victim.Endpoint(), func(ctx context.Context,
			c peerv1.PeerClient) error {
			for i := from; i < min(from+each, maxPeers); i++ {
				if _, err := c.Hello(ctx, helloAs(evil.Mesh, numbered(i), fmt.Sprintf("127.0.0.1:%d",
					i+1), 1)); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if n, limit := victim.sessions.count(), maxOwned/unprovedPart; n > limit {
		t.Errorf("%d unproved sessions of one certificate, at most %d", n, limit)
	}
	began := time.Now()
	join(t, honest, victim)
	t.Logf("another member was accepted after %v", time.Since(began))
}

// No quota limits a member with many certificates: its oldest sessions are evicted.
func TestInventedCertificates(t *testing.T) {
	victim, honest := start(t, slow), start(t, nil)
	v := newService(victim.dialer)
	for i := range 2 * maxPeers {
		if _, err := v.Hello(t.Context(), helloAs(victim.Mesh, numbered(i), "127.0.0.1:1",
			1)); err != nil {
			t.Fatal(i, err)
		}
	}
	join(t, honest, victim)
	if n := victim.sessions.count(); n != maxPeers {
		t.Errorf("%d sessions, want %d", n, maxPeers)
	}
	if victim.sessions.get(numbered(0)) != nil || victim.sessions.get(numbered(2*maxPeers-1)) == nil {
		t.Error("another session than the oldest was evicted")
	}
}

// sink is a lane that discards all frames, and needs no ping for an hour.
type sink struct{ received time.Time }

func (sink) Write([]byte) bool { return true }
func (sink) Backlog() int      { return 0 }
func (l sink) Received() int64 { return l.received.UnixNano() }
func (sink) Local() netip.Addr { return netip.Addr{} }
func (sink) Address() string   { return "" }
func (sink) Err() error        { return nil }
func (sink) Fail(error)        {}
func (sink) String() string    { return "sink" }

// up gives a session a lane.
func (n *node) up(t *testing.T, boot transfer.Boot) *session {
	t.Helper()
	s := n.sessions.get(boot)
	if s == nil {
		t.Fatalf("no session with %s", boot)
	}
	s.mu.Lock()
	s.proved = true
	s.mu.Unlock()
	if err := s.channel.Add(&sink{time.Now().Add(time.Hour)}); err != nil {
		t.Fatal(err)
	}
	return s
}

func (n *node) down(s *session) { s.channel.Remove(s.channel.Lanes()[0]) }

// A thousand peers restart in ten minutes, each under a new address and boot, and none is refused.
// Sessions with leases stay.
func TestRollingRestart(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		n, v := unstarted(t)
		const peers = 1000
		hello := func(i int) *session {
			addr := fmt.Sprintf("10.0.%d.%d:7650", i>>8&0xff, i&0xff)
			if _, err := v.Hello(t.Context(), helloAs(n.Mesh, numbered(i), addr, 1)); err != nil {
				t.Fatalf("peer %d after %v: %v", i, time.Since(time.Unix(946684800, 0)), err)
			}
			return n.up(t, numbered(i))
		}
		all := make([]*session, peers)
		for i := range all {
			all[i] = hello(i)
		}
		leased := all[0]
		n.busy[leased.boot] = true
		for i := range all {
			n.down(all[i])
			time.Sleep(10 * time.Minute / peers)
			all[i] = hello(peers + i)
			if i%10 == 9 { // as the tick, which must end no session that once had a lane
				for _, s := range n.sessions.list() {
					s.mu.Lock()
					s.dialing = true // there is no process to dial
					s.mu.Unlock()
					n.dialer.check(s, time.Now())
				}
			}
		}
		for _, s := range all {
			if n.sessions.get(s.boot) != s {
				t.Errorf("the session with %s, which has a lane, is gone", s.boot)
			}
		}
		if n.sessions.get(leased.boot) != leased {
			t.Error("a session with leases was evicted")
		}
	})
}

// A session without a lane after its Hello ends soon.
func TestUnprovedExpire(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		n, v := unstarted(t)
		if _, err := v.Hello(t.Context(), helloAs(n.Mesh, numbered(1), "127.0.0.1:1",
			1)); err != nil {
			t.Fatal(err)
		}
		s := n.sessions.get(numbered(1))
		time.Sleep(openTimeout)
		if n.dialer.check(s, time.Now()); n.sessions.get(s.boot) == nil {
			t.Fatal("ended while a lane may still open")
		}
		time.Sleep(time.Millisecond)
		if n.dialer.check(s, time.Now()); n.sessions.get(s.boot) != nil {
			t.Error("a session that never proved itself stays")
		}
	})
}

// A Hello that arrives while this sidecar stops is answered as by one that has stopped. The log has
// no refusal, because the caller is not at fault.
func TestHelloWhileStopping(t *testing.T) {
	var log testutil.Log
	n, v := unstarted(t)
	v.refused.Logger = slog.New(slog.NewTextHandler(&log, nil))
	n.sessions.close(net.ErrClosed)
	_, err := v.Hello(t.Context(), helloAs(n.Mesh, numbered(1), "127.0.0.1:1", 1))
	if status.Code(err) != codes.Unavailable || strings.Contains(log.String(), "refused") {
		t.Errorf("%v, logged: %q; want Unavailable and no line", err, log.String())
	}
}

// unstarted is a mesh without listeners. Its clock may be that of a synctest.
func unstarted(t *testing.T) (*node, *service) {
	n := &node{t: t, got: map[transfer.Boot][]uint64{}, busy: map[transfer.Boot]bool{},
		wake: make(chan struct{})}
	m, err := New(Options{Boot: transfer.Boot{255}, Listen: "127.0.0.1:0", Handler: n})
	if err != nil {
		t.Fatal(err)
	}
	n.Mesh = m
	t.Cleanup(func() { _ = m.Close() })
	return n, newService(m.dialer)
}

// announce registers a boot with a certificate at an address. preconnect: no request needs it.
func (n *node) announce(boot transfer.Boot, id hello.Identity, from string, preconnect bool) error {
	c := caller{id: id, source: admit.SourceOf(netip.MustParseAddr(from)), preconnect: preconnect}
	_, err := n.sessions.register(c, hello.Description{Version: hello.Protocol.Max, Boot: boot,
		Node: "n", Endpoint: "127.0.0.1:1", Addresses: []string{"127.0.0.1:1"},
		Share: make([]byte, 32)})
	return err
}

// All nodes of a cluster may have one certificate: each has an address of its own, and none is
// refused. One address, or one IPv6 /64, gets its share, whatever boots it announces.
func TestSharedCertificate(t *testing.T) {
	shared := hello.Identity{7}
	for name, x := range map[string]struct {
		from  func(i int) string
		limit int
	}{
		"each at an address of its own": {func(i int) string {
			return fmt.Sprintf("10.0.%d.%d", i>>8, i&255)
		}, maxPeers},
		"one address": {func(int) string { return "10.0.0.1" }, maxOwned},
		"each in a /64 of its own": {
			func(i int) string { return fmt.Sprintf("2001:db8:0:%x::1", i) }, maxPeers},
		"one /64": {func(i int) string {
			return fmt.Sprintf("2001:db8::%x", i)
		}, maxOwnedNet},
	} {
		t.Run(name, func(t *testing.T) {
			n, _ := unstarted(t)
			in := 0
			for ; in < maxPeers; in++ {
				if err := n.announce(numbered(in), shared, x.from(in), false); err != nil {
					if !strings.Contains(err.Error(), "give each node a certificate of its own") {
						t.Error(err)
					}
					break
				}
				n.up(t, numbered(in))
			}
			if in != x.limit {
				t.Errorf("%d were accepted, want %d", in, x.limit)
			}
			if in < maxPeers {
				if err := n.announce(numbered(maxPeers), hello.Identity{8}, x.from(0), false); err != nil {
					t.Errorf("a peer with another certificate: %v", err)
				}
			}
		})
	}
}

// Gossip lists more members than there are places. Preconnections leave places for peers that
// requests need, at the called end too. If all places are taken, a peer that a request needs evicts
// a quiet session, and no other.
func TestMoreMembersThanPlaces(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		n, _ := unstarted(t)
		in := 0
		for i := range 2 * maxPeers {
			switch err := n.announce(numbered(i), hello.Identity{}, "10.0.0.1", true); {
			case err == nil:
				in++
				n.up(t, numbered(i))
			case !errors.Is(err, hello.ErrPreconnect):
				t.Fatal(err)
			}
		}
		if in != maxPreconnected {
			t.Errorf("%d members were preconnected, want %d", in, maxPreconnected)
		}
		need := func(i int) error {
			return n.announce(numbered(4*maxPeers+i), hello.Identity{}, "10.0.0.1", false)
		}
		for i := range maxPeers - maxPreconnected {
			if err := need(i); err != nil {
				t.Fatal(i, err)
			}
			n.up(t, numbered(4*maxPeers+i))
		}
		if err := need(maxPeers); err == nil || !strings.Contains(err.Error(),
			"have lanes or leases") {
			t.Errorf("all were active a moment ago: %v", err)
		}
		const quiet = 10
		busy, waits, active := numbered(0), numbered(1), numbered(2)
		if err := n.Send(waits, commit(1)); err != nil { // the sink never acknowledges it
			t.Fatal(err)
		}
		time.Sleep(2 * idleAfter)
		for _, s := range n.sessions.list() {
			n.busy[s.boot] = true
		}
		for i := 1; i < 3+quiet; i++ {
			delete(n.busy, numbered(i))
		}
		s := n.sessions.get(active)
		f := await(1)
		f.Seq = 1
		if err := s.channel.Receive(s.channel.Lanes()[0], f); err != nil {
			t.Fatal(err)
		}
		for i := range quiet {
			if err := need(2*maxPeers + i); err != nil {
				t.Fatal(i, err)
			}
			n.up(t, numbered(6*maxPeers+i))
		}
		for _, boot := range []transfer.Boot{busy, waits, active} {
			if n.sessions.get(boot) == nil {
				t.Errorf("the session with %s had something to do, and was evicted", boot)
			}
		}
		if err := need(5 * maxPeers); err == nil {
			t.Error("one more evicted a session that has something to do")
		}
	})
}

// If all places are taken by peers with lanes, the error names the bound.
func TestNoRoom(t *testing.T) {
	n, v := unstarted(t)
	for i := range maxPeers {
		if _, err := v.Hello(t.Context(), helloAs(n.Mesh, numbered(i), "127.0.0.1:1", 1)); err != nil {
			t.Fatal(err)
		}
		n.up(t, numbered(i))
	}
	_, err := v.Hello(t.Context(), helloAs(n.Mesh, numbered(maxPeers), "127.0.0.1:1", 1))
	if err == nil || !strings.Contains(err.Error(), fmt.Sprint(maxPeers, " peers have lanes")) {
		t.Errorf("one too many: %v", err)
	}
	c, over, err := n.sessions.candidates(numbered(maxPeers), caller{id: hello.Identity{1}})
	if !over || c.quota > 0 || err != nil {
		t.Errorf("over %t, quota %d, %v", over, c.quota, err)
	}
}

// An evicted session is not opened again without need, and is opened if a request needs it.
func TestEvictedStaysOut(t *testing.T) {
	victim, a := start(t, slow), start(t, nil)
	victim.sessions.idleAfter = 0
	for i := range maxPreconnected {
		if err := victim.announce(numbered(i), hello.Identity{}, "10.0.0.1", true); err != nil {
			t.Fatal(err)
		}
		victim.up(t, numbered(i))
	}
	for range 2 {
		if err := a.reach(victim.Endpoint(), victim.opt.Boot); err != nil {
			t.Fatal(err)
		}
		s := victim.sessionOf(a)
		poll(t, "no frame is in flight", func() bool { return s.quiet(0) })
		a.mu.Lock()
		downs := len(a.downs)
		a.mu.Unlock()
		victim.sessions.endQuiet(s, errEvictedQuiet)
		a.until("it is over at the other end, too",
			func() bool { return slices.ContainsFunc(a.downs[downs:], proved) })
		// The handler is called before the session is removed.
		poll(t, "no session is left, since no request needs one", func() bool {
			return victim.sessionOf(a) == nil && a.sessionOf(victim) == nil
		})
	}
}
