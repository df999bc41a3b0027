package peer

import (
	"bytes"
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	grpcpeer "google.golang.org/grpc/peer"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/control/peer/rpc"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// hello sends Hello to the peer at endpoint twice: to learn its boot, and to agree on a key with
// it. preconnect: no request needs the peer. A nil session: the peer is this process.
func (d *dialer) hello(ctx context.Context, endpoint string, preconnect bool) (s *session,
	err error) {
	ours := d.opt.Versions
	q := d.request(d.listeners)
	q.Preconnect = preconnect
	err = d.caller.Call(ctx, endpoint, func(ctx context.Context, c peerv1.PeerClient) error {
		var from grpcpeer.Peer
		var trailer metadata.MD
		r, err := c.Hello(ctx, q, grpc.Peer(&from), grpc.Trailer(&trailer))
		if err != nil {
			return rpc.Refused(err, trailer) //nolint:wrapcheck // Call names the endpoint
		}
		there := hello.Side{Address: endpoint, Release: hello.Release(r.Release),
			Versions: wire.Versions{Min: wire.Version(r.Version), Max: wire.Version(r.Version)}}
		if _, err = hello.Choose(d.side(d.listeners.name()), there); err != nil {
			return err //nolint:wrapcheck // as above
		}
		id, err := rpc.Identity(&from, d.opt.Credentials)
		if err != nil {
			return err //nolint:wrapcheck // as above
		}
		if len(r.Boot) != len(transfer.Boot{}) {
			return fmt.Errorf("hello: boot of %d bytes: %w", len(r.Boot), wire.ErrMalformed)
		}
		boot := transfer.Boot(r.Boot)
		if boot == d.opt.Boot {
			return nil
		}
		d.sessions.supersede(endpoint, boot)
		share := d.secret.Share(boot, id)
		q.KeyShare, q.Versions.Min = share[:], uint32(ours.Min)
		if r, err = c.Hello(ctx, q, grpc.Peer(&from), grpc.Trailer(&trailer)); err != nil {
			return rpc.Refused(err, trailer) //nolint:wrapcheck // as above
		}
		if again, ierr := rpc.Identity(&from, d.opt.Credentials); ierr != nil || again != id {
			return fmt.Errorf("hello: two certificates in one conversation: several processes answer "+
				"there: %w", wire.ErrRefused)
		}
		ver := wire.Version(r.Version)
		if ver < ours.Min || ver > ours.Max {
			return fmt.Errorf("hello: the peer chose %s, this side supports %s: %w", ver, ours,
				wire.ErrVersion)
		}
		if !bytes.Equal(r.Boot, boot[:]) {
			return fmt.Errorf("hello: boot %s, then %x: several processes answer there: %w", boot, r.Boot,
				wire.ErrRefused)
		}
		// The dialed endpoint reaches the peer from here, and requests name it.
		s, err = d.sessions.register(caller{id: id, source: rpc.Source(&from), preconnect: preconnect},
			hello.Description{Version: ver, Boot: boot, Dialed: endpoint, Endpoint: endpoint,
				Node: r.Node, HostBoot: r.HostBoot, Rails: r.Rails, Addresses: r.ControlAddresses,
				Share: r.KeyShare, Release: r.Release, Features: r.Features})
		return err
	})
	return s, err //nolint:wrapcheck // Call names the endpoint
}
