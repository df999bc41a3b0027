package peer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/cluster"
	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/control/peer/opening"
	"github.com/kvspray/kvspray/control/peer/rpc"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// Mesh is the control connections of this process to its peers.
type Mesh struct {
	*core
	members      *admit.Members // addresses of members, for all gates
	opening      *opening.Config
	listeners    *listeners
	sessions     *sessions
	dialer       *dialer
	preconnector *preconnector
	loop         loop

	mu       sync.Mutex // protects all below
	started  bool
	closed   bool
	acceptor *opening.Acceptor
	grpc     *grpc.Server
	calls    *rpc.Listener
	cluster  cluster.Cluster // nil: none
}

// New checks the options. Nothing is bound before Listen or Start.
func New(opt Options) (*Mesh, error) {
	if opt.Boot == (transfer.Boot{}) || opt.Handler == nil || opt.Listen == "" {
		return nil, errors.New("peer: options need Boot, Handler and Listen")
	}
	if len(opt.Control) >= MaxAddrs {
		return nil, fmt.Errorf("peer: %d further control addresses, at most %d",
			len(opt.Control), MaxAddrs-1)
	}
	c := &core{opt: opt.withDefaults(), pings: opt.Pings.withDefaults()}
	opt = c.opt
	c.refused.Logger = opt.Log
	c.caller = rpc.Caller{Credentials: opt.Credentials, HostSilence: c.pings.HostSilence}
	l := &listeners{listen: opt.Listen, advertise: opt.Advertise, wanted: opt.Control,
		secure: opt.Credentials != nil, silence: c.pings.HostSilence}
	if err := l.check(); err != nil {
		return nil, err
	}
	var err error
	if c.secret, err = hello.NewSecret(opt.Boot); err != nil {
		return nil, err //nolint:wrapcheck // it names the secret
	}
	c.tasks.ctx, c.tasks.stop = context.WithCancel(context.Background())
	m := &Mesh{core: c, members: admit.NewMembers(), listeners: l, sessions: newSessions(c),
		loop: loop{core: c}}
	m.opening = &opening.Config{Self: opt.Boot, Credentials: opt.Credentials,
		Gate: opening.NewGate(m.members), Refused: &c.refused}
	m.dialer = &dialer{core: c, listeners: l, sessions: m.sessions, opening: m.opening,
		connecting: map[string]bool{}}
	m.opening.Session = m.dialer.accepting
	m.preconnector = newPreconnector(m.dialer)
	return m, nil
}

func (o Options) withDefaults() Options {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Rails == nil {
		o.Rails = func() []*peerv1.Rail { return nil }
	}
	if o.Versions == (wire.Versions{}) {
		o.Versions = hello.Protocol
	}
	if o.Refused == nil {
		o.Refused = func() {}
	}
	return o
}

// Listen binds the addresses. Endpoint is valid from then on. No connection is answered and no
// event sent before Start, so that a process that must bind more can still give up.
func (m *Mesh) Listen(ctx context.Context) error { return m.listeners.bind(ctx) }

// Start listens, unless Listen was called, and serves until Close. ctx bounds the start only.
func (m *Mesh) Start(ctx context.Context) (err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.started || m.closed {
		return errors.New("peer: already started, or closed")
	}
	if m.listeners.bound() == nil {
		if err = m.listeners.bind(ctx); err != nil {
			return err
		}
	}
	if err = m.joinLocked(); err != nil {
		m.listeners.close()
		return err
	}
	m.started = true
	m.calls = rpc.NewListener(m.listeners.bound())
	m.opening.Call = m.calls.Give
	m.grpc = rpc.NewServer(newService(m.dialer))
	m.tasks.run(func() { _ = m.grpc.Serve(m.calls) })
	m.acceptor = opening.NewAcceptor(m.tasks.ctx, m.opening)
	m.listeners.start(m.acceptor.Serve)
	m.tasks.run(m.maintain)
	return nil
}

func (m *Mesh) joinLocked() (err error) {
	if m.opt.Join == nil {
		return nil
	}
	m.cluster, err = m.opt.Join(cluster.Member{Node: m.opt.Node, Endpoint: m.listeners.name(),
		Boot: m.opt.Boot, Version: m.opt.Version}, m.members)
	switch {
	case errors.Is(err, cluster.ErrListen):
		return fmt.Errorf("peer: %w: name an address of this host%s with a free port, or off", err,
			ownAddresses())
	case err != nil:
		return fmt.Errorf("peer: %w", err)
	}
	return nil
}

// Close ends everything and joins it. Peers see their lanes end.
func (m *Mesh) Close() error {
	m.mu.Lock()
	started, closed := m.started, m.closed
	m.closed = true
	m.mu.Unlock()
	if closed {
		return nil
	}
	m.listeners.close()
	m.tasks.close()
	if !started {
		return nil
	}
	m.acceptor.Close()
	m.sessions.close(net.ErrClosed)
	_ = m.calls.Close()
	m.grpc.Stop()
	var err error
	if m.cluster != nil {
		err = m.cluster.Leave()
	}
	m.acceptor.Wait()
	m.tasks.wg.Wait()
	return err
}

// Endpoint is the address that peers dial; known after Listen.
func (m *Mesh) Endpoint() string { return m.listeners.name() }

// Addresses are the control addresses for peers, the endpoint first.
func (m *Mesh) Addresses() []string { return m.listeners.addresses() }

// SetControl replaces Options.Control, before Listen or later. Lanes to removed addresses end with
// their links. The error names the addresses that could not be bound; a further call tries them
// again. The caller informs the peers: see Addresses and PeerAddresses.
func (m *Mesh) SetControl(ctx context.Context, addrs []string) error {
	return m.listeners.replace(ctx, addrs)
}

// PeerAddresses sets the control addresses that a peer announced. If this side dials the peer's
// lanes, the missing ones follow.
func (m *Mesh) PeerAddresses(boot transfer.Boot, addrs []string) error {
	if err := hello.CheckAddresses(addrs); err != nil {
		return fmt.Errorf("peer: control addresses of %s: %w", boot, err)
	}
	s := m.sessions.get(boot)
	if s == nil {
		return fmt.Errorf("peer: control addresses of %s: %w", boot, ErrUnknown)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Equal(s.addrs, addrs) {
		s.addrs, s.lastDial = slices.Clone(addrs), time.Time{} // the maintainer's next tick
	}
	return nil
}

// Lanes are the control lanes to a peer, each with its local and its remote address.
func (m *Mesh) Lanes(boot transfer.Boot) (out []string) {
	s := m.sessions.get(boot)
	if s == nil {
		return nil
	}
	for _, l := range s.channel.Lanes() {
		out = append(out, l.String())
	}
	slices.Sort(out)
	return out
}

// LinkDown reports that the link of a local address is down. Control lanes over it end at once,
// rather than after a ping without an answer, and their frames are sent again on other lanes.
func (m *Mesh) LinkDown(addr net.IP) {
	ip, ok := netip.AddrFromSlice(addr)
	if !ok {
		return
	}
	for _, s := range m.sessions.list() {
		for _, l := range s.channel.Lanes() {
			if l.Local().WithZone("") == ip.Unmap() {
				l.Fail(errLinkDown) // its reader removes it and sends its frames again
			}
		}
	}
}

var errLinkDown = errors.New("peer: the link of this address is down")

// Members is the members that gossip lists, this node included; nil without gossip. Advisory.
func (m *Mesh) Members() []cluster.Member {
	if c := m.Cluster(); c != nil {
		return c.Members()
	}
	return nil
}

// Cluster is the membership of this process; nil: it has none, or has not started.
func (m *Mesh) Cluster() cluster.Cluster {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.cluster
}

// PeerKey is the key that lanes to and from boot prove. False: no handshake with that boot.
func (m *Mesh) PeerKey(boot transfer.Boot) ([32]byte, bool) {
	if boot == m.opt.Boot {
		return m.selfKey(), true
	}
	s := m.sessions.get(boot)
	if s == nil {
		return [32]byte{}, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.info.Key, true
}

// Connect connects to endpoint in the background. PeerUp or ConnectFailed follows; several calls
// for one endpoint may share one answer.
func (m *Mesh) Connect(endpoint string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.closed && m.started {
		m.dialer.start(endpoint)
	}
}

// Prefer sets the local address over which frames to boot are sent from now on, while a lane there
// is healthy; the zero address: any. The slice scheduler chooses the rail with the shortest queue.
func (m *Mesh) Prefer(boot transfer.Boot, addr netip.Addr) {
	if s := m.sessions.get(boot); s != nil {
		s.channel.Prefer(addr)
	}
}

// Send puts a frame on the control lanes to boot. It does not block. The caller must not change the
// frame's body any more; Send sets seq and ack. An accepted frame arrives once, or PeerDown with
// over follows.
func (m *Mesh) Send(boot transfer.Boot, f *peerv1.ControlFrame) error {
	if boot == m.opt.Boot {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.closed || !m.started {
			return fmt.Errorf("peer: send to this process: %w", net.ErrClosed)
		}
		return m.loop.send(f)
	}
	s := m.sessions.get(boot)
	if s == nil {
		return fmt.Errorf("peer: send to %s: %w: connect to its endpoint first", boot, ErrUnknown)
	}
	return s.channel.Send(f) //nolint:wrapcheck // it names the peer
}

// flushTick is the interval of the checks of Flush.
const flushTick = time.Millisecond

// Flush waits until every peer has acknowledged all frames sent to it, or returns ctx's error. A
// process calls it before Close, which would drop its last frames, a commit for example.
func (m *Mesh) Flush(ctx context.Context) error {
	tick := time.NewTicker(flushTick)
	defer tick.Stop()
	for m.sessions.unacked() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("peer: flush: %w", ctx.Err())
		}
	}
	return nil
}

// Describe queries boot for the layout behind a geometry hash; of several the one with that
// fingerprint, unless it is zero. The answer is foreign.
func (m *Mesh) Describe(ctx context.Context, boot transfer.Boot, geometry,
	fingerprint [32]byte) (layout []byte, err error) {
	if boot == m.opt.Boot {
		if b, ok := m.opt.Handler.Describe(geometry, fingerprint); ok {
			return b, nil
		}
		return nil, fmt.Errorf("peer: describe %x: no such layout here", geometry)
	}
	s := m.sessions.get(boot)
	if s == nil {
		return nil, fmt.Errorf("peer: describe %x: %s: %w", geometry, boot, ErrUnknown)
	}
	err = m.caller.Call(ctx, s.endpoint(), func(ctx context.Context, c peerv1.PeerClient) error {
		q := &peerv1.DescribeRequest{Geometry: geometry[:]}
		if fingerprint != [32]byte{} {
			q.Fingerprint = fingerprint[:]
		}
		r, err := c.Describe(ctx, q)
		layout = r.GetLayout()
		return err //nolint:wrapcheck // Call names the endpoint
	})
	return layout, err //nolint:wrapcheck // as above
}

// Probe queries the identity of the sidecar at endpoint.
func (m *Mesh) Probe(ctx context.Context, endpoint string) (r *peerv1.ProbeReply, err error) {
	err = m.caller.Call(ctx, endpoint, func(ctx context.Context, c peerv1.PeerClient) error {
		r, err = c.Probe(ctx, &peerv1.ProbeRequest{})
		return err //nolint:wrapcheck // Call names the endpoint
	})
	return r, err //nolint:wrapcheck // as above
}
