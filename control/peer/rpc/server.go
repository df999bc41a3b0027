// Package rpc has the gRPC connections between sidecars: a server for connections that package
// opening has accepted and proved, and short-lived connections for calls to peers.
//
// Invariant: the server never sees a connection that has not proved itself. The package starts no
// goroutines but those of gRPC; Listener.Close and grpc.Server.Stop end them.
package rpc

import (
	"crypto/tls"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/frame"
	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/wire"
)

const (
	maxStreams    = 64 // concurrent calls on one connection
	serverTimeout = 5 * time.Second
	idleTime      = time.Minute // until an idle connection is closed, and between keepalives
)

// NewServer makes the server of a service. Serve it on a Listener.
func NewServer(service peerv1.PeerServer) *grpc.Server {
	srv := grpc.NewServer(grpc.Creds(proved{insecure.NewCredentials()}),
		grpc.MaxRecvMsgSize(frame.Max), grpc.MaxConcurrentStreams(maxStreams),
		grpc.ConnectionTimeout(serverTimeout), grpc.KeepaliveParams(keepalive.ServerParameters{
			MaxConnectionIdle: idleTime, Time: idleTime, Timeout: serverTimeout}),
		grpc.WaitForHandlers(true))
	peerv1.RegisterPeerServer(srv, service)
	return srv
}

// conn is a connection of the server.
type conn struct {
	net.Conn
	closed func()
}

func (c *conn) Close() error { c.closed(); return nil }

// proved is the credentials of the server, which gets connections after their handshake.
type proved struct {
	credentials.TransportCredentials
}

func (proved) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	level := credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity}
	info := credentials.TLSInfo{CommonAuthInfo: level}
	if tc, ok := c.(*conn).Conn.(*tls.Conn); ok {
		info.State = tc.ConnectionState()
		info.SecurityLevel = credentials.PrivacyAndIntegrity
	}
	return c, info, nil
}

// Listener passes proved connections to the server.
type Listener struct {
	addr net.Addr
	in   chan net.Conn
	done chan struct{}
	once sync.Once
}

// NewListener makes a listener. addr is for the server's logs.
func NewListener(addr net.Addr) *Listener {
	return &Listener{addr: addr, in: make(chan net.Conn), done: make(chan struct{})}
}

// Give passes a connection to the server, which calls closed instead of closing it. False: the
// listener is closed, and the connection remains the caller's.
func (l *Listener) Give(c net.Conn, closed func()) bool {
	select {
	case l.in <- &conn{Conn: c, closed: closed}:
		return true
	case <-l.done:
		return false
	}
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.in:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *Listener) Close() error { l.once.Do(func() { close(l.done) }); return nil }

// Addr implements net.Listener.
func (l *Listener) Addr() net.Addr { return l.addr }

// Identity is that of a call's other end; zero without credentials.
func Identity(p *peer.Peer, creds *keys.Credentials) (id hello.Identity, err error) {
	if creds == nil {
		return id, nil
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(info.State.PeerCertificates) == 0 {
		return id, fmt.Errorf("peer: a call without a certificate: %w", wire.ErrRefused)
	}
	return keys.Identity(info.State.PeerCertificates[0]), nil
}

// Source is the address or network of a call's other end, for limits.
func Source(p *peer.Peer) netip.Prefix { return admit.SourceOf(admit.Address(p.Addr)) }
