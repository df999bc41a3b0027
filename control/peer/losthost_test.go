// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"errors"
	"net"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/testutil"
)

// unpinged is for tests in which only the kernel's word ends a lane.
func unpinged(o *Options) {
	const never = time.Hour
	o.Pings = Pings{Busy: never, Idle: never, Timeout: never, Tick: never, HostSilence: time.Second}
}

// laneOf waits for the lane of a node to its only peer: PeerUp comes a moment before it.
func laneOf(t *testing.T, n, peer *node) (l *lane) {
	t.Helper()
	s := n.session(peer.opt.Boot)
	poll(t, "there is a lane", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.lanes) > 0 {
			l = s.lanes[0]
		}
		return l != nil
	})
	return l
}

// The host at the other end of a control lane is lost: both ends notice by themselves, whichever
// dialed, and whether something is under way. What was said meanwhile arrives over the next lane.
func TestLostHost(t *testing.T) {
	if !testutil.InNamespace(t) {
		return
	}
	for name, says := range map[string]bool{"with a frame under way": true, "idle": false} {
		t.Run(name, func(t *testing.T) {
			a, b := start(t, unpinged), start(t, unpinged)
			join(t, a, b)
			lanes := []*lane{laneOf(t, a, b), laneOf(t, b, a)}
			testutil.LoseHost(t, lanes[0].conn, lanes[1].conn)
			began := time.Now()
			if says {
				if err := errors.Join(a.Send(b.opt.Boot, await(1)), b.Send(a.opt.Boot, commit(1))); err != nil {
					t.Fatal(err)
				}
			}
			for _, l := range lanes {
				var why error
				poll(t, "the lane is given up", func() bool {
					l.mu.Lock()
					defer l.mu.Unlock()
					why = l.err
					return l.dead
				})
				if took := time.Since(began); !errors.Is(why, syscall.ETIMEDOUT) || took > 10*time.Second {
					t.Errorf("the lane ended after %s with %v; TCP's own retries end after 15 s", took, why)
				}
			}
			if says {
				a.inOrder(b.opt.Boot, 1)
				b.inOrder(a.opt.Boot, 1)
			}
		})
	}
}

// The same of calls under TLS, where gRPC would wait for a minute: the caller's host is lost after
// its first.
func TestLostCaller(t *testing.T) {
	if !testutil.InNamespace(t) {
		return
	}
	cluster, err := keys.NewCluster()
	if err != nil {
		t.Fatal(err)
	}
	a := start(t, func(o *Options) { secured(t, cluster)(o); unpinged(o) })
	host, _, err := net.SplitHostPort(a.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	var dialed net.Conn
	conn, err := grpc.NewClient("passthrough:///"+a.Endpoint(),
		grpc.WithTransportCredentials(credentials.NewTLS(a.opt.Credentials.Client(host))),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (c net.Conn, err error) {
			dialed, err = (&net.Dialer{}).DialContext(ctx, "tcp", addr)
			return dialed, err
		}))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := peerv1.NewPeerClient(conn).Probe(t.Context(), &peerv1.ProbeRequest{}); err != nil {
		t.Fatal(err)
	}
	accepted := func() (all []net.Conn) {
		a.Mesh.mu.Lock()
		defer a.Mesh.mu.Unlock()
		for c := range a.conns {
			all = append(all, c)
		}
		return all
	}
	testutil.LoseHost(t, append(accepted(), dialed)...)
	poll(t, "the call's connection is over", func() bool { return len(accepted()) == 0 })
}
