package httpgate

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/testutil"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const patience = time.Minute

// serve serves until the test is over.
func serve(t *testing.T, s *Server, ln net.Listener) {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ln) }()
	t.Cleanup(func() {
		_ = s.Close()
		if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("Serve: %v", err)
		}
	})
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

func dial(t *testing.T, to net.Addr) *client {
	t.Helper()
	c, err := net.Dial(to.Network(), to.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return &client{t: t, Conn: c, r: bufio.NewReader(c)}
}

type client struct {
	t *testing.T
	net.Conn
	r *bufio.Reader
}

func (c *client) send(text string) {
	c.t.Helper()
	if _, err := io.WriteString(c.Conn, text); err != nil {
		c.t.Fatal(err)
	}
}

// get sends a request and returns the status of its answer.
func (c *client) get(path string) int {
	c.t.Helper()
	c.send("GET " + path + " HTTP/1.1\r\nHost: x\r\n\r\n")
	return c.answer()
}

func (c *client) answer() int {
	c.t.Helper()
	res, err := http.ReadResponse(c.r, nil)
	if err != nil {
		c.t.Fatal(err)
	}
	_, err = io.Copy(io.Discard, res.Body)
	if cerr := res.Body.Close(); err != nil || cerr != nil {
		c.t.Fatal(err, cerr)
	}
	return res.StatusCode
}

// closed waits until the server has closed the connection.
func (c *client) closed() {
	c.t.Helper()
	_, err := io.Copy(io.Discard, c.r)
	var late net.Error
	if errors.As(err, &late) && late.Timeout() {
		c.t.Fatal("the connection is still open")
	}
}

// However many clients send nothing, half a request or nothing more, newcomers are served, and so
// is a request that is under way.
func TestSilentClientsMakeRoom(t *testing.T) {
	release, begun := make(chan struct{}), make(chan struct{})
	s := New(Options{Failed: func(error) {}, ReplyTimeout: patience,
		Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/slow" {
				close(begun)
				<-release
			}
		})})
	ln := listen(t)
	serve(t, s, ln)
	slow := dial(t, ln.Addr())
	slow.send("GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
	<-begun
	idle := dial(t, ln.Addr()) // it has been served, and is the oldest one that waits
	if code := idle.get("/"); code != 200 {
		t.Fatal(code)
	}
	for n, sent := range []string{"", "GET / HTTP/1.1\r\nHo"} {
		from := testutil.ManyStrangers
		if n == 0 {
			from = testutil.OneStranger
		}
		stop := testutil.Strangers(t, ln.Addr().String(), 3*maxConns, 1, from, []byte(sent))
		if n == 0 {
			idle.closed()
		}
		for range 3 {
			if code := dial(t, ln.Addr()).get("/"); code != 200 {
				t.Error(code)
			}
		}
		if held := s.gate.Held(); held > maxConns {
			t.Errorf("%d connections are open, at most %d", held, maxConns)
		}
		stop()
	}
	close(release)
	if code := slow.answer(); code != 200 {
		t.Errorf("the request under way: %d", code)
	}
	if code := slow.get("/"); code != 200 { // the same connection goes on
		t.Error(code)
	}
}

// A connection that is trusted stays, even while it waits for its next request.
func TestTrustedConnectionStays(t *testing.T) {
	var trust atomic.Bool
	trust.Store(true)
	s := New(Options{Failed: func(error) {}, ReplyTimeout: patience,
		Trusted: func(net.Conn) bool { return trust.Load() },
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !Trusted(r) {
				w.WriteHeader(http.StatusForbidden)
			}
			trust.Store(false) // the ones that come later are strangers
		})})
	ln := listen(t)
	serve(t, s, ln)
	known := dial(t, ln.Addr())
	if code := known.get("/"); code != 200 {
		t.Error(code)
	}
	testutil.Strangers(t, ln.Addr().String(), 3*maxConns, 1, testutil.OneStranger, nil)
	if code := dial(t, ln.Addr()).get("/"); code != http.StatusForbidden {
		t.Error(code)
	}
	if code := known.get("/"); code != 200 {
		t.Error(code)
	}
}

// failing is a listener whose accept fails first as if the process were out of memory for sockets.
type failing struct {
	net.Listener
	left int
}

func (f *failing) Accept() (net.Conn, error) {
	if f.left--; f.left >= 0 {
		return nil, &net.OpError{Op: "accept", Err: syscall.ENOBUFS}
	}
	return f.Listener.Accept()
}

func TestErrorsOfAcceptEndNothing(t *testing.T) {
	var failed atomic.Int64
	s := New(Options{ReplyTimeout: patience, Handler: http.NotFoundHandler(),
		Failed: func(error) { failed.Add(1) }})
	ln := listen(t)
	serve(t, s, &failing{ln, 2})
	if code := dial(t, ln.Addr()).get("/"); code != http.StatusNotFound || failed.Load() != 2 {
		t.Errorf("%d after %d errors", code, failed.Load())
	}
}

// A body costs no more than its bound, whatever the handler reads.
func TestBodiesAreBounded(t *testing.T) {
	got := make(chan error, 1)
	s := New(Options{Failed: func(error) {}, ReplyTimeout: patience,
		Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			_, err := io.Copy(io.Discard, r.Body)
			got <- err
		})})
	ln := listen(t)
	serve(t, s, ln)
	c := dial(t, ln.Addr())
	c.send("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" +
		strings.Repeat("x", maxBodyBytes+1))
	var long *http.MaxBytesError
	if err := <-got; !errors.As(err, &long) {
		t.Errorf("read %d bytes of a body: %v", maxBodyBytes+1, err)
	}
	_ = c.Close()
	testutil.Eventually(t, patience, "the connection is closed", func() bool {
		return s.gate.Held() == 0
	})
}
