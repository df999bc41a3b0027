package web

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/httpgate"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/testutil"
)

// asked counts what reaches a node's parts.
type asked struct {
	Life
	StoreCalls
	calls int
}

func (a *asked) Leave(bool)             { a.calls++ }
func (a *asked) Leaving() time.Duration { return 0 }
func (a *asked) Ready() bool            { return true }
func (a *asked) Draining() bool         { return false }
func (a *asked) SourceLeases() int      { return 0 }
func (a *asked) Endpoint() string       { return "" }

func (a *asked) Drain(context.Context) error { a.calls++; return nil }
func (a *asked) Keys([32]byte, string, uint32, int) (*nodeapi.StoreKeys, error) {
	a.calls++
	return &nodeapi.StoreKeys{}, nil
}
func (a *asked) Verify(context.Context, [32]byte, [32]byte) (*nodeapi.StoreVerified, error) {
	a.calls++
	return &nodeapi.StoreVerified{}, nil
}
func (a *asked) RemoveNamespace(context.Context, [32]byte, bool) (*nodeapi.StoreRemoved, error) {
	a.calls++
	return &nodeapi.StoreRemoved{}, nil
}

// node is a server whose parts count what reaches them.
func node() (*Server, *asked) {
	a := &asked{}
	return New(Options{Gather: prometheus.NewRegistry(), Life: a, Hosts: []string{"Node-1",
		"*.engines.example."}, Log: slog.New(slog.DiscardHandler),
		Transports: func() []string { return nil }, Workers: func() []*engines.Worker { return nil },
		Store:      func() *nodeapi.Store { return &nodeapi.Store{} },
		StoreCalls: func() StoreCalls { return a },
	}), a
}

// serve serves until the test is over.
func serve(t *testing.T, s *httpgate.Server, network, address string) net.Addr {
	t.Helper()
	ln, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ln) }()
	t.Cleanup(func() {
		_ = s.Close()
		<-ended
	})
	return ln.Addr()
}

// ask sends one request over a connection of its own.
func ask(t *testing.T, c net.Conn, method, target, host string) (status int, body string) {
	t.Helper()
	defer c.Close()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://x"+target, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Host = host
	used := false
	transport := &http.Transport{DisableKeepAlives: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			if used {
				return nil, net.ErrClosed
			}
			used = true
			return c, nil
		}}
	res, err := transport.RoundTrip(r)
	if err != nil {
		t.Errorf("%s %s: %v", method, target, err)
		return 0, ""
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Error(err)
	}
	return res.StatusCode, string(b)
}

// changing are the calls that change a node, take its time or name its pages.
var changing = []struct{ method, target string }{
	{"POST", "/v1/leave"}, {"DELETE", "/v1/leave"}, {"POST", "/v1/store/drain"},
	{"POST", "/v1/store/remove?unknown=true&namespace=" + id},
	{"GET", "/v1/store/keys?first=0&limit=1&tier=memory&namespace=" + id},
	{"GET", "/v1/store/verify?namespace=" + id + "&key=" + id},
}

const id = "abababababababababababababababababababababababababababababababab"

// No request to the port changes the node, whatever sends it: a proxy of this host that passes on
// what it gets looks like a client of this host.
func TestPortChangesNothing(t *testing.T) {
	w, a := node()
	at := serve(t, w.Port(), "tcp", "127.0.0.1:0").String()
	for _, c := range changing {
		conn, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		want := http.StatusMethodNotAllowed
		if c.method == http.MethodGet {
			want = http.StatusNotFound
		}
		if code, body := ask(t, conn, c.method, c.target, at); code != want || a.calls != 0 {
			t.Errorf("%s %s: %d %s; %d calls reached the node", c.method, c.target, code, body, a.calls)
		}
	}
	for _, method := range []string{"POST", "PUT", "PATCH", "DELETE"} {
		for _, path := range []string{"/", "/v1/node", "/debug/state", "/metrics", "/v1/store"} {
			conn, err := net.Dial("tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			if code, body := ask(t, conn, method, path, at); code != http.StatusMethodNotAllowed {
				t.Errorf("%s %s: %d %s", method, path, code, body)
			}
		}
	}
}

// The kernel decides who changes a node: root, the sidecar's user and those that it lists.
func TestAdminSocketChecksTheUser(t *testing.T) {
	user := uint32(os.Getuid())
	if user == 0 {
		user = 65534 // see testutil.AsNobody
	}
	for name, c := range map[string]struct {
		self   uint32
		listed []uint32
		served bool
	}{
		"the sidecar's user": {self: user, served: true},
		"another user":       {self: user + 1},
		"another one listed": {self: user + 1, listed: []uint32{user + 2}},
		"a listed user":      {self: user + 1, listed: []uint32{user + 2, user}, served: true},
	} {
		w, a := node()
		w.self, w.o.AdminUIDs = c.self, c.listed
		dir := testutil.ShortDir(t)
		path := filepath.Join(dir, "admin")
		serve(t, w.Admin(), "unix", path)
		if err := errors.Join(os.Chmod(dir, 0o755), os.Chmod(path, 0o666)); err != nil {
			t.Fatal(err)
		}
		for _, x := range changing {
			before := a.calls
			var conn net.Conn
			testutil.AsNobody(t, func() { // the connection has the user of the thread that connects
				var err error
				if conn, err = net.Dial("unix", path); err != nil {
					t.Error(err)
				}
			})
			if conn == nil {
				t.FailNow()
			}
			code, body := ask(t, conn, x.method, x.target, "localhost")
			want := http.StatusForbidden
			if c.served {
				want = http.StatusOK
			}
			if code != want || (a.calls > before) != c.served {
				t.Errorf("%s, %s %s: %d %s; it reached the node: %v", name, x.method, x.target, code, body,
					a.calls > before)
			}
			if !c.served && !strings.Contains(body, "engine.admin_uids") {
				t.Errorf("%s: no remedy in %q", name, body)
			}
		}
	}
}

// A page whose name has come to lead to this host reads nothing here: a browser sends the page's
// name.
func TestPortChecksTheHost(t *testing.T) {
	w, _ := node()
	at := serve(t, w.Port(), "tcp", "127.0.0.1:0").String()
	for host, want := range map[string]int{
		at: 200, "127.0.0.1": 200, "[::1]:7651": 200, "[fd00::1]": 200, "10.0.0.1:7651": 200,
		"localhost:7651": 200, "LOCALHOST": 200, "node-1:7651": 200, "node-1.": 200,
		"p-0.engines.example:7651": 200, "a.b.Engines.Example": 200,
		"evil.example:7651": 403, "evil.example": 403, "node-1.evil.example": 403,
		"engines.example.evil": 403, "xengines.example": 403, "engines.example": 403,
		"127.0.0.1.evil.example": 403, "localhost.evil.example:80": 403,
	} {
		for _, path := range []string{"/readyz", "/v1/node", "/metrics", "/page/page.js"} {
			c, err := net.Dial("tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			code, body := ask(t, c, "GET", path, host)
			if code != want || want != 200 && !strings.Contains(body, "http.hosts") {
				t.Errorf("%s of %s: %d %.200s", path, host, code, body)
			}
		}
	}
}
