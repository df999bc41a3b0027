package peer

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"

	"google.golang.org/grpc/codes"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/control/peer/rpc"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// service answers the calls of peers.
type service struct {
	peerv1.UnimplementedPeerServer
	*dialer

	mu sync.Mutex // protects all below
	// addresses of sidecars whose release was refused; the log has each once
	logged map[string]bool
}

func newService(d *dialer) *service { return &service{dialer: d, logged: map[string]bool{}} }

// Hello implements peerv1.PeerServer.
func (v *service) Hello(ctx context.Context, q *peerv1.HelloRequest) (*peerv1.HelloReply, error) {
	ver, err := v.choose(ctx, q)
	if err != nil {
		return nil, err
	}
	if len(q.Boot) != len(transfer.Boot{}) {
		return nil, status.Errorf(codes.InvalidArgument, "boot of %d bytes, want %d", len(q.Boot),
			len(transfer.Boot{}))
	}
	boot := transfer.Boot(q.Boot)
	from, ok := grpcpeer.FromContext(ctx)
	if !ok {
		from = &grpcpeer.Peer{}
	}
	id, err := rpc.Identity(from, v.opt.Credentials)
	if err != nil {
		return nil, status.Error(codes.Unauthenticated, err.Error())
	}
	if v.sessions.isSuperseded(boot) {
		return nil, status.Errorf(codes.FailedPrecondition, "boot %s was superseded at its endpoint",
			boot)
	}
	reply := v.reply(v.listeners, ver)
	if boot == v.opt.Boot || len(q.KeyShare) == 0 {
		return reply, nil // this process itself, or a caller that does not have our boot id yet
	}
	c := caller{id: id, source: rpc.Source(from), preconnect: q.Preconnect}
	_, err = v.sessions.register(c, hello.Description{Version: ver, Boot: boot,
		Endpoint: q.Endpoint, Node: q.Node, HostBoot: q.HostBoot, Rails: q.Rails,
		Addresses: q.ControlAddresses, Share: q.KeyShare, Release: q.Release, Features: q.Features})
	switch {
	case errors.Is(err, hello.ErrPreconnect): // normal in a large cluster
		return nil, rpc.Refuse(ctx, rpc.RefusesPreconnect, err)
	case errors.Is(err, net.ErrClosed): // this sidecar is stopping: the caller is not at fault
		return nil, status.Error(codes.Unavailable, "the sidecar is stopping")
	case err != nil:
		v.refused.Note(slog.LevelWarn, "hello refused", "peer", boot.String(), "err", err)
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	v.verify(q.Endpoint, boot)
	share := v.secret.Share(boot, id)
	reply.KeyShare = share[:]
	return reply, nil
}

// choose chooses the version to use with a caller. The caller's texts are foreign, and the error is
// shown to people.
func (v *service) choose(ctx context.Context, q *peerv1.HelloRequest) (wire.Version, error) {
	there := hello.Side{Address: q.Endpoint, Release: hello.Release(q.Release),
		Versions: wire.Versions{Min: wire.Version(q.GetVersions().GetMin()),
			Max: wire.Version(q.GetVersions().GetMax())}}
	if hello.CheckAddress(q.Endpoint) != nil {
		there.Address = "the caller's address"
	}
	ver, err := hello.Choose(v.side(v.listeners.name()), there)
	if err == nil {
		return ver, nil
	}
	v.opt.Refused()
	v.mu.Lock()
	first := !v.logged[there.Address] && len(v.logged) < maxPeers
	if first {
		v.logged[there.Address] = true
	}
	v.mu.Unlock()
	if first {
		v.opt.Log.Warn("hello refused; logged once per address", "err", err)
	}
	return 0, rpc.Refuse(ctx, rpc.RefusesRelease, err)
}

// Describe implements peerv1.PeerServer.
func (v *service) Describe(_ context.Context, q *peerv1.DescribeRequest) (*peerv1.DescribeReply,
	error) {
	if len(q.Geometry) != 32 {
		return nil, status.Errorf(codes.InvalidArgument, "geometry of %d bytes, want 32", len(q.Geometry))
	}
	var fingerprint [32]byte
	if n := len(q.Fingerprint); n != 0 && n != len(fingerprint) {
		return nil, status.Errorf(codes.InvalidArgument, "fingerprint of %d bytes, want 32, or none", n)
	}
	copy(fingerprint[:], q.Fingerprint)
	b, ok := v.opt.Handler.Describe([32]byte(q.Geometry), fingerprint)
	if !ok {
		return nil, status.Errorf(codes.NotFound, "no layout with geometry %x and fingerprint %x",
			q.Geometry, q.Fingerprint)
	}
	return &peerv1.DescribeReply{Layout: b}, nil
}

// Probe implements peerv1.PeerServer.
func (v *service) Probe(context.Context, *peerv1.ProbeRequest) (*peerv1.ProbeReply, error) {
	return &peerv1.ProbeReply{Boot: v.opt.Boot[:], Node: v.opt.Node, Version: v.opt.Version}, nil
}
