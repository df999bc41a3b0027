// SPDX-License-Identifier: Apache-2.0

package web

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvspray/kvspray/control/engines"
)

// Requests that change a node come over loopback, or from the address that they are sent to, which
// is how an engine's container reaches the sidecar of its pod.
func TestOfThisHost(t *testing.T) {
	served := ofThisHost(func(rw http.ResponseWriter, _ *http.Request) {
		rw.WriteHeader(http.StatusNoContent)
	})
	for name, c := range map[string]struct {
		from, to, named, origin string
		want                    int
	}{
		"loopback":               {"127.0.0.1:5", "127.0.0.1:7651", "localhost:7651", "", 204},
		"loopback, IPv6":         {"[::1]:5", "[::1]:7651", "[::1]:7651", "", 204},
		"its own address":        {"10.0.0.1:5", "10.0.0.1:7651", "10.0.0.1:7651", "", 204},
		"its own address, IPv6":  {"[fd00::1]:5", "[fd00::1]:7651", "[fd00::1]:7651", "", 204},
		"another host":           {"10.0.0.2:5", "10.0.0.1:7651", "10.0.0.1:7651", "", 403},
		"another host, loopback": {"10.0.0.2:5", "10.0.0.1:7651", "127.0.0.1:7651", "", 403},
		"another name":           {"10.0.0.1:5", "10.0.0.1:7651", "evil.example:7651", "", 403},
		"another address":        {"10.0.0.1:5", "10.0.0.1:7651", "10.0.0.2:7651", "", 403},
		"a web page":             {"127.0.0.1:5", "127.0.0.1:7651", "localhost:7651", "http://x", 403},
		"no port":                {"127.0.0.1:5", "127.0.0.1:7651", "localhost", "", 403},
	} {
		t.Run(name, func(t *testing.T) {
			local, err := net.ResolveTCPAddr("tcp", c.to)
			if err != nil {
				t.Fatal(err)
			}
			r := httptest.NewRequest(http.MethodPost, "/v1/leave", nil)
			r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, net.Addr(local)))
			r.RemoteAddr, r.Host = c.from, c.named
			if c.origin != "" {
				r.Header.Set("Origin", c.origin)
			}
			got := httptest.NewRecorder()
			served(got, r)
			if got.Code != c.want {
				t.Errorf("%d, want %d", got.Code, c.want)
			}
		})
	}
}

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
func (a *asked) Keys([32]byte, string, uint32, int) (*StoreKeys, error) {
	a.calls++
	return &StoreKeys{}, nil
}
func (a *asked) Verify(context.Context, [32]byte, [32]byte) (*StoreVerified, error) {
	a.calls++
	return &StoreVerified{}, nil
}
func (a *asked) RemoveNamespace(context.Context, [32]byte, bool) (*StoreRemoved, error) {
	a.calls++
	return &StoreRemoved{}, nil
}

// Every route that changes a node, and the other ones of this host, refuse what a web page or a
// proxy sends.
func TestRoutesOfThisHost(t *testing.T) {
	id := strings.Repeat("ab", 32)
	routes := map[string]string{ // with their queries
		"POST /v1/leave": "", "DELETE /v1/leave": "", "POST /v1/store/drain": "",
		"POST /v1/store/remove": "?namespace=" + id,
		"GET /v1/store/keys":    "?first=0&most=1&tier=memory&namespace=" + id,
		"GET /v1/store/verify":  "?namespace=" + id + "&key=" + id,
	}
	for _, route := range changing(t) {
		if _, ok := routes[route]; !ok {
			t.Errorf("%s changes the node, and this test does not know it", route)
		}
	}
	a := &asked{}
	s := httptest.NewServer(New(Options{Gather: prometheus.NewRegistry(), Life: a,
		Transports: func() []string { return nil }, Workers: func() []*engines.Worker { return nil },
		Store: func() *Store { return &Store{} }, StoreCalls: func() StoreCalls { return a },
	}).handler())
	defer s.Close()
	type change = func(*http.Request)
	header := func(name, value string) change {
		return func(r *http.Request) { r.Header.Set(name, value) }
	}
	for route, query := range routes {
		method, path, _ := strings.Cut(route, " ")
		for name, c := range map[string]struct {
			change change
			want   int
		}{
			"own":              {func(*http.Request) {}, 200},
			"typed":            {header("Sec-Fetch-Site", "none"), 200},
			"a foreign host":   {func(r *http.Request) { r.Host = "evil.example:7651" }, 403},
			"an origin":        {header("Origin", "http://evil.example"), 403},
			"an opaque origin": {header("Origin", "null"), 403},
			"another site":     {header("Sec-Fetch-Site", "cross-site"), 403},
			"the same origin":  {header("Sec-Fetch-Site", "same-origin"), 403},
			"a proxy":          {header("X-Forwarded-For", "10.0.0.2"), 403},
			"a modern proxy":   {header("Forwarded", "for=10.0.0.2"), 403},
		} {
			r, err := http.NewRequestWithContext(t.Context(), method, s.URL+path+query, nil)
			if err != nil {
				t.Fatal(err)
			}
			c.change(r)
			before := a.calls
			res, err := s.Client().Do(r)
			if err != nil {
				t.Fatal(err)
			}
			_ = res.Body.Close()
			reached := a.calls > before
			if res.StatusCode != c.want || reached != (c.want == 200) {
				t.Errorf("%s, %s: %d, want %d; it reached the node: %v", route, name, res.StatusCode,
					c.want, reached)
			}
		}
	}
}

// changing finds the routes in this package's source that change something by their method.
func changing(t *testing.T) (routes []string) {
	t.Helper()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	pattern := regexp.MustCompile(`mux\.Handle(?:Func)?\("((?:[A-Z]+ )?/[^"]*)"`)
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range pattern.FindAllStringSubmatch(string(b), -1) {
			if !strings.HasPrefix(m[1], "GET ") {
				routes = append(routes, m[1])
			}
		}
	}
	if len(routes) < 4 {
		t.Fatalf("found only %v", routes)
	}
	return routes
}
