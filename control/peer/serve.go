// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/sys/usertimeout"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

func (m *Mesh) newServer() *grpc.Server {
	srv := grpc.NewServer(grpc.Creds(shaken{insecure.NewCredentials()}), grpc.MaxRecvMsgSize(MaxFrame),
		grpc.MaxConcurrentStreams(maxStreams), grpc.ConnectionTimeout(openTimeout),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: time.Minute, Time: time.Minute,
			Timeout: openTimeout}), grpc.WaitForHandlers(true))
	peerv1.RegisterPeerServer(srv, &service{m: m})
	return srv
}

// service answers the calls of peers.
type service struct {
	peerv1.UnimplementedPeerServer
	m *Mesh
}

// identity identifies a process by its TLS certificate (keys.Identity), for the life of the
// process. Zero without credentials.
type identity = [sha256.Size]byte

// identify reads the identity of a call's other end.
func (m *Mesh) identify(p *grpcpeer.Peer) (id identity, err error) {
	if m.opt.Credentials == nil {
		return id, nil
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(info.State.PeerCertificates) == 0 {
		return id, fmt.Errorf("peer: a call without a certificate: %w", wire.ErrRefused)
	}
	return keys.Identity(info.State.PeerCertificates[0]), nil
}

// who identifies the caller of a Hello, as far as the server has learned.
type who struct {
	id       identity
	from     netip.Prefix // its source, for bounds
	acquaint bool         // it is met because gossip names it, and no request does
}

func sourceOf(p *grpcpeer.Peer) netip.Prefix {
	return admit.SourceOf(admit.Address(p.Addr))
}

func (v *service) Hello(ctx context.Context, q *peerv1.HelloRequest) (*peerv1.HelloReply, error) {
	m := v.m
	ver, err := m.called(ctx, wire.Versions{Min: wire.Version(q.GetVersions().GetMin()),
		Max: wire.Version(q.GetVersions().GetMax())}, q.Endpoint, q.Release)
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
	id, err := m.identify(from)
	if err != nil {
		return nil, status.Error(codes.Unauthenticated, err.Error())
	}
	m.mu.Lock()
	gone := m.gone[boot]
	m.mu.Unlock()
	if gone {
		return nil, status.Errorf(codes.FailedPrecondition, "boot %s was superseded at its endpoint",
			boot)
	}
	reply := &peerv1.HelloReply{Version: uint32(ver), Boot: m.opt.Boot[:], Node: m.opt.Node,
		Endpoint: m.Endpoint(), HostBoot: m.opt.HostBoot,
		Rails: m.opt.Rails(), ControlAddresses: m.Addresses(), Features: m.opt.Features,
		Release: m.opt.Version}
	if boot == m.opt.Boot || len(q.KeyShare) == 0 {
		return reply, nil // ourselves, or a caller that does not know our boot yet
	}
	w := who{id: id, from: sourceOf(from), acquaint: q.Acquaint}
	_, err = m.meet(w, hello{version: ver, boot: boot, endpoint: q.Endpoint, node: q.Node,
		host: q.HostBoot, rails: q.Rails, addrs: q.ControlAddresses, share: q.KeyShare,
		build: build{q.Release, q.Features}})
	switch {
	case errors.Is(err, ErrAcquainted): // as it has to be in a large cluster
		_ = grpc.SetTrailer(ctx, metadata.Pairs(refuses, refusesAcquaint))
		return nil, status.Error(codes.ResourceExhausted, err.Error())
	case err != nil:
		m.refused.Note(slog.LevelWarn, "hello refused", "peer", boot.String(), "err", err)
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	m.suspect(q.Endpoint, boot)
	share := m.share(boot, id)
	reply.KeyShare = share[:]
	return reply, nil
}

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
	b, ok := v.m.opt.Handler.Describe([32]byte(q.Geometry), fingerprint)
	if !ok {
		return nil, status.Errorf(codes.NotFound, "no layout with geometry %x and fingerprint %x",
			q.Geometry, q.Fingerprint)
	}
	return &peerv1.DescribeReply{Layout: b}, nil
}

func (v *service) Probe(context.Context, *peerv1.ProbeRequest) (*peerv1.ProbeReply, error) {
	return &peerv1.ProbeReply{Boot: v.m.opt.Boot[:], Node: v.m.opt.Node, Version: v.m.opt.Version}, nil
}

// hello is a peer's description of itself, from its Hello or its reply.
type hello struct {
	version wire.Version
	boot    transfer.Boot
	// dialed is where this process reached the peer. It is empty if the peer called: then endpoint is
	// only the peer's claim, used for dialing back and nothing else.
	dialed, endpoint string
	node, host       string
	rails            []*peerv1.Rail
	addrs            []string // of its control lanes
	share            []byte   // its half of the key
	build            build
}

// meet makes or renews the session with a peer.
func (m *Mesh) meet(w who, h hello) (*session, error) {
	id, boot, node, host, endpoint, addrs := w.id, h.boot, h.node, h.host, h.endpoint, h.addrs
	share, says := h.share, h.build
	if len(share) != 32 || len(says.features) > MaxFeatures {
		return nil,
			fmt.Errorf("peer: hello of %s: key share of %d bytes (32), %d features (at most %d): %w",
				boot, len(share), len(says.features), MaxFeatures, wire.ErrMalformed)
	}
	rails, refused := CheckRails(h.rails)
	for _, s := range append([]string{node, host, says.release}, says.features...) {
		if len(s) > MaxText {
			return nil, fmt.Errorf("peer: hello of %s: text of %d bytes, at most %d: %w", boot, len(s),
				MaxText, wire.ErrMalformed)
		}
	}
	if err := errors.Join(checkAddress(endpoint), checkAddresses(addrs)); err != nil {
		return nil, fmt.Errorf("peer: hello of %s: %w", boot, err)
	}
	info := Peer{Boot: boot, Node: node, Endpoint: h.dialed, Claimed: endpoint, HostBoot: host,
		SameHost: host != "" && host == m.opt.HostBoot, Rails: rails, Version: h.version,
		Features: says.features, Release: checkedRelease(says.release), Key: m.pairKey(boot,
			m.share(boot, id), [32]byte(share))}
	if err := m.makeRoom(boot, w); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.sessions[boot]
	switch {
	case m.closed:
		return nil, net.ErrClosed
	case m.gone[boot]:
		return nil, fmt.Errorf("peer: boot %s was superseded at its endpoint: %w", boot, wire.ErrRefused)
	case s == nil && len(m.sessions) >= MaxPeers: // others came between
		return nil, m.fullError()
	case s == nil:
		now := time.Now()
		s = &session{m: m, boot: boot, id: id, from: w.from,
			held:  map[uint64]*peerv1.ControlFrame{},
			since: now, business: now}
		s.quiet.L = &s.mu
		if _, err := rand.Read(s.mine[:]); err != nil {
			return nil, fmt.Errorf("peer: session: %w", err)
		}
		m.sessions[boot] = s
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, fmt.Errorf("peer: hello of %s: its previous session is ending, send Hello again: %w",
			boot,
			wire.ErrRefused)
	}
	// Both halves of the key and the certificate belong to two processes and live as long as they do.
	// Once a lane has proved the key, another key under the same boot belongs to another process.
	if (s.met || len(s.lanes) > 0) && (s.info.Key != info.Key || s.id != id) {
		return nil, fmt.Errorf("peer: hello of %s: its key differs from the one that was proved "+
			"under this boot id: %w", boot, wire.ErrRefused)
	}
	if h.dialed == "" {
		info.Endpoint, s.claimed = s.info.Endpoint, endpoint
	}
	s.info, s.addrs, s.id = info, addrs, id
	if len(refused) > 0 && !s.railsLogged {
		s.railsLogged = true
		m.log.Warn("a peer announced invalid rails; logged once", "peer", boot.String(),
			"refused", refused)
	}
	return s, nil
}

// checkAddresses refuses invalid control addresses.
func checkAddresses(addrs []string) error {
	if len(addrs) < 1 || len(addrs) > MaxAddrs {
		return fmt.Errorf("%d control addresses (1 to %d): %w", len(addrs), MaxAddrs, wire.ErrMalformed)
	}
	for _, a := range addrs {
		if err := checkAddress(a); err != nil {
			return err
		}
	}
	return nil
}

func checkAddress(a string) error {
	if len(a) > MaxText {
		return fmt.Errorf("address of %d bytes, at most %d: %w", len(a), MaxText, wire.ErrMalformed)
	}
	if _, _, err := net.SplitHostPort(a); err != nil {
		return fmt.Errorf("address %q: %w: %w", a, err, wire.ErrMalformed)
	}
	if i := strings.IndexFunc(a, func(r rune) bool { return r <= ' ' || r > '~' }); i >= 0 {
		// people are shown it, on terminals
		return fmt.Errorf("address %q: %q in it: %w", a, a[i], wire.ErrMalformed)
	}
	return nil
}

// call runs f with a connection to endpoint that lives as long as f: calls are rare.
func (m *Mesh) call(ctx context.Context, endpoint string, f func(context.Context,
	peerv1.PeerClient) error) error {
	host, _, err := net.SplitHostPort(endpoint)
	if err != nil || len(endpoint) > MaxText {
		return fmt.Errorf("peer: endpoint %q: want host:port of at most %d bytes", endpoint, MaxText)
	}
	creds := insecure.NewCredentials()
	if c := m.opt.Credentials; c != nil {
		creds = credentials.NewTLS(c.Client(host))
	} else if !loopback(endpoint) {
		return fmt.Errorf(
			"peer: call %s: %w: set peer.cluster_key_file ('kvspray keygen cluster') or peer.tls",
			endpoint, ErrUnsafe)
	}
	// gRPC turns the dialer's error into a text; this keeps the error, which shows whether anything
	// listens there.
	var refused atomic.Bool
	dial := func(ctx context.Context, addr string) (net.Conn, error) {
		c, err := usertimeout.Dialer(m.pings.HostSilence).DialContext(ctx, "tcp", addr)
		refused.Store(errors.Is(err, syscall.ECONNREFUSED))
		return c, err //nolint:wrapcheck // gRPC says what it did
	}
	conn, err := grpc.NewClient("passthrough:///"+endpoint, grpc.WithTransportCredentials(creds),
		grpc.WithNoProxy(), grpc.WithDisableServiceConfig(),
		grpc.WithContextDialer(dial), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxLayout)))
	if err != nil {
		return fmt.Errorf("peer: call %s: %w", endpoint, err)
	}
	defer func() { _ = conn.Close() }() // nothing is left to lose
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err = f(ctx, peerv1.NewPeerClient(conn))
	switch {
	case err == nil:
		return nil
	case refused.Load():
		return fmt.Errorf("peer: call %s: nothing listens there: %w: %w", endpoint, ErrNoAnswer,
			syscall.ECONNREFUSED)
	}
	if c := status.Code(err); c == codes.Unavailable || c == codes.DeadlineExceeded {
		return fmt.Errorf("peer: call %s: %w: %w", endpoint, ErrNoAnswer, err)
	}
	return fmt.Errorf("peer: call %s: %w", endpoint, err)
}

// hello sends Hello to the peer at endpoint twice: to learn its boot, and to agree on a key with
// it. acquaint: no request needs the peer. A nil session: the peer is this process.
func (m *Mesh) hello(ctx context.Context, endpoint string, acquaint bool) (s *session, err error) {
	ours := m.opt.Versions
	q := &peerv1.HelloRequest{Versions: &peerv1.VersionRange{Min: uint32(oldest),
		Max: uint32(ours.Max)}, Boot: m.opt.Boot[:], Node: m.opt.Node,
		Endpoint: m.Endpoint(), HostBoot: m.opt.HostBoot, Rails: m.opt.Rails(),
		ControlAddresses: m.Addresses(), Features: m.opt.Features, Release: m.opt.Version,
		Acquaint: acquaint}
	err = m.call(ctx, endpoint, func(ctx context.Context, c peerv1.PeerClient) error {
		var from grpcpeer.Peer
		var trailer metadata.MD
		r, err := c.Hello(ctx, q, grpc.Peer(&from), grpc.Trailer(&trailer))
		if err != nil {
			return refusedUs(err, trailer)
		}
		if _, err = m.choose(wire.Versions{Min: wire.Version(r.Version),
			Max: wire.Version(r.Version)}, endpoint, checkedRelease(r.Release)); err != nil {
			return err
		}
		id, err := m.identify(&from)
		if err != nil {
			return err
		}
		if len(r.Boot) != len(transfer.Boot{}) {
			return fmt.Errorf("hello: boot of %d bytes: %w", len(r.Boot), wire.ErrMalformed)
		}
		boot := transfer.Boot(r.Boot)
		if boot == m.opt.Boot {
			return nil
		}
		m.supersede(endpoint, boot)
		share := m.share(boot, id)
		q.KeyShare, q.Versions.Min = share[:], uint32(ours.Min)
		if r, err = c.Hello(ctx, q, grpc.Peer(&from), grpc.Trailer(&trailer)); err != nil {
			return refusedUs(err, trailer)
		}
		if again, ierr := m.identify(&from); ierr != nil || again != id {
			return fmt.Errorf("hello: two certificates in one conversation: several processes answer "+
				"there: %w", wire.ErrRefused)
		}
		ver := wire.Version(r.Version)
		if ver < ours.Min || ver > ours.Max {
			return fmt.Errorf("hello: the peer chose %s, we speak %s: %w", ver, ours, wire.ErrVersion)
		}
		if !bytes.Equal(r.Boot, boot[:]) {
			return fmt.Errorf("hello: boot %s, then %x: several processes answer there: %w", boot, r.Boot,
				wire.ErrRefused)
		}
		// What we dialed is what reaches it from here, and what requests name.
		w := who{id: id, from: sourceOf(&from), acquaint: acquaint}
		s, err = m.meet(w, hello{version: ver, boot: boot, dialed: endpoint, endpoint: endpoint,
			node: r.Node, host: r.HostBoot, rails: r.Rails, addrs: r.ControlAddresses,
			share: r.KeyShare, build: build{r.Release, r.Features}})
		return err
	})
	return s, err
}

// Describe queries boot for the layout behind a geometry hash; of several the one with that
// fingerprint, unless it is zero. The answer is foreign: an older peer ignores fingerprints.
func (m *Mesh) Describe(ctx context.Context, boot transfer.Boot, geometry,
	fingerprint [32]byte) (layout []byte, err error) {
	if boot == m.opt.Boot {
		if b, ok := m.opt.Handler.Describe(geometry, fingerprint); ok {
			return b, nil
		}
		return nil, fmt.Errorf("peer: describe %x: no such layout here", geometry)
	}
	s := m.session(boot)
	if s == nil {
		return nil, fmt.Errorf("peer: describe %x: %s: %w", geometry, boot, ErrUnknown)
	}
	s.mu.Lock()
	endpoint := s.whereLocked()
	s.mu.Unlock()
	err = m.call(ctx, endpoint, func(ctx context.Context, c peerv1.PeerClient) error {
		q := &peerv1.DescribeRequest{Geometry: geometry[:]}
		if fingerprint != [32]byte{} {
			q.Fingerprint = fingerprint[:]
		}
		r, err := c.Describe(ctx, q)
		layout = r.GetLayout()
		return err //nolint:wrapcheck // call names the endpoint
	})
	return layout, err
}

// Probe queries the identity of the sidecar at endpoint.
func (m *Mesh) Probe(ctx context.Context, endpoint string) (r *peerv1.ProbeReply, err error) {
	err = m.call(ctx, endpoint, func(ctx context.Context, c peerv1.PeerClient) error {
		r, err = c.Probe(ctx, &peerv1.ProbeRequest{})
		return err //nolint:wrapcheck // call names the endpoint
	})
	return r, err
}
