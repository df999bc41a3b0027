package opening

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/kvspray/kvspray/control/peer/hello"
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

const (
	bindingLabel = "EXPORTER-kvspray-control-lane" // RFC 9266 uses the exporter so
	bindingBytes = 32

	alertNoProtocol = tls.AlertError(120) // no_application_protocol, RFC 7301
)

// TLS is the TLS 1.3 session of a control lane. A nil TLS means none: on loopback without
// credentials.
type TLS struct {
	*tls.Conn
	under *conn
}

// Through makes the session write its records to w instead of the connection.
func (s *TLS) Through(w io.Writer) { s.under.out = w }

// binding returns a value that only the two ends of this TLS session have, and the certificate of
// the other end. The lane's proof covers the value, so that a proof made on one session is useless
// on another.
func (s *TLS) binding() ([]byte, hello.Identity, error) {
	if s == nil {
		return nil, hello.Identity{}, nil
	}
	state := s.ConnectionState()
	if len(state.PeerCertificates) == 0 {
		return nil, hello.Identity{}, fmt.Errorf("peer: control lane without a certificate: %w",
			wire.ErrRefused)
	}
	b, err := state.ExportKeyingMaterial(bindingLabel, nil, bindingBytes)
	if err != nil {
		return nil, hello.Identity{}, fmt.Errorf("peer: control lane: %w", err)
	}
	return b, keys.Identity(state.PeerCertificates[0]), nil
}

// Target is the other end of a lane that this process dials.
type Target struct {
	Boot    transfer.Boot
	Address string
}

// Dial makes a control lane of a dialed connection, with the key of s. It returns the attachment of
// the other end, and the TLS session if there are credentials. The caller closes c after an error.
func Dial(ctx context.Context, c net.Conn, cfg *Config, to Target, s Session) (attach []byte,
	over *TLS, err error) {
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	attach, over, err = dial(ctx, c, cfg, to, s)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	return attach, over, err
}

func dial(ctx context.Context, c net.Conn, cfg *Config, to Target, s Session) ([]byte,
	*TLS, error) {
	over, err := dialTLS(ctx, c, cfg.Credentials, to.Address)
	if err != nil {
		return nil, nil, err
	}
	binding, id, err := over.binding()
	if err != nil {
		return nil, nil, err
	}
	key, same := s.Key(id)
	if !same {
		return nil, nil, fmt.Errorf("its certificate differs from that of its hello: %w", wire.ErrRefused)
	}
	rw := c
	if over != nil {
		rw = over.Conn
	}
	o, err := wire.Dial(rw, wire.DialParams{Purpose: wire.PurposeControl, Self: cfg.Self,
		Peer: to.Boot, Key: key, Attach: s.Attachment(), Binding: binding})
	if err != nil {
		return nil, nil, err //nolint:wrapcheck // the caller names the lane
	}
	return o.Attach, over, nil
}

// dialTLS makes the TLS session of a dialed control lane; nil without credentials.
func dialTLS(ctx context.Context, c net.Conn, creds *keys.Credentials, addr string) (*TLS, error) {
	if creds == nil {
		return nil, nil //nolint:nilnil // a nil TLS means none
	}
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("address %q: %w", addr, err)
	}
	conf := creds.Client(host)
	conf.NextProtos = []string{laneProtocol}
	under := &conn{Conn: c}
	tc := tls.Client(under, conf)
	if err := tc.HandshakeContext(ctx); err != nil {
		if alert := tls.AlertError(0); errors.As(err, &alert) && alert == alertNoProtocol {
			err = fmt.Errorf("the peer's release has control lanes without TLS: upgrade it: %w", err)
		}
		return nil, err //nolint:wrapcheck // the caller names the lane
	}
	return &TLS{tc, under}, nil
}

// conn is a connection of which the first bytes were read already: Read returns them again.
type conn struct {
	net.Conn
	head []byte
	at   int
	out  io.Writer // nil: writes go to Conn; set before a lane is used

	// Of an unproved connection, which computes only while it holds a slot of cpu.
	cpu   chan struct{}
	visit *admit.Visit
	since time.Time // when it took a slot; zero: it has none
}

// maxRest is the longest time that a returned slot stays unused.
const maxRest = 10 * time.Millisecond

// yield returns the slot, which then stays unused for as long as it was used: unproved connections
// together take half of the processors that the slots stand for.
func (c *conn) yield() {
	if !c.since.IsZero() {
		cpu := c.cpu
		time.AfterFunc(min(time.Since(c.since), maxRest), func() { <-cpu })
		c.since = time.Time{}
	}
}

// unthrottle lets a proved connection compute without a slot.
func (c *conn) unthrottle() {
	c.yield()
	c.cpu = nil
}

// read waits for bytes without a slot, and then for a slot.
func (c *conn) read(b []byte) (int, error) {
	if c.cpu == nil {
		return c.Conn.Read(b) //nolint:wrapcheck // a connection's own errors
	}
	c.yield()
	n, err := c.Conn.Read(b)
	c.cpu <- struct{}{}
	if c.since = time.Now(); err == nil && !c.visit.In() {
		err = net.ErrClosed // the gate closed it, for another connection, while it waited
	}
	return n, err //nolint:wrapcheck // as above
}

func (c *conn) Write(b []byte) (int, error) {
	if c.out != nil {
		return c.out.Write(b) //nolint:wrapcheck // a connection's own errors
	}
	return c.Conn.Write(b) //nolint:wrapcheck // as above
}

// peek reads n bytes that Read returns again.
func (c *conn) peek(n int) error {
	c.head = make([]byte, n)
	if _, err := io.ReadFull(c.Conn, c.head); err != nil {
		return fmt.Errorf("peer: open: %w", err)
	}
	return nil
}

func (c *conn) Read(b []byte) (int, error) {
	if c.at < len(c.head) {
		n := copy(b, c.head[c.at:])
		c.at += n
		return n, nil
	}
	return c.read(b)
}
