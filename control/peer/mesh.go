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
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v5"
	"google.golang.org/grpc"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// Mesh is this process among its peers.
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

	mu         sync.Mutex // protects all below
	started    bool
	closed     bool
	endpoint   string
	served     net.Listener // of calls, and of control lanes
	control    []controlAt  // further ones, in the order in which peers are told
	sessions   map[transfer.Boot]*session
	connecting map[string]bool   // true: asked for again meanwhile
	conns      map[net.Conn]bool // accepted, until closed
	opening    int
	gone       map[transfer.Boot]bool
	goneOrder  []transfer.Boot
	selfQueue  []*peerv1.ControlFrame
	selfBusy   bool
}

// New checks the options. Nothing is bound before Start.
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
	if len(opt.Control) >= MaxAddrs {
		return nil, fmt.Errorf("peer: %d further control addresses, at most %d", len(opt.Control), MaxAddrs-1)
	}
	if err := opt.safe(); err != nil {
		return nil, err
	}
	m := &Mesh{opt: opt, log: opt.Log, pings: opt.Pings.withDefaults(), sessions: map[transfer.Boot]*session{}, connecting: map[string]bool{},
		conns: map[net.Conn]bool{}, gone: map[transfer.Boot]bool{}}
	if _, err := rand.Read(m.secret[:]); err != nil {
		return nil, fmt.Errorf("peer: secret: %w", err)
	}
	return m, nil
}

// safe refuses addresses that others can reach where nobody proves who he is.
func (o *Options) safe() error {
	if o.Credentials != nil {
		return nil
	}
	for _, a := range append([]string{o.Listen}, o.Control...) {
		if !loopback(a) {
			return fmt.Errorf("peer: peer.listen %s: %w: set peer.cluster_key_file ('kvspray keygen cluster') or peer.tls, or listen on 127.0.0.1", a, ErrUnsafe)
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

// Start binds and serves until Close. ctx bounds the start only.
func (m *Mesh) Start(ctx context.Context) (err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.started || m.closed {
		return errors.New("peer: started before, or closed")
	}
	var lns []net.Listener
	defer func() {
		if err != nil {
			for _, l := range lns {
				_ = l.Close()
			}
		}
	}()
	for i, addr := range append([]string{m.opt.Listen}, m.opt.Control...) {
		ln, lerr := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
		if lerr != nil {
			if errors.Is(lerr, syscall.EADDRINUSE) {
				lerr = fmt.Errorf("%w: another sidecar? give this one --listen, --http and --socket of its own", lerr)
			}
			return fmt.Errorf("peer: listen on %s: %w", addr, lerr)
		}
		lns = append(lns, ln)
		if i > 0 {
			m.control = append(m.control, controlAt{addr, ln})
		} else if m.endpoint, err = advertised(m.opt.Advertise, ln.Addr()); err != nil {
			return err
		}
	}
	if m.gossip, err = startGossip(m.opt, m.endpoint); err != nil {
		return err
	}
	m.ctx, m.stop = context.WithCancel(context.Background())
	m.served, m.started = lns[0], true
	m.calls = newCallListener(lns[0].Addr())
	m.grpc = m.newServer()
	m.wg.Go(func() { _ = m.grpc.Serve(m.calls) })
	for i, ln := range lns {
		m.wg.Go(func() { m.accept(ln, i == 0) })
	}
	m.wg.Go(m.keep)
	return nil
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

// Endpoint is what peers dial; known after Start.
func (m *Mesh) Endpoint() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.endpoint
}

// Members is who gossip says is there, this node included; nil without gossip. Advisory.
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

// share is our half of the key with a boot. It is bound to that boot and to the certificate that it shows, so that a third process that talks
// to both, in its own name or in that of one of them, learns nothing.
func (m *Mesh) share(boot transfer.Boot, id identity) (out [32]byte) {
	h := hmac.New(sha256.New, m.secret[:])
	h.Write([]byte("kvspray share 1"))
	h.Write(boot[:])
	h.Write(id[:])
	h.Sum(out[:0])
	return out
}

// pairKey is the same on both sides and for whoever called: the lower boot comes first.
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

// Send puts a frame on the control lanes to boot. It does not block; the frame's body must not change any more, its seq and ack are
// set here. A frame that was taken arrives once, or the peer is reported down for good.
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

// Flush waits until every peer has acknowledged all that was sent to it, or returns ctx's error. For the end of a process: what
// it said last, a commit for example, is worth nothing where Close overtakes it.
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

// sendSelf delivers in order from one goroutine, as a peer's frames would come.
func (m *Mesh) sendSelf(f *peerv1.ControlFrame) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	limit := MaxUnacked
	if ordinary(f) {
		limit -= Reserved
	}
	switch {
	case m.closed || !m.started:
		return fmt.Errorf("peer: send to ourselves: %w", net.ErrClosed)
	case len(m.selfQueue) >= limit:
		return fmt.Errorf("peer: send to ourselves: %w", ErrQueueFull)
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

// LinkDown says that the link of one of our addresses is down. Control lanes over it end now, rather than by a ping that nobody answers; what
// they carried goes out again on others.
func (m *Mesh) LinkDown(addr net.IP) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.sessions {
		s.mu.Lock()
		for _, l := range s.lanes {
			if a, ok := l.conn.LocalAddr().(*net.TCPAddr); ok && a.IP.Equal(addr) {
				l.fail(errLinkDown) // its reader drops it and sends again what it had
			}
		}
		s.mu.Unlock()
	}
}

var errLinkDown = errors.New("peer: the link of this address is down")

// Connect reaches endpoint in the background. PeerUp or ConnectFailed follows; several calls for one endpoint may share one answer.
func (m *Mesh) Connect(endpoint string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed || !m.started {
		return
	}
	if _, busy := m.connecting[endpoint]; busy {
		m.connecting[endpoint] = true
		return
	}
	if len(m.connecting) >= maxConnects {
		m.wg.Go(func() {
			m.opt.Handler.ConnectFailed(endpoint, fmt.Errorf("peer: connect to %s: %d connects under way already", endpoint, maxConnects))
		})
		return
	}
	m.connecting[endpoint] = false
	m.wg.Go(func() { m.connect(endpoint) })
}

// connect says hello, opens lanes, and gives the one answer to a Connect.
func (m *Mesh) connect(endpoint string) {
	s, err := m.hello(m.ctx, endpoint)
	if err == nil && s == nil { // ourselves
		m.connected(endpoint)
		key, _ := m.PeerKey(m.opt.Boot)
		m.opt.Handler.PeerUp(Peer{Boot: m.opt.Boot, Node: m.opt.Node, Endpoint: endpoint, HostBoot: m.opt.HostBoot, SameHost: true,
			Rails: m.opt.Rails(), Version: m.opt.Versions.Max, Features: m.opt.Features, Key: key})
		return
	}
	before := 0
	if err == nil {
		s.mu.Lock()
		s.dialled = true
		before = s.ups
		open := s.up && len(s.lanes) > 0
		s.mu.Unlock()
		if !open {
			err = m.dialLanes(m.ctx, s)
		}
	}
	again := m.connected(endpoint) // from here on another call gets an answer of its own
	if m.ctx.Err() != nil {
		return
	}
	if err != nil {
		m.opt.Handler.ConnectFailed(endpoint, err)
		return
	}
	// The session may have been up before, or have come up meanwhile under another name of the peer, or be over again.
	s.life.Lock()
	defer s.life.Unlock()
	s.mu.Lock()
	info, up, said := s.info, s.up && !s.closed, s.ups != before && s.saidAs == endpoint && !again
	s.mu.Unlock()
	info.Endpoint = endpoint
	switch {
	case said:
	case up:
		m.opt.Handler.PeerUp(info)
	default:
		m.opt.Handler.ConnectFailed(endpoint, fmt.Errorf("peer: connect to %s: its lanes are gone again: %w", endpoint, net.ErrClosed))
	}
}

// connected ends a connect, and reports whether somebody asked for it once more meanwhile: then what was said may have come too early.
func (m *Mesh) connected(endpoint string) (again bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	again = m.connecting[endpoint]
	delete(m.connecting, endpoint)
	return again
}

// dialLanes opens the lanes that are missing, all at once: the way to one address may be dead. It fails only if none is open in the end.
func (m *Mesh) dialLanes(ctx context.Context, s *session) error {
	s.mu.Lock()
	missing := s.missingLocked()
	s.mu.Unlock()
	errs := make([]error, len(missing))
	var wg sync.WaitGroup
	for i, to := range missing {
		wg.Go(func() {
			if errs[i] = m.dialLane(ctx, s, to); errs[i] != nil {
				m.log.Debug("control lane not opened", "peer", s.boot.String(), "address", to.addr, "err", errs[i])
			}
		})
	}
	wg.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.lanes) > 0 {
		return nil
	}
	return errors.Join(errs...)
}

// target is a control address of a peer; index is its place among them.
type target struct {
	addr  string
	index int
}

// missingLocked is the control addresses to which we hold no lane.
func (s *session) missingLocked() (out []target) {
	for i, a := range s.addrs {
		if !slices.ContainsFunc(s.lanes, func(l *lane) bool { return l.addr == a }) {
			out = append(out, target{a, i})
		}
	}
	return out
}

func (m *Mesh) dialLane(ctx context.Context, s *session, to target) error {
	if m.opt.Credentials == nil && !loopback(to.addr) {
		return fmt.Errorf("peer: control lane to %s: %w: set peer.cluster_key_file or peer.tls", to.addr, ErrUnsafe)
	}
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	c, err := m.dialFrom(ctx, m.localFor(to), to.addr)
	if err != nil {
		return fmt.Errorf("peer: control lane: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	s.mu.Lock()
	key, mine := s.info.Key, s.mine
	s.mu.Unlock()
	o, err := wire.Dial(c, wire.DialParams{Purpose: wire.PurposeControl, Self: m.opt.Boot, Peer: s.boot, Key: key, Attach: mine[:]})
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err == nil {
		err = m.laneUp(s, c, to.addr, o.Attach, nil)
	}
	if err != nil {
		_ = c.Close()
		return fmt.Errorf("peer: control lane to %s at %s: %w", s.boot, to.addr, err)
	}
	return nil
}

// localFor is the rail of ours that a lane to one of the peer's leaves by: the first to the first and so on, where the route would leave
// the choice open. nil: the route's choice.
func (m *Mesh) localFor(to target) net.IP {
	m.mu.Lock()
	defer m.mu.Unlock()
	if to.index == 0 || len(m.control) == 0 {
		return nil
	}
	host, _, err := net.SplitHostPort(m.control[(to.index-1)%len(m.control)].ln.Addr().String())
	if err != nil {
		return nil
	}
	return net.ParseIP(host)
}

// dialFrom dials from an address of ours, and from any where that one does not lead there.
func (m *Mesh) dialFrom(ctx context.Context, local net.IP, addr string) (net.Conn, error) {
	if local != nil {
		bound, cancel := context.WithTimeout(ctx, boundTimeout)
		defer cancel()
		if c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: local}}).DialContext(bound, "tcp", addr); err == nil {
			return c, nil
		}
	}
	return (&net.Dialer{}).DialContext(ctx, "tcp", addr) //nolint:wrapcheck // the caller says what it was for
}

// laneUp takes a lane that has proved itself, and starts its reader, or reads in this goroutine where read is given.
func (m *Mesh) laneUp(s *session, c net.Conn, addr string, attach []byte, inline func(func())) error {
	l, err := newLane(c)
	if err != nil {
		return err
	}
	l.addr = addr
	if len(attach) != incarnationBytes {
		return fmt.Errorf("peer: lane of %s attaches %d bytes, want %d: %w", s.boot, len(attach), incarnationBytes, wire.ErrMalformed)
	}
	theirs := [incarnationBytes]byte(attach)
	s.life.Lock()
	s.mu.Lock()
	if s.closed || len(s.lanes) >= maxLanes {
		s.mu.Unlock()
		s.life.Unlock()
		return fmt.Errorf("peer: %s: session over, or %d lanes open already", s.boot, maxLanes)
	}
	if s.met && s.theirs != theirs {
		// The peer had forgotten us, and counts from one again. So do we, in a new session.
		s.mu.Unlock()
		s.life.Unlock()
		m.end(s, false, errors.New("peer: the peer has begun a new session"))
		return fmt.Errorf("peer: %s has begun a new session: %w", s.boot, wire.ErrRefused)
	}
	s.met, s.theirs = true, theirs
	up, info := s.up, s.info
	s.up = true
	if !up {
		s.ups++
		s.saidAs = info.Endpoint
	}
	s.mu.Unlock()
	if !up {
		m.opt.Handler.PeerUp(info)
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		s.life.Unlock()
		return fmt.Errorf("peer: %s: session over", s.boot)
	}
	s.lanes = append(s.lanes, l)
	s.resendLocked()
	s.mu.Unlock()
	s.life.Unlock()
	read := func() {
		rerr := l.read(func(f *peerv1.ControlFrame) error { return s.take(l, f) })
		m.laneDown(s, l, rerr)
	}
	if inline != nil {
		inline(read)
		return nil
	}
	m.goUnlessClosed(read, func() { _ = c.Close() })
	return nil
}

// goUnlessClosed starts a goroutine that Close joins.
func (m *Mesh) goUnlessClosed(f, otherwise func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		otherwise()
		return
	}
	m.wg.Go(f)
}

func (m *Mesh) laneDown(s *session, l *lane, err error) {
	s.mu.Lock()
	s.dropLaneLocked(l)
	s.resendLocked()
	left := len(s.lanes)
	over := s.closed
	redial := left == 0 && s.dialled && !s.dialing && !over
	if redial {
		s.dialing = true
	}
	s.mu.Unlock()
	if over {
		return
	}
	if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
		m.log.Debug("control lane lost", "peer", s.boot.String(), "lanes_left", left, "err", err)
	}
	if redial {
		m.goUnlessClosed(func() { m.redial(s) }, func() {})
	}
}

// redial opens lanes again, with growing pauses, until it works or the session is over.
func (m *Mesh) redial(s *session) {
	defer func() {
		s.mu.Lock()
		s.dialing = false
		s.mu.Unlock()
	}()
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = redialFirst, redialMax
	wait.Reset()
	for {
		s.mu.Lock()
		endpoint, done := s.whereLocked(), s.closed || len(s.lanes) > 0
		s.mu.Unlock()
		if done || m.ctx.Err() != nil {
			return
		}
		// The same process may answer at its other addresses: the way to its endpoint may be what was lost.
		var others sync.WaitGroup
		others.Go(func() { _ = m.dialLanes(m.ctx, s) }) // what failed was logged
		got, err := m.hello(m.ctx, endpoint)
		others.Wait()
		if err == nil && got != nil {
			err = m.dialLanes(m.ctx, got)
			if err == nil && got != s {
				got.mu.Lock()
				got.dialled = true
				got.mu.Unlock()
			}
		}
		if err != nil {
			m.log.Debug("peer not reached again", "peer", s.boot.String(), "endpoint", endpoint, "err", err)
		}
		t := time.NewTimer(wait.NextBackOff())
		select {
		case <-t.C:
		case <-m.ctx.Done():
			t.Stop()
			return
		}
	}
}

// end closes a session, waits for the frame that the handler may be at, tells the handler, and forgets it. Only then can there be another
// session with the boot, so that its PeerUp comes after this PeerDown. superseded: there will be none.
func (m *Mesh) end(s *session, superseded bool, err error) {
	m.mu.Lock()
	if superseded && !m.gone[s.boot] {
		if len(m.goneOrder) >= maxGone {
			delete(m.gone, m.goneOrder[0])
			m.goneOrder = m.goneOrder[1:]
		}
		m.gone[s.boot] = true
		m.goneOrder = append(m.goneOrder, s.boot)
	}
	m.mu.Unlock()
	s.life.Lock()
	defer s.life.Unlock()
	s.mu.Lock()
	over, tell := s.closed, s.ups > 0 || superseded
	s.up = false
	s.mu.Unlock()
	s.close(err)
	s.mu.Lock()
	for s.delivering {
		s.quiet.Wait()
	}
	s.mu.Unlock()
	if !over && tell {
		m.opt.Handler.PeerDown(s.boot, true, err)
	}
	m.mu.Lock()
	if m.sessions[s.boot] == s {
		delete(m.sessions, s.boot)
	}
	m.mu.Unlock()
}

// supersede ends the sessions of other boots at an endpoint that now answers as boot. One whose lanes live is left alone: then the
// address is that of several processes.
func (m *Mesh) supersede(endpoint string, boot transfer.Boot) {
	var old []*session
	m.mu.Lock()
	for b, s := range m.sessions {
		if b != boot {
			s.mu.Lock()
			if (s.info.Endpoint == endpoint || s.claimed == endpoint) && len(s.lanes) == 0 {
				old = append(old, s)
			}
			s.mu.Unlock()
		}
	}
	m.mu.Unlock()
	for _, s := range old {
		m.end(s, true, fmt.Errorf("peer: %s answers as boot %s now", endpoint, boot))
	}
}

// suspect dials an endpoint at once where a caller claims it that another boot without lanes was at: what answers there is the proof.
func (m *Mesh) suspect(endpoint string, boot transfer.Boot) {
	var old []*session
	m.mu.Lock()
	for b, s := range m.sessions {
		if b != boot {
			s.mu.Lock()
			if s.whereLocked() == endpoint && len(s.lanes) == 0 && !s.dialing && !s.closed {
				s.dialing = true
				old = append(old, s)
			}
			s.mu.Unlock()
		}
	}
	m.mu.Unlock()
	for _, s := range old {
		m.goUnlessClosed(func() { m.redial(s) }, func() {})
	}
}

// keep is the slow tick: pings, PeerDown, missing lanes, forgetting.
func (m *Mesh) keep() {
	t := time.NewTicker(m.pings.Tick)
	defer t.Stop()
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-t.C:
		}
		m.mu.Lock()
		all := make([]*session, 0, len(m.sessions))
		for _, s := range m.sessions {
			all = append(all, s)
		}
		m.mu.Unlock()
		for _, s := range all {
			m.look(s, time.Now())
		}
	}
}

func (m *Mesh) look(s *session, now time.Time) {
	s.watch(now, m.pings)
	s.mu.Lock()
	away := time.Duration(0)
	if len(s.lanes) == 0 {
		away = now.Sub(s.since)
	}
	missing := away == 0 && s.dialled && !s.dialing && len(s.missingLocked()) > 0 && now.Sub(s.lastFill) >= redialMax
	// Where the other end dialled, it dials again; where it does not, it may not know that the lanes are gone.
	redial := away > 2*downAfter && !s.dialing && s.met
	if missing || redial {
		s.dialing, s.lastFill = true, now
	}
	s.mu.Unlock()
	switch {
	case away > forgetAfter:
		m.end(s, false, errors.New("peer: unreachable for "+forgetAfter.String()))
	case redial:
		m.goUnlessClosed(func() { m.redial(s) }, func() {})
	case missing:
		m.goUnlessClosed(func() {
			_ = m.dialLanes(m.ctx, s) // lanes are open; what failed was logged
			s.mu.Lock()
			s.dialing = false
			s.mu.Unlock()
		}, func() {})
	}
	if away < downAfter {
		return
	}
	s.life.Lock()
	defer s.life.Unlock()
	s.mu.Lock()
	tell := s.up && len(s.lanes) == 0
	if tell {
		s.up = false
	}
	s.mu.Unlock()
	if tell {
		m.opt.Handler.PeerDown(s.boot, false, fmt.Errorf("peer: %s has no control lane for %s", s.boot, away.Round(time.Millisecond)))
	}
}

// Close ends everything and joins it. Peers see their lanes end.
func (m *Mesh) Close() error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	m.closed = true
	if !m.started {
		m.mu.Unlock()
		return nil
	}
	m.stop()
	_ = m.served.Close()
	for _, c := range m.control {
		_ = c.ln.Close()
	}
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
