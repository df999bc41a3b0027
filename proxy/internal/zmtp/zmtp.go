// Package zmtp is one ZeroMQ connection: ZMTP 3.0 without security, for the sockets that vLLM's
// publisher of KV events has. libzmq speaks it with every later version.
//
// It is small because a library's socket allocates as many bytes as a peer claims to send. Here
// frames, messages and the time of a handshake are bounded, and memory grows with the bytes that
// arrive. A connection does not redial; its owner does. No goroutines but the one that closes a
// connection when its context ends.
package zmtp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Bounds.
const (
	MaxFrame   = 32 << 20 // bytes
	MaxMessage = MaxFrame + 4096
	MaxFrames  = 8 // of a message
	maxCommand = 4096
	maxRate    = 1024 // commands in a second, such as a publisher's heartbeats

	dialTimeout      = 3 * time.Second
	handshakeTimeout = 5 * time.Second
	writeTimeout     = 5 * time.Second
	readBuffer       = 64 << 10

	// An idle publisher sends nothing. Without probes a connection whose other end is gone would
	// look the same.
	keepIdle     = 15 * time.Second
	keepInterval = 5 * time.Second
	keepCount    = 3
)

// Kind is the type of a socket.
type Kind string

// The kinds. Publisher and Router are for tests.
const (
	Subscriber Kind = "SUB"
	Dealer     Kind = "DEALER"
	Publisher  Kind = "PUB"
	Router     Kind = "ROUTER"
)

var peers = map[Kind][]string{
	Subscriber: {"PUB", "XPUB"},
	Dealer:     {"ROUTER", "REP", "DEALER"},
	Publisher:  {"SUB", "XSUB"},
	Router:     {"DEALER", "REQ", "ROUTER"},
}

// ParseEndpoint reads tcp://host:port or ipc:///path.
func ParseEndpoint(s string) (network, address string, err error) {
	if path, ok := strings.CutPrefix(s, "ipc://"); ok {
		if !filepath.IsAbs(path) {
			return "", "", errors.New("the path of ipc:// is not absolute")
		}
		return "unix", path, nil
	}
	addr, ok := strings.CutPrefix(s, "tcp://")
	if !ok {
		return "", "", errors.New("it does not begin with tcp:// or ipc://")
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", "", err
	}
	if host == "" || host == "*" {
		return "", "", errors.New("the host is missing: name the engine's host, as * is for the " +
			"engine itself")
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", "", fmt.Errorf("port %q is not a number of 1 to 65535", port)
	}
	return "tcp", addr, nil
}

// Conn is a connection after its handshake. Recv and Send may run in different goroutines.
type Conn struct {
	conn net.Conn
	r    *bufio.Reader
	stop func() bool

	// of Recv
	second   time.Time // the begin of a second of commands
	commands int       // in it
}

// Dial connects to an endpoint. The connection closes when ctx ends.
func Dial(ctx context.Context, endpoint string, kind Kind) (*Conn, error) {
	network, address, err := ParseEndpoint(endpoint)
	if err != nil {
		return nil, fmt.Errorf("endpoint %q: %w", endpoint, err)
	}
	d := net.Dialer{Timeout: dialTimeout, KeepAliveConfig: net.KeepAliveConfig{Enable: true,
		Idle: keepIdle, Interval: keepInterval, Count: keepCount}}
	conn, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return Open(ctx, conn, kind)
}

// Open performs the handshake on a connection, which it closes on failure.
func Open(ctx context.Context, conn net.Conn, kind Kind) (*Conn, error) {
	c := &Conn{conn: conn, r: bufio.NewReaderSize(conn, readBuffer)}
	c.stop = context.AfterFunc(ctx, func() { _ = conn.Close() }) // a second close is harmless
	if err := c.handshake(kind); err != nil {
		c.Close()
		return nil, fmt.Errorf("handshake with %s: %w", conn.RemoteAddr(), err)
	}
	return c, nil
}

// Close ends the connection.
func (c *Conn) Close() {
	c.stop()
	_ = c.conn.Close() // nothing is buffered for writing
}

// SetDeadline bounds the next calls of Recv; zero: no bound.
func (c *Conn) SetDeadline(t time.Time) { _ = c.conn.SetReadDeadline(t) } // fails when closed

const (
	greetingSize = 64
	mechanismAt  = 12
	asServerAt   = 32
)

func greeting() []byte {
	g := make([]byte, greetingSize)
	g[0], g[9], g[10] = 0xff, 0x7f, 3
	copy(g[mechanismAt:], "NULL")
	return g
}

func (c *Conn) handshake(kind Kind) error {
	_ = c.conn.SetDeadline(time.Now().Add(handshakeTimeout)) // fails when closed
	defer func() { _ = c.conn.SetDeadline(time.Time{}) }()
	if _, err := c.conn.Write(greeting()); err != nil {
		return err
	}
	var g [greetingSize]byte
	if _, err := io.ReadFull(c.r, g[:]); err != nil {
		return err
	}
	mechanism := string(bytes.TrimRight(g[mechanismAt:asServerAt], "\x00"))
	switch {
	case g[0] != 0xff || g[9]&1 != 1:
		return errors.New("the peer does not speak ZMTP")
	case g[10] < 3:
		return fmt.Errorf("the peer speaks ZMTP %d; 3 is the oldest that is understood", g[10])
	case mechanism != "NULL":
		return fmt.Errorf("the peer wants the security mechanism %q; only NULL is known", mechanism)
	}
	ready := []byte("\x05READY")
	for _, p := range [][2]string{{"Socket-Type", string(kind)}, {"Identity", ""}} {
		ready = append(ready, byte(len(p[0])))
		ready = append(ready, p[0]...)
		ready = binary.BigEndian.AppendUint32(ready, uint32(len(p[1])))
		ready = append(ready, p[1]...)
	}
	if err := c.write(flagCommand, ready); err != nil {
		return err
	}
	flags, body, err := c.frame(maxCommand)
	if err != nil {
		return err
	}
	if flags&flagCommand == 0 {
		return errors.New("the peer sent a message before its handshake")
	}
	peer, err := socketType(body)
	if err != nil {
		return err
	}
	if !slices.Contains(peers[kind], peer) {
		return fmt.Errorf("the peer's socket is a %.16q, which is none of %v", peer, peers[kind])
	}
	return nil
}

var errCommand = errors.New("a malformed command")

// socketType is the property of READY. Names of properties do not depend on case.
func socketType(body []byte) (string, error) {
	if rest, ok := bytes.CutPrefix(body, []byte("\x05ERROR")); ok {
		return "", fmt.Errorf("the peer refuses: %.100q", rest)
	}
	rest, ok := bytes.CutPrefix(body, []byte("\x05READY"))
	if !ok {
		return "", errCommand
	}
	for len(rest) > 0 {
		n := int(rest[0])
		if len(rest) < 1+n+4 {
			return "", errCommand
		}
		name := string(rest[1 : 1+n])
		size := binary.BigEndian.Uint32(rest[1+n:])
		rest = rest[1+n+4:]
		if uint64(size) > uint64(len(rest)) {
			return "", errCommand
		}
		if strings.EqualFold(name, "Socket-Type") {
			return string(rest[:size]), nil
		}
		rest = rest[size:]
	}
	return "", errCommand
}

// Flags of a frame.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

// Subscribe asks a publisher for all topics.
func (c *Conn) Subscribe() error { return c.Send([]byte{1}) }

// Send sends a message of some frames.
func (c *Conn) Send(frames ...[]byte) error {
	_ = c.conn.SetWriteDeadline(time.Now().Add(writeTimeout)) // fails when closed
	for i, f := range frames {
		flags := byte(0)
		if i < len(frames)-1 {
			flags = flagMore
		}
		if err := c.write(flags, f); err != nil {
			return err
		}
	}
	return nil
}

func (c *Conn) write(flags byte, body []byte) error {
	head := []byte{flags, byte(len(body))}
	if len(body) > 255 {
		head = binary.BigEndian.AppendUint64([]byte{flags | flagLong}, uint64(len(body)))
	}
	_, err := c.conn.Write(append(head, body...))
	return err
}

// frame reads a frame of at most limit bytes.
func (c *Conn) frame(limit int) (flags byte, body []byte, err error) {
	var head [9]byte
	if _, err := io.ReadFull(c.r, head[:2]); err != nil {
		return 0, nil, err
	}
	flags = head[0]
	size := uint64(head[1])
	if flags&flagLong != 0 {
		if _, err := io.ReadFull(c.r, head[2:]); err != nil {
			return 0, nil, noEnd(err)
		}
		size = binary.BigEndian.Uint64(head[1:])
	}
	if flags&^(flagMore|flagLong|flagCommand) != 0 {
		return 0, nil, fmt.Errorf("a frame has unknown flags %#x", flags)
	}
	if size > uint64(limit) {
		return 0, nil, fmt.Errorf("a frame of %d bytes is longer than %d", size, limit)
	}
	var b bytes.Buffer // grows with what arrives
	if size <= readBuffer {
		b.Grow(int(size))
	}
	if _, err := io.CopyN(&b, c.r, int64(size)); err != nil {
		return 0, nil, noEnd(err)
	}
	return flags, b.Bytes(), nil
}

// noEnd is the error of an end within a frame.
func noEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Recv reads the next message. It answers PING.
func (c *Conn) Recv() ([][]byte, error) {
	var frames [][]byte
	left := MaxMessage
	for {
		flags, body, err := c.frame(min(left, MaxFrame))
		if err != nil {
			return nil, err
		}
		if flags&flagCommand != 0 {
			if now := time.Now(); now.Sub(c.second) >= time.Second {
				c.second, c.commands = now, 0
			}
			if c.commands++; c.commands > maxRate {
				return nil, errors.New("too many commands in a second")
			}
			if err := c.command(body); err != nil {
				return nil, err
			}
			continue
		}
		if len(frames) == MaxFrames {
			return nil, fmt.Errorf("a message has more than %d frames", MaxFrames)
		}
		frames, left = append(frames, body), left-len(body)
		if flags&flagMore == 0 {
			return frames, nil
		}
	}
}

func (c *Conn) command(body []byte) error {
	if len(body) > maxCommand {
		return errCommand
	}
	if rest, ok := bytes.CutPrefix(body, []byte("\x04PING")); ok && len(rest) >= 2 {
		_ = c.conn.SetWriteDeadline(time.Now().Add(writeTimeout)) // fails when closed
		return c.write(flagCommand, append([]byte("\x04PONG"), rest[2:]...))
	}
	if bytes.HasPrefix(body, []byte("\x05ERROR")) {
		return fmt.Errorf("the peer refuses: %.100q", body[6:])
	}
	return nil
}
