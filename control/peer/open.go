// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// ALPN names: the purpose of a TLS connection.
const (
	laneProtocol = "kvspray-lane"
	callProtocol = "h2"
)

// laneOverTLS is the version range that answers a lane without TLS. Inside TLS the versions are
// those of all lanes.
var laneOverTLS = wire.Versions{Min: wire.V(2, 0), Max: wire.V(2, 0)}

// laneMagic begins every control lane, and no HTTP/2 preface or TLS record.
var laneMagic = []byte("HLLO")

var errFirstBytes = errors.New("peer: the first bytes belong to no protocol served here")

// accept takes connections of one listener. calls: gRPC is served there too.
func (m *Mesh) accept(ln net.Listener, calls bool) {
	for {
		c, err := ln.Accept()
		if err != nil {
			if m.ctx.Err() != nil || errors.Is(err, net.ErrClosed) { // SetControl closes some
				return
			}
			m.refused.Note(slog.LevelWarn, "accept", "address", ln.Addr().String(), "err", err)
			select { // out of descriptors: let some go
			case <-time.After(redialFirst):
				continue
			case <-m.ctx.Done():
				return
			}
		}
		m.mu.Lock()
		if m.closed || len(m.conns) >= maxConns {
			m.mu.Unlock()
			_ = c.Close()
			continue
		}
		m.conns[c] = true
		m.wg.Go(func() { m.open(c, calls) })
		m.mu.Unlock()
	}
}

func (m *Mesh) forget(c net.Conn) {
	_ = c.Close()
	m.mu.Lock()
	delete(m.conns, c)
	m.mu.Unlock()
}

// open determines the protocol of a connection and has its other end prove itself.
func (m *Mesh) open(c net.Conn, calls bool) {
	v := m.gate.Enter(c)
	given, err := m.prove(c, v, calls)
	open := v.Leave() // false: closed for another one, which is nothing that this end did wrong
	if given {
		return // gRPC closes it
	}
	m.forget(c)
	if err != nil && open && m.ctx.Err() == nil {
		m.refused.Note(slog.LevelDebug, "connection refused", "from", c.RemoteAddr().String(), "err", err)
	}
}

// prove serves a connection; a control lane until its end. given: gRPC owns it now.
func (m *Mesh) prove(c net.Conn, v *admit.Visit, calls bool) (given bool, err error) {
	if err := c.SetDeadline(time.Now().Add(openTimeout)); err != nil {
		return false, fmt.Errorf("peer: open: %w", err)
	}
	first := &replayConn{Conn: c}
	if err := first.peek(len(laneMagic)); err != nil {
		return false, err
	}
	creds := m.opt.Credentials
	if creds != nil && !v.Known() {
		first.turns, first.visit = m.turns, v
		defer first.rest()
	}
	switch {
	case bytes.Equal(first.head, laneMagic) && creds == nil:
		return false, m.proveLane(first, c, nil, v)
	case bytes.Equal(first.head, laneMagic):
		_, err := wire.Accept(first, wire.AcceptParams{Purpose: wire.PurposeControl,
			Versions: laneOverTLS})
		return false, fmt.Errorf("peer: a control lane without TLS: the peer's release is too old: "+
			"upgrade it: %w", err)
	case creds != nil:
		conf := creds.Server()
		conf.SessionTicketsDisabled = true // each opening proves itself
		if conf.NextProtos = []string{laneProtocol}; calls {
			conf.NextProtos = append(conf.NextProtos, callProtocol)
		}
		conf.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			offers := func(proto string) bool {
				return slices.Contains(hello.SupportedProtos,
					proto)
			}
			if slices.ContainsFunc(conf.NextProtos, offers) {
				v.Spoke()
			}
			return nil, nil //nolint:nilnil // conf stays in use
		}
		// The answer to a caller without TLS shows that a key is missing.
		tc := tls.Server(first, conf)
		if err := tc.HandshakeContext(m.ctx); err != nil {
			return false, fmt.Errorf("peer: open: %w", err)
		}
		if tc.ConnectionState().NegotiatedProtocol == laneProtocol {
			return false, m.proveLane(tc, c, &overTLS{tc, first}, v)
		}
		if !calls || !v.Proved() {
			return false, net.ErrClosed
		}
		first.free()
		return m.give(tc, c), nil
	case calls:
		// Without credentials every process of this host is a member. gRPC answers a TLS client with an
		// error that names the cause.
		if !v.Proved() {
			return false, net.ErrClosed
		}
		return m.give(first, c), nil
	}
	return false, errFirstBytes
}

// give hands a proved connection to gRPC.
func (m *Mesh) give(proved, c net.Conn) bool {
	return c.SetDeadline(time.Time{}) == nil && m.calls.give(&callConn{Conn: proved,
		done: func() { m.forget(c) }})
}

// proveLane opens a control lane and serves it until its end.
func (m *Mesh) proveLane(rw io.ReadWriter, c net.Conn, over *overTLS, v *admit.Visit) error {
	var s *session
	binding, id, err := over.binding()
	if err != nil {
		return err
	}
	o, err := wire.Accept(rw, wire.AcceptParams{Purpose: wire.PurposeControl, Binding: binding,
		Lookup: func(boot transfer.Boot) ([32]byte, transfer.Boot, bool) {
			if s = m.session(boot); s == nil {
				return [32]byte{}, transfer.Boot{}, false
			}
			v.Spoke()
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.info.Key, m.opt.Boot, s.id == id // a boot belongs to the certificate that it came with
		},
		Attach: func(*wire.Hello) ([]byte, error) { return s.mine[:], nil },
		Admit:  func() error { return s.admits() }})
	if err != nil {
		return fmt.Errorf("peer: control lane: %w", err)
	}
	if !v.Proved() {
		return net.ErrClosed
	}
	if over != nil {
		over.under.free()
	}
	if err = c.SetDeadline(time.Time{}); err != nil {
		return fmt.Errorf("peer: control lane: %w", err)
	}
	return m.laneUp(s, c, over, "", o.Attach, true)
}

// admits refuses a lane beyond the limit, before the other end receives the confirmation.
func (s *session) admits() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.lanes) >= maxLanes {
		return fmt.Errorf("peer: %s: session ended, or %d lanes are open, which is the limit: %w",
			s.boot, maxLanes,
			wire.ErrRefused)
	}
	return nil
}

// overTLS is TLS 1.3 over a connection; nil: there is none, on loopback without credentials.
type overTLS struct {
	*tls.Conn
	under *replayConn
}

const (
	bindingLabel = "EXPORTER-kvspray-control-lane" // RFC 9266 uses the exporter so
	bindingBytes = 32
)

// binding is a value that only the two ends of this TLS session have, and the certificate of the
// other end. The lane's proof covers the value, so that a proof made on one session is useless on
// another.
func (s *overTLS) binding() ([]byte, identity, error) {
	if s == nil {
		return nil, identity{}, nil
	}
	state := s.ConnectionState()
	if len(state.PeerCertificates) == 0 {
		return nil, identity{}, fmt.Errorf("peer: control lane without a certificate: %w",
			wire.ErrRefused)
	}
	b, err := state.ExportKeyingMaterial(bindingLabel, nil, bindingBytes)
	if err != nil {
		return nil, identity{}, fmt.Errorf("peer: control lane: %w", err)
	}
	return b, keys.Identity(state.PeerCertificates[0]), nil
}

// secure makes the TLS session of a dialed control lane; nil without credentials.
func (m *Mesh) secure(ctx context.Context, c net.Conn, addr string) (*overTLS, error) {
	creds := m.opt.Credentials
	if creds == nil {
		return nil, nil //nolint:nilnil // a nil one is none
	}
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("address %q: %w", addr, err)
	}
	conf := creds.Client(host)
	conf.NextProtos = []string{laneProtocol}
	under := &replayConn{Conn: c}
	tc := tls.Client(under, conf)
	if err := tc.HandshakeContext(ctx); err != nil {
		if alert := tls.AlertError(0); errors.As(err, &alert) && alert == alertNoProtocol {
			err = fmt.Errorf("the peer's release has control lanes without TLS: upgrade it: %w", err)
		}
		return nil, err //nolint:wrapcheck // the caller says what it was for
	}
	return &overTLS{tc, under}, nil
}

const alertNoProtocol = tls.AlertError(120) // no_application_protocol, RFC 7301

// replayConn returns the peeked bytes again. Once it carries a lane, it writes through the lane.
type replayConn struct {
	net.Conn
	head []byte
	at   int
	lane *lane // set before the lane is used

	// Of an unproved connection, which computes only while it has one of turns. See Mesh.turns.
	turns chan struct{}
	visit *admit.Visit
	since time.Time // it has a turn; zero: it has none
}

// turnPause is the longest time that a returned turn stays unused.
const turnPause = 10 * time.Millisecond

// rest returns the turn, which then stays unused for as long as it was used: unproved connections
// together take half of the processors that turns stand for.
func (c *replayConn) rest() {
	if !c.since.IsZero() {
		turns := c.turns
		time.AfterFunc(min(time.Since(c.since), turnPause), func() { <-turns })
		c.since = time.Time{}
	}
}

// free ends the taking of turns.
func (c *replayConn) free() {
	c.rest()
	c.turns = nil
}

// read waits for bytes without a turn, and then for a turn.
func (c *replayConn) read(b []byte) (int, error) {
	if c.turns == nil {
		return c.Conn.Read(b) //nolint:wrapcheck // a connection's own errors
	}
	c.rest()
	n, err := c.Conn.Read(b)
	c.turns <- struct{}{}
	if c.since = time.Now(); err == nil && !c.visit.In() {
		err = net.ErrClosed // it was closed for another one while it waited
	}
	return n, err //nolint:wrapcheck // as above
}

func (c *replayConn) Write(b []byte) (int, error) {
	if c.lane == nil {
		return c.Conn.Write(b) //nolint:wrapcheck // a connection's own errors
	}
	if !c.lane.put(b) {
		return 0, net.ErrClosed
	}
	return len(b), nil
}

// peek reads n bytes that Read returns again.
func (c *replayConn) peek(n int) error {
	c.head = make([]byte, n)
	if _, err := io.ReadFull(c.Conn, c.head); err != nil {
		return fmt.Errorf("peer: open: %w", err)
	}
	return nil
}

func (c *replayConn) Read(b []byte) (int, error) {
	if c.at < len(c.head) {
		n := copy(b, c.head[c.at:])
		c.at += n
		return n, nil
	}
	return c.read(b)
}

// callConn is a connection of gRPC's.
type callConn struct {
	net.Conn
	done func()
}

func (c *callConn) Close() error { c.done(); return nil }

// shaken is the credentials of gRPC's server: the handshake is over when it gets a connection.
type shaken struct {
	credentials.TransportCredentials
}

func (shaken) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	level := credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity}
	info := credentials.TLSInfo{CommonAuthInfo: level}
	if tc, ok := c.(*callConn).Conn.(*tls.Conn); ok {
		info.State = tc.ConnectionState()
		info.SecurityLevel = credentials.PrivacyAndIntegrity
	}
	return c, info, nil
}

// callListener hands connections to the gRPC server.
type callListener struct {
	addr net.Addr
	in   chan net.Conn
	done chan struct{}
	once sync.Once
}

func newCallListener(addr net.Addr) *callListener {
	return &callListener{addr: addr, in: make(chan net.Conn), done: make(chan struct{})}
}

func (l *callListener) give(c net.Conn) bool {
	select {
	case l.in <- c:
		return true
	case <-l.done:
		return false
	}
}

func (l *callListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.in:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *callListener) Close() error   { l.once.Do(func() { close(l.done) }); return nil }
func (l *callListener) Addr() net.Addr { return l.addr }
