package opening

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const patience = time.Minute

// session is what both ends of the tests have agreed on.
type session struct {
	key    [32]byte
	id     *hello.Identity // of the only certificate that is accepted; nil: any
	served chan struct{}   // each lane that is served
}

func (s *session) Key(id hello.Identity) (key [32]byte, ok bool) {
	return s.key, s.id == nil || *s.id == id
}

func (*session) Attachment() []byte { return make([]byte, 16) }
func (*session) Admit() error       { return nil }

func (s *session) Serve(net.Conn, *TLS, []byte) error {
	s.served <- struct{}{}
	return io.EOF
}

func credentials(t *testing.T, c keys.Cluster) *keys.Credentials {
	t.Helper()
	creds, err := keys.FromCluster(c, "n")
	if err != nil {
		t.Fatal(err)
	}
	return creds
}

// identity is that of the certificate of creds.
func identity(t *testing.T, creds *keys.Credentials) hello.Identity {
	t.Helper()
	x, err := x509.ParseCertificate(creds.Server().Certificates[0].Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	return keys.Identity(x)
}

// accept serves lanes of s, and calls, at an address.
func accept(t *testing.T, creds *keys.Credentials, s Session) (addr string, gate *admit.Gate) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	gate = NewGate(nil)
	a := NewAcceptor(ctx, &Config{Self: transfer.Boot{2}, Credentials: creds, Gate: gate,
		Refused: &admit.Log{Logger: slog.New(slog.DiscardHandler)},
		Session: func(boot transfer.Boot) (Session, bool) { return s, boot == transfer.Boot{1} },
		Call: func(c net.Conn, closed func()) bool {
			_, _ = c.Write([]byte("call"))
			closed()
			return true
		}})
	a.Serve(ln, true)
	t.Cleanup(func() {
		_ = ln.Close()
		stop()
		a.Close()
		a.Wait()
	})
	return ln.Addr().String(), gate
}

func dialTo(t *testing.T, addr string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// With credentials the acceptor refuses a lane without TLS, with an error that names the remedy, a
// lane whose certificate is not that of the boot, and a proof over another TLS session.
func TestLaneNeedsItsChannel(t *testing.T) {
	cluster, err := keys.NewCluster()
	if err != nil {
		t.Fatal(err)
	}
	owner, other := credentials(t, cluster), credentials(t, cluster)
	s := &session{key: [32]byte{7}, served: make(chan struct{}, 1)}
	addr, _ := accept(t, credentials(t, cluster), s)
	to := Target{Boot: transfer.Boot{2}, Address: addr}
	params := wire.DialParams{Purpose: wire.PurposeControl, Self: transfer.Boot{1}, Peer: to.Boot,
		Key: s.key, Attach: s.Attachment()}
	if _, err := wire.Dial(dialTo(t, addr), params); !errors.Is(err, wire.ErrVersion) {
		t.Errorf("without TLS: %v", err)
	}
	conf := &Config{Self: transfer.Boot{1}, Credentials: owner}
	_, over, err := Dial(t.Context(), dialTo(t, addr), conf, to, s)
	if err != nil {
		t.Fatalf("a correct lane: %v", err)
	}
	<-s.served
	_, theirs, err := over.binding()
	if err != nil {
		t.Fatal(err)
	}
	tlsTo := func(creds *keys.Credentials) *TLS {
		over, err := dialTLS(t.Context(), dialTo(t, addr), creds, addr)
		if err != nil {
			t.Fatal(err)
		}
		return over
	}
	over = tlsTo(owner)
	params.Binding = make([]byte, bindingBytes)
	if _, err := wire.Dial(over.Conn, params); !errors.Is(err, wire.ErrProof) {
		t.Errorf("with the proof of another session: %v", err)
	}
	// Another member has learned the key, as if it had leaked. The session accepts the certificate of
	// the owner alone.
	mine := identity(t, owner)
	pinned := &session{key: s.key, id: &mine, served: s.served}
	addr, _ = accept(t, credentials(t, cluster), pinned)
	over = tlsTo(other)
	if params.Binding, _, err = over.binding(); err != nil {
		t.Fatal(err)
	}
	if _, err := wire.Dial(over.Conn, params); !errors.Is(err, wire.ErrRefused) {
		t.Errorf("with another certificate: %v", err)
	}
	if _, _, err := Dial(t.Context(), dialTo(t, addr), conf, Target{to.Boot, addr},
		pinned); !errors.Is(err, wire.ErrRefused) {
		t.Errorf("the acceptor's certificate is not the pinned one: %v", err)
	}
	if theirs == mine {
		t.Error("two members have the same identity")
	}
}

// Calls reach the server, whatever lanes negotiate.
func TestCall(t *testing.T) {
	cluster, err := keys.NewCluster()
	if err != nil {
		t.Fatal(err)
	}
	addr, _ := accept(t, credentials(t, cluster), nil)
	conf := credentials(t, cluster).Client("127.0.0.1")
	conf.NextProtos = []string{callProtocol}
	got, err := io.ReadAll(tls.Client(dialTo(t, addr), conf))
	if string(got) != "call" {
		t.Errorf("%q, %v", got, err)
	}
}

// firstMessage is the first message of a lane, which needs no key.
func firstMessage(t *testing.T) []byte {
	a, b := net.Pipe()
	go func() {
		_ = tls.Client(a, &tls.Config{NextProtos: []string{laneProtocol},
			InsecureSkipVerify: true}).Handshake()
	}()
	defer a.Close()
	buf := make([]byte, 64<<10)
	n, err := b.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	return buf[:n]
}

// A part of TLS's first message does not count as a message: its connection is closed before others
// that have sent a whole one.
func TestFourBytesAreNoMessage(t *testing.T) {
	cluster, err := keys.NewCluster()
	if err != nil {
		t.Fatal(err)
	}
	message := firstMessage(t)
	for name, x := range map[string]struct {
		send []byte
		kept bool
	}{
		"four bytes":       {message[:4], false},
		"all but one byte": {message[:len(message)-1], false},
		"a message":        {message, true},
	} {
		t.Run(name, func(t *testing.T) {
			addr, gate := accept(t, credentials(t, cluster), nil)
			conn := dialTo(t, addr)
			if _, err := conn.Write(x.send); err != nil {
				t.Fatal(err)
			}
			// Many others that send nothing take the places. A connection that has sent a message keeps its
			// own.
			testutil.Strangers(t, addr, 3*MaxUnproved, 1, testutil.ManyStrangers, nil)
			end := time.Now().Add(patience)
			for tick := time.NewTicker(time.Millisecond); gate.Evicted() <= MaxUnproved; <-tick.C {
				if time.Now().After(end) {
					t.Fatalf("%d connections were evicted", gate.Evicted())
				}
			}
			if err := conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			_, err = io.Copy(io.Discard, conn)
			if open := errors.Is(err, os.ErrDeadlineExceeded); open != x.kept {
				t.Errorf("its connection is open: %t, want %t (%v)", open, x.kept, err)
			}
		})
	}
}
