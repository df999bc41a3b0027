package rdmacheck

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/kvspray/kvspray/control/peer/keys"
)

// Bounds of the connection between two ends. It carries a line of JSON for each request and each
// answer.
const (
	maxLine = 1 << 20         // bytes
	idle    = 5 * time.Minute // between two requests
	work    = 2 * time.Minute // of a request beside its wait; the end may have little processor time
	connect = 5 * time.Second
	first   = 10 * time.Second // until the first request; others wait meanwhile
)

// coded are errors that stay recognizable across the connection.
var coded = map[string]error{"no gpu": errNoGPU, "gpu refused": errGPURefused,
	"no flush": errNoFlush, "request": errRequest, "no baseline": errNoBaseline}

// remoteError is an error of the peer's end.
type remoteError struct {
	text string
	is   error // nil: no known one
}

func (e *remoteError) Error() string { return e.text }
func (e *remoteError) Unwrap() error { return e.is }

// sameKey is the remedy for ends that do not prove themselves to each other.
const sameKey = "name the same peer.cluster_key_file on both hosts, or certificates of one CA"

// errPeerGone: the connection to the peer's end has ended.
var errPeerGone = errors.New("the connection to the peer has ended")

// Serve is the other end of tests, for one peer after the other, until ctx ends. A peer proves that
// it has the key, unless there is none. It can do nothing but these tests: they use memory of their
// own, and queue pairs of the rails.
func Serve(ctx context.Context, ln net.Listener, env Env, key *keys.Credentials) error {
	if key != nil {
		ln = tls.NewListener(ln, key.Server())
	}
	defer context.AfterFunc(ctx, func() { _ = ln.Close() })()
	for {
		c, err := ln.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("rdmacheck: %w", err)
		}
		_ = serveOne(ctx, c, env) // the peer reports it
	}
}

func serveOne(ctx context.Context, c net.Conn, env Env) (err error) {
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	l := newLocal(ctx, env)
	defer func() { err = errors.Join(err, l.close(), c.Close()) }()
	lines := bufio.NewScanner(c)
	lines.Buffer(nil, maxLine)
	for wait := first; ; wait = idle {
		if err := c.SetDeadline(time.Now().Add(wait)); err != nil {
			return err
		}
		if !lines.Scan() {
			return lines.Err()
		}
		var q request
		if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
			return err
		}
		if q.Host != "" { // only the end that began the test connects to others
			return errRequest
		}
		a, err := l.call(ctx, &q)
		if err != nil {
			a = &answer{Error: err.Error()}
			for code, known := range coded {
				if errors.Is(err, known) {
					a.Code = code
				}
			}
		}
		if err := json.NewEncoder(c).Encode(a); err != nil {
			return err
		}
	}
}

// remote is a peer's end.
type remote struct {
	c     net.Conn
	lines *bufio.Scanner
}

func dial(ctx context.Context, address string, key *keys.Credentials) (*remote, error) {
	d := net.Dialer{Timeout: connect}
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("rdmacheck: %w: run 'kvspray doctor --rdma --serve %s' there", err,
			address)
	}
	if key != nil {
		host, _, _ := net.SplitHostPort(address) // it was dialed
		proved := tls.Client(c, key.Client(host))
		ctx, cancel := context.WithTimeout(ctx, first)
		defer cancel()
		if err := proved.HandshakeContext(ctx); err != nil {
			return nil, errors.Join(fmt.Errorf("rdmacheck: proof of the key at %s: %w: %s", address, err,
				sameKey), c.Close())
		}
		c = proved
	}
	r := &remote{c: c, lines: bufio.NewScanner(c)}
	r.lines.Buffer(nil, maxLine)
	return r, nil
}

func (r *remote) call(ctx context.Context, q *request) (*answer, error) {
	defer context.AfterFunc(ctx, func() { _ = r.c.SetDeadline(time.Unix(1, 0)) })()
	gone := func(err error) (*answer, error) {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, fmt.Errorf("%w: %s: %w", errPeerGone, q.Op, err)
	}
	if err := r.c.SetDeadline(time.Now().Add(q.Wait + work)); err != nil {
		return gone(err)
	}
	if err := json.NewEncoder(r.c).Encode(q); err != nil {
		return gone(err)
	}
	if !r.lines.Scan() {
		err := r.lines.Err()
		if err == nil {
			err = io.EOF
		}
		return gone(err)
	}
	a := &answer{}
	if err := json.Unmarshal(r.lines.Bytes(), a); err != nil {
		return gone(err)
	}
	if a.Error != "" {
		return nil, &remoteError{"the peer: " + a.Error, coded[a.Code]}
	}
	return a, nil
}

func (r *remote) close() error { return r.c.Close() }
