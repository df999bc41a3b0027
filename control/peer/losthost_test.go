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
	"github.com/kvspray/kvspray/control/peer/lane"
	"github.com/kvspray/kvspray/internal/testutil"
)

// unpinged is for tests in which only an error of the kernel ends a lane.
func unpinged(o *Options) {
	const never = time.Hour
	o.Pings = Pings{Busy: never, Idle: never, Timeout: never, Tick: never, HostSilence: time.Second}
}

// The host at the other end of a control lane is lost. Both ends detect it, whichever dialed and
// whether or not frames are in flight. Frames that are sent meanwhile arrive over the next lane.
func TestLostHost(t *testing.T) {
	if !testutil.InNamespace(t) {
		return
	}
	for name, busy := range map[string]bool{"with a frame in flight": true, "idle": false} {
		t.Run(name, func(t *testing.T) {
			a, b := start(t, unpinged), start(t, unpinged)
			join(t, a, b)
			lanes := []*lane.Lane{laneOf(t, a, b), laneOf(t, b, a)}
			testutil.LoseHost(t, lanes[0].Conn(), lanes[1].Conn())
			began := time.Now()
			if busy {
				if err := errors.Join(a.Send(b.opt.Boot, await(1)), b.Send(a.opt.Boot, commit(1))); err != nil {
					t.Fatal(err)
				}
			}
			for _, l := range lanes {
				poll(t, "the lane has ended", func() bool { return l.Err() != nil })
				why := l.Err()
				if took := time.Since(began); !errors.Is(why, syscall.ETIMEDOUT) || took > 10*time.Second {
					t.Errorf("the lane ended after %s with %v; TCP's own retries end after 15 s", took, why)
				}
			}
			if busy {
				a.inOrder(b.opt.Boot, 1)
				b.inOrder(a.opt.Boot, 1)
			}
		})
	}
}

// The same for calls under TLS: the caller's host is lost after its first call. gRPC would wait for
// a minute.
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
	testutil.LoseHost(t, append(a.acceptor.Conns(), dialed)...)
	poll(t, "the call's connection is over", func() bool { return len(a.acceptor.Conns()) == 0 })
}
