// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

func helloAs(m *Mesh, boot transfer.Boot, endpoint string, share byte) *peerv1.HelloRequest {
	q := &peerv1.HelloRequest{Versions: &peerv1.VersionRange{Min: uint32(Protocol.Min),
		Max: uint32(Protocol.Max)}, Boot: boot[:], Endpoint: endpoint,
		ControlAddresses: []string{endpoint}}
	if share != 0 {
		q.KeyShare = make([]byte, 32)
		q.KeyShare[0] = share
	}
	return q
}

// A member with a certificate of its own says hello under the boot of another.
func TestImpostor(t *testing.T) {
	c, err := keys.NewCluster()
	if err != nil {
		t.Fatal(err)
	}
	sec := secured(t, c)
	a, b, evil := start(t, sec), start(t, sec), start(t, sec)

	// Before the true one came: what the impostor is told is of no use for lanes in the true one's
	// name.
	var early []byte
	ask := func(q *peerv1.HelloRequest) (r *peerv1.HelloReply, err error) {
		err = evil.call(t.Context(), a.Endpoint(), func(ctx context.Context, c peerv1.PeerClient) error {
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
	s := a.session(b.opt.Boot)
	s.mu.Lock()
	key, id := s.info.Key, s.id
	s.mu.Unlock()
	if share := a.share(b.opt.Boot, id); slices.Equal(early, share[:]) {
		t.Error("the impostor holds the share of the key with the true one")
	}

	// Afterwards it is refused, told no share, and the session stays as it was.
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

// Without certificates it is the key that lanes proved which tells an impostor.
func TestImpostorOnLoopback(t *testing.T) {
	a, b := start(t, nil), start(t, nil)
	join(t, a, b)
	s := a.session(b.opt.Boot)
	s.mu.Lock()
	for _, l := range s.lanes {
		l.fail(net.ErrClosed) // no lane of the true one hinders it
	}
	s.mu.Unlock()
	if _, err := (&service{m: a.Mesh}).Hello(t.Context(), helloAs(a.Mesh, b.opt.Boot, "127.0.0.1:1",
		9)); err == nil || !strings.Contains(err.Error(), "its key differs") {
		t.Errorf("hello under another's boot: %v", err)
	}
}

// What a caller says of its endpoint is not believed: it would end the sessions of whoever truly is
// there.
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

// Whoever dialed us and comes back as another process ends the old session at once, by what
// answers at its endpoint.
func TestCallerRestarts(t *testing.T) {
	a, b := start(t, slow), start(t, func(o *Options) { slow(o); restarts(o) }) // no tick helps
	join(t, b, a)
	at, old := b.Endpoint(), b.opt.Boot
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	s := a.session(old)
	poll(t, "lanes gone", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return len(s.lanes) == 0 })
	c := start(t, func(o *Options) { slow(o); o.Listen = at })
	c.Connect(a.Endpoint())
	a.until("the old one is down for good", func() bool {
		return slices.Contains(a.downs,
			fmt.Sprint(old, true))
	})
}

// Each name under which somebody connects gets its answer, also where the session is up already or
// comes up meanwhile.
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
	// In the moment after its lanes died and before PeerDown was said.
	s := a.session(b.opt.Boot)
	a.mu.Lock()
	before := len(a.ups)
	a.mu.Unlock()
	s.mu.Lock()
	for _, l := range append([]*lane(nil), s.lanes...) {
		l.fail(net.ErrClosed)
		s.dropLaneLocked(l)
	}
	s.mu.Unlock()
	a.Connect(names[1])
	a.until("an answer while the lanes were gone", func() bool {
		return slices.ContainsFunc(a.ups[before:], func(p Peer) bool { return p.Endpoint == names[1] })
	})
}

// While a frame of the old boot is being handled, PeerDown waits: after it nothing of that boot
// comes.
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
	s := a.session(b.opt.Boot)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		a.end(s, errors.New("another boot answers"))
	}()
	poll(t, "the end under way", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.closed })
	a.mu.Lock()
	if len(a.downs) != 0 {
		t.Error("PeerDown came before the frame was handled")
	}
	a.mu.Unlock()
	again := hello{version: Protocol.Max, boot: b.opt.Boot, node: "n", endpoint: "127.0.0.1:1",
		addrs: []string{"127.0.0.1:1"}, share: make([]byte, 32)}
	if _, err := a.meet(who{}, again); !errors.Is(err, wire.ErrRefused) {
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

// deadlines is the connection of a lane that remembers the last deadline for its writes.
type deadlines struct {
	net.Conn
	mu   sync.Mutex
	set  int
	last time.Time
}

func (d *deadlines) SetWriteDeadline(t time.Time) error {
	d.mu.Lock()
	d.set, d.last = d.set+1, t
	d.mu.Unlock()
	return d.Conn.SetWriteDeadline(t)
}

// A lane that was full once has no deadline of the writer's left, of which it would die later.
func TestLaneAfterBacklog(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	far, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	l, err := newLane(c, nil)
	if err != nil {
		t.Fatal(err)
	}
	d := &deadlines{Conn: c}
	l.conn, l.limit = d, patience
	sent := 0
	for l.waiting() == 0 { // until the socket is full
		b := make([]byte, MaxFrame)
		if !l.write(b) {
			t.Fatal("the lane is dead")
		}
		sent += len(b)
	}
	buf := make([]byte, 1<<20)
	for sent > 0 {
		n, err := far.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		sent -= n
	}
	l.wg.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.set < 2 || !d.last.IsZero() {
		t.Errorf("%d deadlines were set, the last one is %v: want one or more, and then none",
			d.set, d.last)
	}
	if !l.write([]byte{1}) {
		l.mu.Lock()
		defer l.mu.Unlock()
		t.Fatalf("the lane died: %v", l.err)
	}
}
