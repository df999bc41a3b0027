package peer

import (
	"crypto/rand"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/control/peer/lane"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
)

// node is a mesh with a handler that records the events.
type node struct {
	*Mesh
	t  testing.TB
	on func(transfer.Boot, *peerv1.ControlFrame)

	mu     sync.Mutex
	ups    []Peer
	downs  []string
	failed []error
	got    map[transfer.Boot][]uint64
	busy   map[transfer.Boot]bool
	wake   chan struct{}
}

func (n *node) note(f func()) {
	n.mu.Lock()
	f()
	close(n.wake)
	n.wake = make(chan struct{})
	n.mu.Unlock()
}

func (n *node) PeerUp(p Peer) { n.note(func() { n.ups = append(n.ups, p) }) }

func (n *node) PeerDown(b transfer.Boot, proved bool, _ error) {
	n.note(func() { n.downs = append(n.downs, fmt.Sprint(b, proved)) })
}

func (n *node) ConnectFailed(_ string, err error) {
	n.note(func() { n.failed = append(n.failed, err) })
}

func (n *node) Busy(b transfer.Boot) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.busy[b]
}

func (n *node) Describe(g, f [32]byte) ([]byte, bool) {
	return fmt.Appendf(nil, "layout %d", f[0]), g[0] == 1 && f[0] != 9
}

func (n *node) Control(b transfer.Boot, f *peerv1.ControlFrame) {
	if n.on != nil {
		n.on(b, f)
		return
	}
	number := f.GetAwait().GetToken() + f.GetCommit().GetDestination().GetId()
	n.note(func() { n.got[b] = append(n.got[b], number) })
}

// slow is for tests in which time must neither end nor open a lane. With the short intervals of the
// other tests it does on a busy machine.
func slow(o *Options) { o.Pings = Pings{Tick: time.Hour} }

// restarts listens on an address whose port no other process takes after the node has ended.
func restarts(o *Options) { o.Listen = net.JoinHostPort(testutil.Loopback(), "0") }

// until waits for a condition over the recorded events, and calls ok under the lock.
func (n *node) until(what string, ok func() bool) {
	n.t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		n.mu.Lock()
		done, wake := ok(), n.wake
		n.mu.Unlock()
		if done {
			return
		}
		select {
		case <-wake:
		case <-deadline.C:
			n.mu.Lock()
			defer n.mu.Unlock()
			n.t.Fatalf("not in time: %s; ups %+v, downs %v, failed %v", what, n.ups, n.downs, n.failed)
		}
	}
}

// poll waits for a condition that no event announces.
func poll(t testing.TB, what string, ok func() bool) {
	t.Helper()
	end := time.Now().Add(patience)
	for tick := time.NewTicker(time.Millisecond); !ok(); <-tick.C {
		if time.Now().After(end) {
			tick.Stop()
			t.Fatalf("not in time: %s", what)
		}
	}
}

// sessionOf is the session with another node.
func (n *node) sessionOf(peer *node) *session { return n.sessions.get(peer.opt.Boot) }

// acknowledged waits until the peer has acknowledged all frames of a session.
func acknowledged(t testing.TB, s *session) {
	t.Helper()
	poll(t, "all acknowledged", func() bool { return s.channel.State().Unacked == 0 })
}

// cutAll ends all lanes of a session.
func cutAll(s *session, err error) {
	for _, l := range s.channel.Lanes() {
		l.Fail(err)
	}
}

// laneOf waits for the lane of a node to its only peer: PeerUp precedes the lane.
func laneOf(t *testing.T, n, peer *node) (l *lane.Lane) {
	t.Helper()
	s := n.sessionOf(peer)
	poll(t, "there is a lane", func() bool {
		if all := s.channel.Lanes(); len(all) > 0 {
			l = all[0].(*lane.Lane)
		}
		return l != nil
	})
	return l
}

func start(t testing.TB, change func(*Options)) *node {
	t.Helper()
	n := &node{t: t, got: map[transfer.Boot][]uint64{}, busy: map[transfer.Boot]bool{},
		wake: make(chan struct{})}
	opt := Options{Node: "n", HostBoot: "h", Listen: "127.0.0.1:0", Handler: n, Version: "test",
		Pings: Pings{Busy: 50 * time.Millisecond, Idle: 100 * time.Millisecond,
			Timeout: 300 * time.Millisecond, Tick: 20 * time.Millisecond}}
	if _, err := rand.Read(opt.Boot[:]); err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(&opt)
	}
	m, err := New(opt)
	if err != nil {
		t.Fatal(err)
	}
	n.Mesh = m
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

func join(t testing.TB, a, b *node) {
	t.Helper()
	a.Connect(b.Endpoint())
	var failed []error
	a.until("a up", func() bool {
		failed = a.failed
		return len(failed) > 0 || slices.ContainsFunc(a.ups,
			func(p Peer) bool { return p.Boot == b.opt.Boot })
	})
	if len(failed) > 0 {
		t.Fatal(failed[0])
	}
	b.until("b up", func() bool {
		return slices.ContainsFunc(b.ups,
			func(p Peer) bool { return p.Boot == a.opt.Boot })
	})
}

func await(i uint64) *peerv1.ControlFrame {
	return &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Await{Await: &peerv1.Await{Token: i}}}
}

func commit(i uint64) *peerv1.ControlFrame {
	return &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Commit{Commit: &peerv1.Commit{
		Destination: &peerv1.Lease{Id: i}}}}
}

func (n *node) inOrder(from transfer.Boot, count uint64) {
	n.t.Helper()
	n.until("all frames", func() bool { return uint64(len(n.got[from])) >= count })
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, v := range n.got[from] {
		if v != uint64(i+1) {
			n.t.Fatalf("frame %d is number %d", i+1, v)
		}
	}
}

func secured(t testing.TB, c keys.Cluster) func(*Options) {
	return func(o *Options) {
		cr, err := keys.FromCluster(c, "n")
		if err != nil {
			t.Fatal(err)
		}
		o.Credentials = cr
	}
}
