// SPDX-License-Identifier: Apache-2.0

package web

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
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
