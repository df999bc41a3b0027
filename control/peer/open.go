// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// laneMagic begins every control lane, and no HTTP/2 preface or TLS record.
var laneMagic = []byte("HLLO")

const tlsHandshake = 0x16 // the type of the first TLS record

var errFirstBytes = errors.New("peer: the first bytes are of no protocol served here")

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

// open finds out what a connection is, and has its other end prove itself.
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

// prove serves a connection, a control lane until its end. given: gRPC has it now.
func (m *Mesh) prove(c net.Conn, v *admit.Visit, calls bool) (given bool, err error) {
	if err := c.SetDeadline(time.Now().Add(openTimeout)); err != nil {
		return false, fmt.Errorf("peer: open: %w", err)
	}
	first := &replayConn{Conn: c}
	if err := first.peek(len(laneMagic)); err != nil {
		return false, err
	}
	creds := m.opt.Credentials
	switch {
	case bytes.Equal(first.head, laneMagic):
		return false, m.proveLane(first, c, v)
	case calls && creds != nil:
		if first.head[0] == tlsHandshake {
			v.Spoke()
		} // else what TLS answers tells the caller that a key is missing
		conf := creds.Server()
		conf.NextProtos = []string{"h2"}
		tc := tls.Server(first, conf)
		if err := tc.HandshakeContext(m.ctx); err != nil {
			return false, fmt.Errorf("peer: open: %w", err)
		}
		if !v.Proved() {
			return false, net.ErrClosed
		}
		return m.give(tc, c), nil
	case calls:
		// Without credentials every process of this host is a member. To one that speaks TLS gRPC says what it is.
		if !v.Proved() {
			return false, net.ErrClosed
		}
		return m.give(first, c), nil
	}
	return false, errFirstBytes
}

// give hands a proved connection to gRPC.
func (m *Mesh) give(proved, c net.Conn) bool {
	return c.SetDeadline(time.Time{}) == nil && m.calls.give(&callConn{Conn: proved, done: func() { m.forget(c) }})
}

// proveLane opens a control lane and serves it until its end.
func (m *Mesh) proveLane(rw io.ReadWriter, c net.Conn, v *admit.Visit) error {
	var s *session
	o, err := wire.Accept(rw, wire.AcceptParams{Purpose: wire.PurposeControl,
		Lookup: func(boot transfer.Boot) ([32]byte, transfer.Boot, bool) {
			if s = m.session(boot); s == nil {
				return [32]byte{}, transfer.Boot{}, false
			}
			v.Spoke()
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.info.Key, m.opt.Boot, true
		},
		Attach: func(*wire.Hello) ([]byte, error) { return s.mine[:], nil }})
	if err != nil {
		return fmt.Errorf("peer: control lane: %w", err)
	}
	if !v.Proved() {
		return net.ErrClosed
	}
	if err = c.SetDeadline(time.Time{}); err != nil {
		return fmt.Errorf("peer: control lane: %w", err)
	}
	return m.laneUp(s, c, "", o.Attach, true)
}

// replayConn reads the bytes again that told what the connection is.
type replayConn struct {
	net.Conn
	head []byte
	at   int
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
	return c.Conn.Read(b) //nolint:wrapcheck // a connection's own errors
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
