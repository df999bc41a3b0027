// Package opening has connections between sidecars until both ends have proved themselves: the
// acceptor of calls and control lanes, and the dialing end of control lanes.
//
// One listener serves both kinds of connections, and the first bytes distinguish them. With
// credentials a connection is a TLS session whose ALPN name is its purpose. A control lane also
// proves the key that Hello has agreed on, over a value of its TLS session.
//
// Invariants: a connection is passed on only after its proof. Unproved connections are bounded by
// the gate (package admit), in time by Timeout, and in processor time: their handshakes share a few
// slots, so that members do not wait for the handshakes of others.
//
// Goroutines: one per listener, and one per accepted connection until its proof; that of a control
// lane serves it until its end. Wait joins them. Acceptor.mu is a leaf lock.
package opening

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// Timeout bounds one connection's opening.
const Timeout = 5 * time.Second

const (
	MaxUnproved = 1024     // accepted unproved connections
	maxSource   = 512      // of these, from one source
	maxConns    = 16 << 10 // accepted connections of all kinds
	cpuPart     = 4        // one processor in cpuPart is for unproved handshakes; one at least
)

// laneOverTLS is the version range that answers a lane without TLS. Inside TLS the versions are
// those of all lanes.
var laneOverTLS = wire.Versions{Min: wire.V(2, 0), Max: wire.V(2, 0)}

// laneMagic begins every control lane, and no HTTP/2 preface or TLS record.
var laneMagic = []byte("HLLO")

var errFirstBytes = errors.New("peer: the first bytes belong to no protocol served here")

// Session is what the opening of a control lane needs of the session with a peer.
type Session interface {
	// Key returns the key that the ends of a lane prove. False: the certificate is not the one with
	// which the peer's boot came.
	Key(id hello.Identity) (key [32]byte, ok bool)
	// Attachment is what this end attaches to the opening.
	Attachment() []byte
	// Admit refuses a lane after the proof, before the other end receives the confirmation.
	Admit() error
	// Serve takes over an accepted lane, and returns at its end. attach is the other end's.
	Serve(c net.Conn, over *TLS, attach []byte) error
}

// Config configures both ends. It is constant.
type Config struct {
	Self        transfer.Boot
	Credentials *keys.Credentials // nil: loopback only
	Gate        *admit.Gate       // of unproved connections
	Refused     *admit.Log        // of events that unproved connections can cause
	// Session finds the session with a boot.
	Session func(boot transfer.Boot) (Session, bool)
	// Call takes over a connection of calls, and calls closed at its end. False: it does not.
	Call func(c net.Conn, closed func()) bool
}

// NewGate makes the gate of an acceptor. Gates for other ports may share members.
func NewGate(members *admit.Members) *admit.Gate {
	return admit.New(admit.Limits{Unproved: MaxUnproved, PerSource: maxSource}, members)
}

// Acceptor accepts connections.
type Acceptor struct {
	cfg *Config
	ctx context.Context
	// One slot for each unproved connection that may compute at a time. The handshakes of all
	// connections in a gate would take every processor for longer than a member may wait.
	cpu chan struct{}
	wg  sync.WaitGroup

	mu     sync.Mutex // protects all below
	closed bool
	conns  map[net.Conn]bool // accepted, until closed
}

// NewAcceptor makes an acceptor that works until ctx ends.
func NewAcceptor(ctx context.Context, cfg *Config) *Acceptor {
	return &Acceptor{cfg: cfg, ctx: ctx, conns: map[net.Conn]bool{},
		cpu: make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/cpuPart))}
}

// Serve accepts the connections of ln in the background, until ln is closed. calls: gRPC is served
// there too. It must not be called after Close.
func (a *Acceptor) Serve(ln net.Listener, calls bool) {
	a.wg.Go(func() { a.accept(ln, calls) })
}

// Close closes all accepted connections. The listeners are closed by their owner.
func (a *Acceptor) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	for c := range a.conns {
		_ = c.Close()
	}
}

// Wait returns when all goroutines have ended, after Close and the end of the listeners and lanes.
func (a *Acceptor) Wait() { a.wg.Wait() }

// Conns are the open accepted connections.
func (a *Acceptor) Conns() (all []net.Conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for c := range a.conns {
		all = append(all, c)
	}
	return all
}

func (a *Acceptor) accept(ln net.Listener, calls bool) {
	failed := func(err error) {
		a.cfg.Refused.Note(slog.LevelWarn, "accept", "address", ln.Addr().String(), "err", err)
	}
	for c := range admit.Accepted(a.ctx.Done(), ln.Accept, failed) {
		a.mu.Lock()
		if a.closed || len(a.conns) >= maxConns {
			a.mu.Unlock()
			_ = c.Close()
			continue
		}
		a.conns[c] = true
		a.wg.Go(func() { a.open(c, calls) })
		a.mu.Unlock()
	}
}

func (a *Acceptor) forget(c net.Conn) {
	_ = c.Close()
	a.mu.Lock()
	delete(a.conns, c)
	a.mu.Unlock()
}

// open determines the protocol of a connection and has its other end prove itself.
func (a *Acceptor) open(c net.Conn, calls bool) {
	v := a.cfg.Gate.Enter(c)
	given, err := a.prove(c, v, calls)
	open := v.Leave() // false: the gate closed it for another one, which is no error of the other end
	if given {
		return // gRPC closes it
	}
	a.forget(c)
	if err != nil && open && a.ctx.Err() == nil {
		a.cfg.Refused.Note(slog.LevelDebug, "connection refused", "from", c.RemoteAddr().String(),
			"err", err)
	}
}

// prove serves a connection; a control lane until its end. given: gRPC owns it now.
func (a *Acceptor) prove(c net.Conn, v *admit.Visit, calls bool) (given bool, err error) {
	if err := c.SetDeadline(time.Now().Add(Timeout)); err != nil {
		return false, fmt.Errorf("peer: open: %w", err)
	}
	first := &conn{Conn: c}
	if err := first.peek(len(laneMagic)); err != nil {
		return false, err
	}
	creds := a.cfg.Credentials
	if creds != nil && !v.Known() {
		first.cpu, first.visit = a.cpu, v
		defer first.yield()
	}
	switch {
	case bytes.Equal(first.head, laneMagic) && creds == nil:
		return false, a.proveLane(first, c, nil, v)
	case bytes.Equal(first.head, laneMagic):
		_, err := wire.Accept(first, wire.AcceptParams{Purpose: wire.PurposeControl,
			Versions: laneOverTLS})
		return false, fmt.Errorf("peer: a control lane without TLS: the peer's release is too old: "+
			"upgrade it: %w", err)
	case creds != nil:
		tc := tls.Server(first, a.serverTLS(v, calls))
		if err := tc.HandshakeContext(a.ctx); err != nil {
			return false, fmt.Errorf("peer: open: %w", err)
		}
		if tc.ConnectionState().NegotiatedProtocol == laneProtocol {
			return false, a.proveLane(tc, c, &TLS{tc, first}, v)
		}
		if !calls || !v.Proved() {
			return false, net.ErrClosed
		}
		first.unthrottle()
		return a.give(tc, c), nil
	case calls:
		// Without credentials every process of this host is a member. gRPC answers a TLS client with an
		// error that names the cause.
		if !v.Proved() {
			return false, net.ErrClosed
		}
		return a.give(first, c), nil
	}
	return false, errFirstBytes
}

// serverTLS configures a TLS session of the connection v. A caller without TLS gets an alert, which
// shows that its key is missing.
func (a *Acceptor) serverTLS(v *admit.Visit, calls bool) *tls.Config {
	conf := a.cfg.Credentials.Server()
	conf.SessionTicketsDisabled = true // each opening proves itself
	if conf.NextProtos = []string{laneProtocol}; calls {
		conf.NextProtos = append(conf.NextProtos, callProtocol)
	}
	conf.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		offers := func(proto string) bool { return slices.Contains(hello.SupportedProtos, proto) }
		if slices.ContainsFunc(conf.NextProtos, offers) {
			v.Spoke()
		}
		return nil, nil //nolint:nilnil // conf stays in use
	}
	return conf
}

// give passes a proved connection to gRPC.
func (a *Acceptor) give(proved, c net.Conn) bool {
	return c.SetDeadline(time.Time{}) == nil && a.cfg.Call(proved, func() { a.forget(c) })
}

// proveLane opens a control lane and serves it until its end.
func (a *Acceptor) proveLane(rw io.ReadWriter, c net.Conn, over *TLS, v *admit.Visit) error {
	var s Session
	binding, id, err := over.binding()
	if err != nil {
		return err
	}
	o, err := wire.Accept(rw, wire.AcceptParams{Purpose: wire.PurposeControl, Binding: binding,
		Lookup: func(boot transfer.Boot) (key [32]byte, self transfer.Boot, ok bool) {
			if s, ok = a.cfg.Session(boot); !ok {
				return key, self, false
			}
			v.Spoke()
			key, ok = s.Key(id)
			return key, a.cfg.Self, ok
		},
		Attach: func(*wire.Hello) ([]byte, error) { return s.Attachment(), nil },
		Admit:  func() error { return s.Admit() }})
	if err != nil {
		return fmt.Errorf("peer: control lane: %w", err)
	}
	if !v.Proved() {
		return net.ErrClosed
	}
	if over != nil {
		over.under.unthrottle()
	}
	if err = c.SetDeadline(time.Time{}); err != nil {
		return fmt.Errorf("peer: control lane: %w", err)
	}
	return s.Serve(c, over, o.Attach)
}
