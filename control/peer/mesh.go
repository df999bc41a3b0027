// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/sys/usertimeout"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// Mesh is the control connections of this process to its peers.
type Mesh struct {
	opt    Options
	log    *slog.Logger
	pings  Pings
	secret [32]byte // makes our shares

	ctx    context.Context
	stop   context.CancelFunc
	wg     sync.WaitGroup
	grpc   *grpc.Server
	calls  *callListener
	gossip *gossip

	gate    *admit.Gate    // accepted unproved connections
	members *admit.Members // addresses of members, for all gates
	refused admit.Log      // of events that unproved connections can cause
	// One place for each unproved connection that may compute at a time. The handshakes of all
	// connections in a gate would take every processor for longer than a member may wait.
	turns chan struct{}

	waiting     atomic.Int64 // bytes of frames that wait for others, of all sessions
	mostWaiting int64
	stuckAfter  time.Duration
	shedding    atomic.Bool // shed runs

	mu         sync.Mutex // protects all below
	started    bool
	closed     bool
	endpoint   string
	served     net.Listener // of calls, and of control lanes
	control    []controlAt  // further ones, in the order in which they are announced
	sessions   map[transfer.Boot]*session
	connecting map[string]bool             // true: asked for again meanwhile
	conns      map[net.Conn]bool           // accepted, until closed
	meeting    map[transfer.Boot]bool      // members being connected
	missed     map[transfer.Boot]time.Time // members that failed, and when they are tried again
	gone       map[transfer.Boot]bool
	// addresses of sidecars whose release was refused; the log has each once
	olderSaid map[string]bool
	goneOrder []transfer.Boot
	selfQueue []*peerv1.ControlFrame
	selfBusy  bool
}

// New checks the options. Nothing is bound before Listen or Start.
func New(opt Options) (*Mesh, error) {
	if opt.Boot == (transfer.Boot{}) || opt.Handler == nil || opt.Listen == "" {
		return nil, errors.New("peer: options need Boot, Handler and Listen")
	}
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	if opt.Rails == nil {
		opt.Rails = func() []*peerv1.Rail { return nil }
	}
	if opt.Versions == (wire.Versions{}) {
		opt.Versions = Protocol
	}
	if opt.Refused == nil {
		opt.Refused = func() {}
	}
	if opt.Features == nil {
		opt.Features = Features
	}
	if len(opt.Control) >= MaxAddrs {
		return nil, fmt.Errorf("peer: %d further control addresses, at most %d",
			len(opt.Control), MaxAddrs-1)
	}
	if err := opt.safe(); err != nil {
		return nil, err
	}
	m := &Mesh{opt: opt, log: opt.Log, pings: opt.Pings.withDefaults(),
		sessions: map[transfer.Boot]*session{}, connecting: map[string]bool{},
		conns: map[net.Conn]bool{}, meeting: map[transfer.Boot]bool{},
		missed: map[transfer.Boot]time.Time{}, gone: map[transfer.Boot]bool{},
		olderSaid: map[string]bool{},
		members:   admit.NewMembers(), mostWaiting: maxWaiting, stuckAfter: stuckAfter}
	m.turns = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/turnsPart))
	m.gate = admit.New(admit.Limits{Unproved: maxOpening, PerSource: maxSource}, m.members)
	m.refused.Logger = opt.Log
	if _, err := rand.Read(m.secret[:]); err != nil {
		return nil, fmt.Errorf("peer: secret: %w", err)
	}
	return m, nil
}

// safe refuses addresses that other hosts can reach without credentials.
func (o *Options) safe() error {
	if o.Credentials != nil {
		return nil
	}
	for _, a := range append([]string{o.Listen}, o.Control...) {
		if !loopback(a) {
			return fmt.Errorf("peer: peer.listen %s: %w: set peer.cluster_key_file ('kvspray keygen "+
				"cluster') or peer.tls, or listen on 127.0.0.1", a, ErrUnsafe)
		}
	}
	return nil
}

func loopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// Listen binds the addresses. Endpoint is valid from then on. No connection is answered and no
// event sent before Start, so that a process that must bind more can still give up.
func (m *Mesh) Listen(ctx context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.listenLocked(ctx)
}

func (m *Mesh) listenLocked(ctx context.Context) (err error) {
	if m.served != nil || m.closed {
		return errors.New("peer: already listening, or closed")
	}
	var lns []net.Listener
	defer func() {
		if err != nil {
			for _, l := range lns {
				_ = l.Close()
			}
		}
	}()
	var control []controlAt
	for i, addr := range append([]string{m.opt.Listen}, m.opt.Control...) {
		ln, lerr := usertimeout.ListenConfig(m.pings.HostSilence).Listen(ctx, "tcp", addr)
		if lerr != nil {
			key := "peer.listen (--listen)"
			if i > 0 {
				key = "control lanes of a rail"
			}
			return fmt.Errorf("peer: %s: %w", key, withRemedy(addr, lerr))
		}
		lns = append(lns, ln)
		if i > 0 {
			control = append(control, controlAt{addr, ln})
		} else if m.endpoint, err = advertised(m.opt.Advertise, ln.Addr()); err != nil {
			return err
		}
	}
	m.served, m.control = lns[0], control
	return nil
}

// Start listens, unless Listen was called, and serves until Close. ctx bounds the start only.
func (m *Mesh) Start(ctx context.Context) (err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.started || m.closed {
		return errors.New("peer: already started, or closed")
	}
	if m.served == nil {
		if err = m.listenLocked(ctx); err != nil {
			return err
		}
	}
	if m.gossip, err = startGossip(m.opt, m.endpoint, m.members); err != nil {
		m.shutLocked()
		return err
	}
	m.ctx, m.stop = context.WithCancel(context.Background())
	m.started = true
	m.calls = newCallListener(m.served.Addr())
	m.grpc = m.newServer()
	m.wg.Go(func() { _ = m.grpc.Serve(m.calls) })
	m.wg.Go(func() { m.accept(m.served, true) })
	for _, c := range m.control {
		m.wg.Go(func() { m.accept(c.ln, false) })
	}
	m.wg.Go(m.keep)
	return nil
}

// shutLocked closes the listeners.
func (m *Mesh) shutLocked() {
	if m.served == nil {
		return
	}
	_ = m.served.Close()
	for _, c := range m.control {
		_ = c.ln.Close()
	}
}

// advertised is what peers dial.
func advertised(want string, bound net.Addr) (string, error) {
	if want == "" {
		return bound.String(), nil
	}
	host, port, err := net.SplitHostPort(want)
	if err != nil {
		return "", fmt.Errorf("peer: peer.advertise %q: %w: write host:port", want, err)
	}
	if port == "0" {
		if _, port, err = net.SplitHostPort(bound.String()); err != nil {
			return "", fmt.Errorf("peer: bound address: %w", err)
		}
	}
	return net.JoinHostPort(host, port), nil
}

// Endpoint is what peers dial; known after Listen.
func (m *Mesh) Endpoint() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.endpoint
}

// Members is the members that gossip lists, this node included; nil without gossip. Advisory.
func (m *Mesh) Members() []Member {
	m.mu.Lock()
	g := m.gossip
	m.mu.Unlock()
	return g.members()
}

// PeerKey is what lanes to and from boot prove. False: no handshake with that boot.
func (m *Mesh) PeerKey(boot transfer.Boot) ([32]byte, bool) {
	if boot == m.opt.Boot {
		return m.pairKey(boot, m.share(boot, identity{}), m.share(boot, identity{})), true
	}
	s := m.session(boot)
	if s == nil {
		return [32]byte{}, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.info.Key, true
}

func (m *Mesh) session(boot transfer.Boot) *session {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.sessions[boot]
}

// share is this side's half of the key with a boot. It is bound to that boot and to its
// certificate, so that a third process that talks to both, under its own name or that of one of
// them, learns nothing.
func (m *Mesh) share(boot transfer.Boot, id identity) (out [32]byte) {
	h := hmac.New(sha256.New, m.secret[:])
	h.Write([]byte("kvspray share 1"))
	h.Write(boot[:])
	h.Write(id[:])
	h.Sum(out[:0])
	return out
}

// pairKey is the same on both sides, whichever called: the lower boot is first.
func (m *Mesh) pairKey(boot transfer.Boot, ours, theirs [32]byte) (out [32]byte) {
	a, b := m.opt.Boot, boot
	if bytes.Compare(a[:], b[:]) > 0 {
		a, b, ours, theirs = b, a, theirs, ours
	}
	h := hmac.New(sha256.New, append(ours[:], theirs[:]...))
	h.Write(a[:])
	h.Write(b[:])
	h.Sum(out[:0])
	return out
}

// Send puts a frame on the control lanes to boot. It does not block. The caller must not change the
// frame's body any more; Send sets seq and ack. An accepted frame arrives once, or PeerDown with
// over follows.
func (m *Mesh) Send(boot transfer.Boot, f *peerv1.ControlFrame) error {
	if boot == m.opt.Boot {
		return m.sendSelf(f)
	}
	s := m.session(boot)
	if s == nil {
		return fmt.Errorf("peer: send to %s: %w: connect to its endpoint first", boot, ErrUnknown)
	}
	return s.send(f)
}

// flushTick is how often Flush looks.
const flushTick = time.Millisecond

// Flush waits until every peer has acknowledged all frames sent to it, or returns ctx's error. A
// process calls it before Close, which would drop its last frames, a commit for example.
func (m *Mesh) Flush(ctx context.Context) error {
	tick := time.NewTicker(flushTick)
	defer tick.Stop()
	for m.unacked() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("peer: flush: %w", ctx.Err())
		}
	}
	return nil
}

func (m *Mesh) unacked() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.sessions {
		s.mu.Lock()
		n := len(s.unacked)
		s.mu.Unlock()
		if n > 0 {
			return true
		}
	}
	return false
}

// sendSelf delivers in order from one goroutine, like frames of a peer.
func (m *Mesh) sendSelf(f *peerv1.ControlFrame) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	limit := MaxUnacked
	if ordinary(f) {
		limit -= Reserved
	}
	switch {
	case m.closed || !m.started:
		return fmt.Errorf("peer: send to this process: %w", net.ErrClosed)
	case len(m.selfQueue) >= limit:
		return fmt.Errorf("peer: send to this process: %w", ErrQueueFull)
	}
	m.selfQueue = append(m.selfQueue, f)
	if !m.selfBusy {
		m.selfBusy = true
		m.wg.Go(m.deliverSelf)
	}
	return nil
}

func (m *Mesh) deliverSelf() {
	m.mu.Lock()
	for len(m.selfQueue) > 0 && !m.closed {
		f := m.selfQueue[0]
		m.selfQueue = m.selfQueue[1:]
		m.mu.Unlock()
		m.opt.Handler.Control(m.opt.Boot, f)
		m.mu.Lock()
	}
	m.selfBusy, m.selfQueue = false, nil
	m.mu.Unlock()
}

// Close ends everything and joins it. Peers see their lanes end.
func (m *Mesh) Close() error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	m.closed = true
	m.shutLocked()
	if !m.started {
		m.mu.Unlock()
		return nil
	}
	m.stop()
	for c := range m.conns {
		_ = c.Close()
	}
	sessions := make([]*session, 0, len(m.sessions))
	for _, s := range m.sessions {
		sessions = append(sessions, s)
	}
	m.mu.Unlock()
	for _, s := range sessions {
		s.close(net.ErrClosed)
	}
	_ = m.calls.Close()
	m.grpc.Stop()
	err := m.gossip.close()
	m.wg.Wait()
	return err
}
