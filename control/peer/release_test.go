package peer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// If two releases have no version in common, both sides log one line that names the sidecar to
// upgrade, whichever calls, and no peer comes up.
func TestWhichToUpgrade(t *testing.T) {
	before := wire.Versions{Min: wire.V(0, 8), Max: wire.V(0, 9)}
	after := wire.Versions{Min: wire.V(2, 0), Max: wire.V(2, 3)}
	for name, x := range map[string]struct {
		caller, callee wire.Versions
		older          string
	}{
		"an older one calls":     {before, hello.Protocol, "caller"},
		"an older one is called": {hello.Protocol, before, "callee"},
		"a newer one calls":      {after, hello.Protocol, "callee"},
		"a newer one is called":  {hello.Protocol, after, "caller"},
	} {
		t.Run(name, func(t *testing.T) {
			var logs [2]testutil.Log
			var refused [2]atomic.Int32
			node := func(i int, v wire.Versions) *node {
				return start(t, func(o *Options) {
					o.Versions, o.Version = v, fmt.Sprintf("v%d", i)
					o.Refused = func() { refused[i].Add(1) }
					o.Log = slog.New(slog.NewTextHandler(&logs[i], nil))
				})
			}
			a, b := node(0, x.caller), node(1, x.callee)
			for range 3 {
				a.Connect(b.Endpoint())
				a.until("an answer", func() bool { return len(a.failed) > 0 })
				if len(a.ups) > 0 {
					t.Fatalf("up: %v", a.ups)
				}
				err := a.failed[0]
				a.mu.Lock()
				a.failed = nil
				a.mu.Unlock()
				older := map[string]string{"caller": a.Endpoint(), "callee": b.Endpoint()}[x.older]
				if !errors.Is(err, ErrRelease) || !strings.Contains(err.Error(),
					"upgrade the sidecar at "+older) || !strings.Contains(err.Error(),
					"kvspray v0") ||
					!strings.Contains(err.Error(), "kvspray v1") || strings.Contains(err.Error(),
					"\n") {
					t.Errorf("%v: want one line with the remedy (upgrade %s) and both releases", err, older)
				}
			}
			// The callee has refused, too, unless its first answer was enough for the caller.
			if n := refused[1].Load(); n > 0 {
				if got := strings.Count(logs[1].String(), "hello refused"); n != 3 || got != 1 {
					t.Errorf("%d hellos were refused, and %d lines logged: want 3 and 1: %s", n,
						got, logs[1].String())
				}
			}
			for _, m := range []*Mesh{a.Mesh, b.Mesh} {
				if n := m.sessions.count(); n != 0 {
					t.Errorf("%d sessions are left", n)
				}
			}
		})
	}
}

// PeerUp has the release that the peer announced, unless it is not printable.
func TestReleaseInPeerUp(t *testing.T) {
	a := start(t, func(o *Options) {
		o.Version, o.Features = "v1.2.3", []string{"from-the-future"}
	})
	b := start(t, func(o *Options) { o.Version = "v1.3.0\n; rm" })
	join(t, a, b)
	for _, x := range []struct {
		at      *node
		of      transfer.Boot
		release string
		future  bool
	}{{a, b.opt.Boot, "", false}, {b, a.opt.Boot, "v1.2.3", true}} {
		x.at.mu.Lock()
		i := slices.IndexFunc(x.at.ups, func(p Peer) bool { return p.Boot == x.of })
		p := x.at.ups[i]
		x.at.mu.Unlock()
		if p.Release != x.release || slices.Contains(p.Features, "from-the-future") != x.future {
			t.Errorf("release %q with %q, want %q", p.Release, p.Features, x.release)
		}
	}
}

// later answers the calls of peers like a later release, and passes on what such a release asks.
type later struct{ peerv1.PeerServer }

func (l later) Hello(ctx context.Context, q *peerv1.HelloRequest) (*peerv1.HelloReply, error) {
	addField(q)
	addField(q.Versions)
	addField(q.Rails...)
	r, err := l.PeerServer.Hello(ctx, q)
	if err == nil {
		addField(r)
		addField(r.Rails...)
	}
	return r, err
}

func (l later) Describe(ctx context.Context, q *peerv1.DescribeRequest) (*peerv1.DescribeReply,
	error) {
	addField(q)
	r, err := l.PeerServer.Describe(ctx, q)
	addField(r)
	return r, err
}

// addField adds a field of a later release to messages.
func addField[M proto.Message](all ...M) {
	field := protowire.AppendTag(nil, 1000, protowire.BytesType)
	field = protowire.AppendBytes(field, []byte("of a later release"))
	for _, m := range all {
		m.ProtoReflect().SetUnknown(field)
	}
}

// Hello and Describe ignore unknown fields of a later release, in requests and in replies.
func TestLaterCalls(t *testing.T) {
	rail := func(o *Options) {
		o.Rails = func() []*peerv1.Rail { return []*peerv1.Rail{{Transport: "tcp", Name: "lo"}} }
	}
	a, b := start(t, rail), start(t, rail)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	peerv1.RegisterPeerServer(srv, later{newService(b.dialer)})
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(ln) }()
	defer func() { srv.Stop(); <-done }()
	a.Connect(ln.Addr().String())
	for _, x := range []struct{ at, of *node }{{a, b}, {b, a}} {
		x.at.until("up", func() bool { return len(x.at.ups)+len(x.at.failed) > 0 })
		if len(x.at.failed) > 0 || x.at.ups[0].Boot != x.of.opt.Boot || len(x.at.ups[0].Rails) != 1 {
			t.Fatalf("up: %+v, failed: %v", x.at.ups, x.at.failed)
		}
	}
	if l, err := a.Mesh.Describe(t.Context(), b.opt.Boot, [32]byte{1}, [32]byte{}); err != nil ||
		string(l) != "layout 0" {
		t.Errorf("describe: %q %v", l, err)
	}
}

// Frames of a later release: unknown fields in a message and frames of an unknown kind lose nothing
// of what is known, in order.
func TestLaterFrames(t *testing.T) {
	a, b := start(t, nil), start(t, nil)
	join(t, a, b)
	for i := range uint64(3) {
		known := commit(i + 1)
		addField(known.GetCommit())
		addField(known.GetCommit().GetDestination())
		for _, f := range []*peerv1.ControlFrame{known, {}} { // an unknown body reads as none
			if err := a.Send(b.opt.Boot, f); err != nil {
				t.Fatal(err)
			}
		}
	}
	b.until("all frames", func() bool { return len(b.got[a.opt.Boot]) == 6 })
	b.mu.Lock()
	defer b.mu.Unlock()
	if got := b.got[a.opt.Boot]; !slices.Equal(got, []uint64{1, 0, 2, 0, 3, 0}) {
		t.Errorf("frames arrived as %v", got)
	}
}

// A gRPC server of another kind is not taken for a sidecar of another release: another program may
// have the address for a while, and a sidecar may have it next.
func TestAnotherGRPCServer(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(ln) }()
	defer func() { srv.Stop(); <-done }()
	a := start(t, nil)
	a.Connect(ln.Addr().String())
	a.until("an answer", func() bool { return len(a.failed) > 0 })
	if err := a.failed[0]; errors.Is(err, ErrRelease) || !errors.Is(err, ErrOther) {
		t.Errorf("another gRPC server: %v", err)
	}
}
