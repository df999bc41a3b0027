package zmtp

import (
	"bytes"
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/testutil"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// pair connects two sockets.
func pair(t *testing.T, kind, peer Kind) (a, b *Conn) {
	t.Helper()
	x, y := tcpPair(t)
	type result struct {
		c   *Conn
		err error
	}
	other := make(chan result, 1)
	go func() {
		c, err := Open(context.Background(), y, peer)
		other <- result{c, err}
	}()
	a, err := Open(context.Background(), x, kind)
	r := <-other
	if err != nil || r.err != nil {
		t.Fatal(err, r.err)
	}
	t.Cleanup(a.Close)
	t.Cleanup(r.c.Close)
	return a, r.c
}

func tcpPair(t *testing.T) (net.Conn, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	x, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	y, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return x, y
}

func TestMessages(t *testing.T) {
	sub, pub := pair(t, Subscriber, Publisher)
	if err := sub.Subscribe(); err != nil {
		t.Fatal(err)
	}
	if got, err := pub.Recv(); err != nil || len(got) != 1 || !bytes.Equal(got[0], []byte{1}) {
		t.Fatalf("%q %v", got, err)
	}
	long := bytes.Repeat([]byte("x"), 3<<20)
	go func() {
		_ = pub.write(flagCommand, []byte("\x04PING\x00\x10ctx"))
		_ = pub.Send([]byte("topic"), []byte{}, long)
	}()
	got, err := sub.Recv()
	if err != nil || len(got) != 3 || string(got[0]) != "topic" || len(got[1]) != 0 ||
		!bytes.Equal(got[2], long) {
		t.Fatalf("%d frames, %v", len(got), err)
	}
	if flags, body, err := pub.frame(maxCommand); err != nil || flags != flagCommand ||
		string(body) != "\x04PONGctx" {
		t.Errorf("%d %q %v", flags, body, err)
	}
}

func TestBounds(t *testing.T) {
	for want, wire := range map[string][]byte{
		"longer than":   {flagLong, 0x7f, 0, 0, 0, 0, 0, 0, 0},
		"more than 8":   bytes.Repeat([]byte{flagMore, 0}, 9),
		"too many":      bytes.Repeat([]byte{flagCommand, 1, 0}, maxRate+1),
		"unknown flags": {0x40, 0},
		"refuses":       append([]byte{flagCommand, 9}, "\x05ERROR\x02no"...),
	} {
		sub, pub := pair(t, Subscriber, Publisher)
		if _, err := pub.conn.Write(wire); err != nil {
			t.Fatal(err)
		}
		if _, err := sub.Recv(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// slow delivers a few bytes at a time, some time apart.
type slow struct{ script }

func (s *slow) Read(p []byte) (int, error) {
	time.Sleep(10 * time.Millisecond)
	return s.script.Read(p[:min(len(p), 64)])
}

// Heartbeats of an idle publisher do not end a connection.
func TestHeartbeats(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		wire := append(greeting(), flagCommand, 25)
		wire = append(wire, "\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"...)
		for range 10 * maxRate {
			wire = append(wire, flagCommand, 7, 4, 'P', 'I', 'N', 'G', 0, 100)
		}
		wire = append(wire, 0, 2, 'o', 'k')
		c, err := Open(t.Context(), &slow{script{Reader: bytes.NewReader(wire)}}, Subscriber)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := c.Recv(); err != nil || len(got) != 1 || string(got[0]) != "ok" {
			t.Errorf("%q %v", got, err)
		}
	})
}

func TestHandshakeRefuses(t *testing.T) {
	curve := greeting()
	copy(curve[mechanismAt:], "CURVE")
	old := greeting()
	old[10] = 2
	ready := func(text string) []byte {
		return append(append(greeting(), flagCommand, byte(len(text))), text...)
	}
	for want, wire := range map[string][]byte{
		"does not speak":     bytes.Repeat([]byte("HTTP/1.1 400 "), 9),
		"CURVE":              curve,
		"ZMTP 2":             old,
		"before its":         append(greeting(), 0, 1, 'x'),
		"malformed":          ready("\x05READY\x0bSocket-Type\xff\xff\xff\xffPUB"),
		"is a \"ROUTER\"":    ready("\x05READY\x0bsocket-type\x00\x00\x00\x06ROUTER"),
		"refuses: \"\\x02no": ready("\x05ERROR\x02no"),
	} {
		x, y := tcpPair(t)
		if _, err := y.Write(wire); err != nil {
			t.Fatal(err)
		}
		if c, err := Open(context.Background(), x, Subscriber); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v %v", want, c, err)
		}
		y.Close()
	}
}

func TestEndpoints(t *testing.T) {
	for s, want := range map[string]string{
		"tcp://engine:5557": "tcp engine:5557", "tcp://[::1]:1": "tcp [::1]:1",
		"ipc:///run/kv": "unix /run/kv", "tcp://*:5557": "", "tcp://:5557": "", "tcp://a:0": "",
		"tcp://a": "", "ipc://kv": "", "inproc://kv": "", "": "", "a:5557": "",
	} {
		network, address, err := ParseEndpoint(s)
		got := strings.TrimSpace(network + " " + address)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", s, got, err)
		}
	}
}

func TestContextEndsRecv(t *testing.T) {
	x, y := tcpPair(t)
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		c, err := Open(context.Background(), y, Publisher)
		if err == nil {
			_, _ = c.Recv()
			c.Close()
		}
	}()
	c, err := Open(ctx, x, Subscriber)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	cancel()
	c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := c.Recv(); err == nil {
		t.Error("a message after the end")
	}
}

// FuzzPeer gives a subscriber the bytes of a forged publisher.
func FuzzPeer(f *testing.F) {
	ready := append(greeting(), flagCommand, 25)
	ready = append(ready, "\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"...)
	f.Add(append(bytes.Clone(ready), 0, 3, 'a', 'b', 'c'))
	f.Add(append(bytes.Clone(ready), flagMore|flagLong, 0, 0, 0, 0, 0, 0, 0, 1, 'x', 0, 0))
	f.Add(append(bytes.Clone(ready), flagCommand, 8, 4, 'P', 'I', 'N', 'G', 0, 1, 2))
	f.Add(ready[:70])
	f.Add([]byte("HTTP/1.1 400 Bad Request\r\n"))
	f.Fuzz(func(t *testing.T, wire []byte) {
		c, err := Open(context.Background(), &script{Reader: bytes.NewReader(wire)}, Subscriber)
		for err == nil {
			var frames [][]byte
			frames, err = c.Recv()
			total := 0
			for _, f := range frames {
				total += len(f)
			}
			if total > len(wire) || len(frames) > MaxFrames {
				t.Fatalf("%d bytes in %d frames of %d bytes", total, len(frames), len(wire))
			}
		}
		if c != nil {
			c.Close()
		}
	})
}

// script is a connection that delivers some bytes.
type script struct {
	*bytes.Reader
	net.Conn
}

func (s *script) Read(p []byte) (int, error)       { return s.Reader.Read(p) }
func (s *script) Write(p []byte) (int, error)      { return len(p), nil }
func (s *script) Close() error                     { return nil }
func (s *script) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (s *script) SetDeadline(time.Time) error      { return nil }
func (s *script) SetReadDeadline(time.Time) error  { return nil }
func (s *script) SetWriteDeadline(time.Time) error { return nil }
