// Package httpgate serves HTTP behind a gate (package admit): it bounds connections, in all and for
// each source, and a new connection replaces the oldest one without a request.
//
// A connection counts as silent until the header of a request has come, and again after the answer.
// Connections without a whole header are therefore replaced first. One with a request is replaced
// only if all others of its source, or all others, have a request, too.
//
// Invariants: at most the gate's connections are open. No error of accept ends the server: a
// process that is out of descriptors serves again when it has some. Goroutines are those of
// net/http; Close ends them.
package httpgate

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/admit"
)

// Bounds of a server.
const (
	maxConns       = 256 // connections
	maxSource      = 128 // of these, from one source
	headerTimeout  = 5 * time.Second
	requestTimeout = 10 * time.Second
	idleTimeout    = time.Minute
	maxHeaderBytes = 64 << 10
	maxBodyBytes   = 64 << 10
)

// Options are of a Server.
type Options struct {
	Handler      http.Handler
	ReplyTimeout time.Duration // for an answer, from the end of the request's header
	// Trusted reports whether strangers may not displace a connection. Nil: there is none.
	Trusted func(net.Conn) bool
	Failed  func(error) // gets errors of accept
}

// Server is a server behind a gate.
type Server struct {
	o    Options
	gate *admit.Gate
	http http.Server
}

// New makes a server.
func New(o Options) *Server {
	s := &Server{o: o,
		gate: admit.New(admit.Limits{Unproved: maxConns, PerSource: maxSource}, nil)}
	bounded := http.MaxBytesHandler(o.Handler, maxBodyBytes)
	s.http = http.Server{ReadHeaderTimeout: headerTimeout, ReadTimeout: requestTimeout,
		WriteTimeout: o.ReplyTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			c := of(r)
			c.visit.Spoke()
			if !c.trusted {
				defer c.visit.Waits()
			}
			bounded.ServeHTTP(w, r)
		})}
	return s
}

// Serve accepts connections until Close, which is http.ErrServerClosed.
func (s *Server) Serve(ln net.Listener) error {
	l := &listener{Listener: ln, s: s, done: make(chan struct{})}
	return s.http.Serve(l) //nolint:wrapcheck // http's own
}

// Close closes the listener and all connections.
func (s *Server) Close() error { return s.http.Close() } //nolint:wrapcheck // http's own

type listener struct {
	net.Listener
	s    *Server
	done chan struct{}
	once sync.Once
}

func (l *listener) Accept() (net.Conn, error) {
	for c := range admit.Accepted(l.done, l.Listener.Accept, l.s.o.Failed) {
		g := &conn{Conn: c, visit: l.s.gate.Enter(c)}
		if l.s.o.Trusted != nil && l.s.o.Trusted(c) {
			g.trusted = true
			g.visit.Spoke()
		}
		return g, nil
	}
	return nil, net.ErrClosed
}

func (l *listener) Close() error {
	l.once.Do(func() { close(l.done) })
	return l.Listener.Close() //nolint:wrapcheck // the listener's own
}

// conn is one that is in the gate until it is closed.
type conn struct {
	net.Conn
	visit   *admit.Visit
	trusted bool
}

func (c *conn) Close() error {
	c.visit.Leave()
	return c.Conn.Close() //nolint:wrapcheck // a connection's own errors
}

// CloseWrite is for http, which ends an answer before the request's end with it.
func (c *conn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite() //nolint:wrapcheck // a connection's own errors
	}
	return nil
}

type connKey struct{}

func of(r *http.Request) *conn {
	c, ok := r.Context().Value(connKey{}).(*conn)
	if !ok {
		panic("httpgate: a request of another server")
	}
	return c
}

// Trusted reports whether a request of a Server came on a connection that is trusted.
func Trusted(r *http.Request) bool { return of(r).trusted }

// UID is the user of the process at the other end of a unix socket, from the kernel.
func UID(c net.Conn) (uid uint32, err error) {
	uc, ok := c.(*net.UnixConn)
	if !ok {
		return 0, fmt.Errorf("httpgate: a connection of %T has no user", c)
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("httpgate: peer's user: %w", err)
	}
	var cred *unix.Ucred
	cerr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if cerr != nil {
		err = cerr
	}
	if err != nil {
		return 0, fmt.Errorf("httpgate: peer's user: %w", err)
	}
	return cred.Uid, nil
}
