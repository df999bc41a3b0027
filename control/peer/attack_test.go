package peer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

func helloAs(m *Mesh, boot transfer.Boot, endpoint string, share byte) *peerv1.HelloRequest {
	q := &peerv1.HelloRequest{Versions: &peerv1.VersionRange{Min: uint32(hello.Protocol.Min),
		Max: uint32(hello.Protocol.Max)}, Boot: boot[:], Endpoint: endpoint,
		ControlAddresses: []string{endpoint}}
	if share != 0 {
		q.KeyShare = make([]byte, 32)
		q.KeyShare[0] = share
	}
	return q
}

// A member with a certificate of its own sends Hello under the boot of another.
func TestImpostor(t *testing.T) {
	c, err := keys.NewCluster()
	if err != nil {
		t.Fatal(err)
	}
	sec := secured(t, c)
	a, b, evil := start(t, sec), start(t, sec), start(t, sec)

	// Before the owner of the boot: the answer to the impostor is useless for lanes in the owner's
	// name.
	var early []byte
	ask := func(q *peerv1.HelloRequest) (r *peerv1.HelloReply, err error) {
		err = evil.caller.Call(t.Context(), a.Endpoint(), func(ctx context.Context,
			c peerv1.PeerClient) error {
			r, err = c.Hello(ctx, q)
			return err
		})
		return r, err
	}
	r, err := ask(helloAs(evil.Mesh, b.opt.Boot, evil.Endpoint(), 1))
	if err != nil {
		t.Fatal(err)
	}
	early = r.KeyShare
	join(t, a, b)
	s := a.sessionOf(b)
	s.mu.Lock()
	key, id := s.info.Key, s.id
	s.mu.Unlock()
	_, same := s.Key(id)
	if _, other := s.Key(hello.Identity{1}); !same || other {
		t.Errorf("lanes of the owner's certificate are accepted: %v, of another one: %v", same, other)
	}
	if share := a.secret.Share(b.opt.Boot, id); slices.Equal(early, share[:]) {
		t.Error("the impostor has the share of the key with the owner of the boot")
	}

	// Afterwards it is refused and gets no share, and the session is unchanged.
	if r, err = ask(helloAs(evil.Mesh, b.opt.Boot, evil.Endpoint(), 1)); err == nil ||
		!strings.Contains(err.Error(), "its key differs") {
		t.Errorf("hello under another's boot: %v %v", r, err)
	}
	if r, err = ask(helloAs(evil.Mesh, b.opt.Boot, evil.Endpoint(), 0)); err != nil ||
		len(r.KeyShare) != 0 {
		t.Errorf("a question for the boot was answered with %v %v", r, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.info.Key != key || s.info.Endpoint != b.Endpoint() {
		t.Errorf("the impostor changed the session: %+v", s.info)
	}
}

// Without certificates, the key that lanes have proved reveals an impostor.
func TestImpostorOnLoopback(t *testing.T) {
	a, b := start(t, nil), start(t, nil)
	join(t, a, b)
	cutAll(a.sessionOf(b), net.ErrClosed) // no lane of the owner is in the way
	if _, err := newService(a.dialer).Hello(t.Context(), helloAs(a.Mesh, b.opt.Boot, "127.0.0.1:1",
		9)); err == nil || !strings.Contains(err.Error(), "its key differs") {
		t.Errorf("hello under another's boot: %v", err)
	}
}

// The endpoint that a caller claims is not trusted: it would end the sessions of the process that
// is really there.
func TestClaimedEndpoint(t *testing.T) {
	a, b := start(t, nil), start(t, nil)
	liar := start(t, func(o *Options) { o.Advertise = b.Endpoint() })
	join(t, a, b)
	join(t, liar, a)
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range a.ups {
		if p.Boot == liar.opt.Boot && p.Endpoint != "" {
			t.Errorf("the liar counts as reached at %s", p.Endpoint)
		}
	}
	if slices.ContainsFunc(a.downs, proved) {
		t.Errorf("downs %v", a.downs)
	}
}

// A peer that dialed this node restarts: the answer at its endpoint ends the old session at once.
func TestCallerRestarts(t *testing.T) {
	a, b := start(t, slow), start(t, func(o *Options) { slow(o); restarts(o) }) // no tick helps
	join(t, b, a)
	at, old := b.Endpoint(), b.opt.Boot
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	s := a.sessions.get(old)
	poll(t, "lanes gone", func() bool { return s.channel.State().Lanes == 0 })
	c := start(t, func(o *Options) { slow(o); o.Listen = at })
	c.Connect(a.Endpoint())
	a.until("the old one is down for good", func() bool {
		return slices.Contains(a.downs, fmt.Sprint(old, true))
	})
}

// Each endpoint that Connect gets has its answer, also if the session is up already or comes up
// meanwhile.
func TestConnectByOtherNames(t *testing.T) {
	a, b := start(t, slow), start(t, slow)
	_, port, err := net.SplitHostPort(b.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	names := []string{b.Endpoint(), net.JoinHostPort("localhost", port)}
	b.Connect(a.Endpoint())
	for _, n := range names {
		a.Connect(n)
	}
	for _, n := range names {
		a.until("an answer for "+n, func() bool {
			return slices.ContainsFunc(a.ups,
				func(p Peer) bool { return p.Endpoint == n })
		})
	}
	// After its lanes have ended and before PeerDown.
	s := a.sessionOf(b)
	a.mu.Lock()
	before := len(a.ups)
	a.mu.Unlock()
	for _, l := range s.channel.Lanes() {
		l.Fail(net.ErrClosed)
		s.channel.Remove(l)
	}
	a.Connect(names[1])
	a.until("an answer while the lanes were gone", func() bool {
		return slices.ContainsFunc(a.ups[before:], func(p Peer) bool { return p.Endpoint == names[1] })
	})
}

// While a frame of the old boot is being handled, PeerDown waits. No frame of that boot follows
// it.
func TestNothingAfterDown(t *testing.T) {
	enter, leave := make(chan struct{}), make(chan struct{})
	a, b := start(t, slow), start(t, slow)
	done := false
	a.on = func(transfer.Boot, *peerv1.ControlFrame) {
		close(enter)
		<-leave
		a.note(func() { done = true })
	}
	join(t, a, b)
	if err := b.Send(a.opt.Boot, await(1)); err != nil {
		t.Fatal(err)
	}
	<-enter
	s := a.sessionOf(b)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		a.sessions.end(s, errors.New("another boot answers"))
	}()
	poll(t, "the end under way", func() bool { return s.channel.State().Closed })
	a.mu.Lock()
	if len(a.downs) != 0 {
		t.Error("PeerDown came before the frame was handled")
	}
	a.mu.Unlock()
	again := hello.Description{Version: hello.Protocol.Max, Boot: b.opt.Boot, Node: "n",
		Endpoint: "127.0.0.1:1", Addresses: []string{"127.0.0.1:1"}, Share: make([]byte, 32)}
	if _, err := a.sessions.register(caller{}, again); !errors.Is(err, wire.ErrRefused) {
		t.Errorf("a new session before the old one is down: %v", err)
	}
	close(leave)
	<-ended
	a.mu.Lock()
	defer a.mu.Unlock()
	if !done || len(a.downs) != 1 {
		t.Errorf("handled %v, downs %v", done, a.downs)
	}
}

// A peer loses its session, as an evicted one, and counts frames from one again. This side ends its
// own session too, reports that, and the next session stays.
func TestPeerLosesItsSession(t *testing.T) {
	a, b := start(t, slow), start(t, slow)
	join(t, a, b)
	if err := a.Send(b.opt.Boot, commit(1)); err != nil {
		t.Fatal(err)
	}
	b.inOrder(a.opt.Boot, 1)
	for n := 1; n <= 3; n++ {
		for _, x := range []struct{ loses, other *node }{{b, a}, {a, b}} {
			x.loses.sessions.end(x.loses.sessionOf(x.other), errEvicted)
			x.other.until("the old session is over", func() bool {
				return slices.ContainsFunc(x.other.downs, proved)
			})
			for _, y := range []*node{a, b} {
				y.note(func() { clear(y.got) })
			}
			a.deliver(b)
			b.deliver(a)
			for _, y := range []*node{a, b} {
				y.note(func() {
					if len(y.downs) != 1 {
						t.Errorf("%d sessions ended, want the old one only", len(y.downs))
					}
					y.downs = nil
				})
			}
		}
	}
}
