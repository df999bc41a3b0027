package gossip

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/kvspray/kvspray/internal/admit"
)

// Any host may open a stream to the gossip port, and memberlist has no limit: each costs a
// descriptor and a goroutine for ten seconds, and up to 20 MiB are kept before they are decrypted.
// So streams pass a gate, like the connections of the other ports.

const (
	gossipStreams = 64      // streams of others at once
	gossipSource  = 16      // of these, of one source
	streamBytes   = 2 << 20 // in one stream: a few hundred for each member
	bindTries     = 10      // to find one port that is free for both UDP and TCP
)

var errStream = errors.New("gossip: a stream exceeds its limit")

// gated is memberlist's own transport behind a gate.
type gated struct {
	*memberlist.NetTransport
	gate    *admit.Gate
	streams chan net.Conn
	dials   context.Context // ends connections to others
	leave   context.CancelFunc
	done    chan struct{}
	over    sync.Once
	wg      sync.WaitGroup
}

// newGated listens where c has it, and puts the port into c.
func newGated(c *memberlist.Config, members *admit.Members) (*gated, error) {
	conf := &memberlist.NetTransportConfig{BindAddrs: []string{c.BindAddr}, BindPort: c.BindPort,
		Logger: c.Logger}
	tries := 1
	if c.BindPort == 0 {
		tries = bindTries
	}
	var inner *memberlist.NetTransport
	var err error
	for range tries {
		if inner, err = memberlist.NewNetTransport(conf); err == nil {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("listen on %s port %d: %w", c.BindAddr, c.BindPort, err)
	}
	if c.BindPort == 0 {
		c.BindPort = inner.GetAutoBindPort()
		if c.AdvertisePort == 0 {
			c.AdvertisePort = c.BindPort
		}
	}
	t := &gated{NetTransport: inner, streams: make(chan net.Conn), done: make(chan struct{}),
		gate: admit.New(admit.Limits{Unproved: gossipStreams, PerSource: gossipSource}, members)}
	t.dials, t.leave = context.WithCancel(context.Background())
	t.wg.Go(t.enter)
	return t, nil
}

// enter takes streams until the transport is shut down.
func (t *gated) enter() {
	for {
		select {
		case <-t.done:
			return
		case c := <-t.NetTransport.StreamCh():
			s := &stream{Conn: c, visit: t.gate.Enter(c), left: streamBytes}
			select {
			case t.streams <- s:
			case <-t.done:
				_ = s.Close()
				return
			}
		}
	}
}

// DialAddressTimeout connects to another member. leave ends the connection, also while it is made:
// memberlist would wait for a member that does not answer for as long as its timeout.
func (t *gated) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	c, err := (&net.Dialer{Timeout: timeout}).DialContext(t.dials, "tcp", a.Addr)
	if err != nil {
		return nil, err //nolint:wrapcheck // as memberlist's own transport
	}
	return dialed{c, context.AfterFunc(t.dials, func() { _ = c.Close() })}, nil
}

// dialed is a connection that leave ends.
type dialed struct {
	net.Conn
	forget func() bool
}

func (d dialed) Close() error {
	d.forget()
	return d.Conn.Close() //nolint:wrapcheck // a connection's own errors
}

// StreamCh has the streams that are in the gate.
func (t *gated) StreamCh() <-chan net.Conn { return t.streams }

// Shutdown ends the transport.
func (t *gated) Shutdown() error {
	t.leave()
	// Earlier bytes wait to be taken, and the inner end waits for that.
	t.wg.Go(func() {
		for {
			select {
			case c := <-t.NetTransport.StreamCh():
				_ = c.Close()
			case <-t.NetTransport.PacketCh():
			case <-t.done:
				return
			}
		}
	})
	err := t.NetTransport.Shutdown()
	t.over.Do(func() { close(t.done) })
	t.wg.Wait()
	return err //nolint:wrapcheck // memberlist's own
}

// stream is one that is in the gate until it is closed.
type stream struct {
	net.Conn
	visit *admit.Visit
	left  int // bytes that it may still carry
}

func (s *stream) Read(b []byte) (int, error) {
	if s.left == 0 {
		return 0, errStream
	}
	n, err := s.Conn.Read(b[:min(len(b), s.left)])
	s.left -= n
	return n, err //nolint:wrapcheck // a connection's own errors
}

func (s *stream) Close() error {
	s.visit.Leave()
	return s.Conn.Close() //nolint:wrapcheck // a connection's own errors
}
