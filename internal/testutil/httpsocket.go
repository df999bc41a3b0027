package testutil

import (
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"
)

// HTTPSocket serves HTTP on a unix socket until the test is over. The address of its listener is
// the socket's path.
func HTTPSocket(tb testing.TB, h http.Handler) *httptest.Server {
	tb.Helper()
	path := filepath.Join(ShortDir(tb), "http")
	ln, err := net.Listen("unix", path)
	if err != nil {
		tb.Fatal(err)
	}
	s := httptest.NewUnstartedServer(h)
	_ = s.Listener.Close() // a port, which is not used
	s.Listener = ln
	s.Start()
	tb.Cleanup(s.Close)
	return s
}
