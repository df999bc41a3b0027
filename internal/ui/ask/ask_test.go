package ask

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"testing"
)

const child = "KVSPRAY_ASK_TEST"

// A proxy of the environment never gets a request: to a sidecar it would be another host, or it
// would ask a sidecar of its own. net/http reads the environment once, so that it takes a process.
func TestNoProxy(t *testing.T) {
	if target := os.Getenv(child); target != "" {
		if _, err := Do(t.Context(), http.MethodPost, target, "/v1/leave"); err == nil ||
			!strings.Contains(err.Error(), "kvspray.invalid") {
			t.Error(err)
		}
		return
	}
	asked := false
	proxy := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		asked = true
	}))
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestNoProxy$")
	// net/http uses no proxy for addresses of this host: the name is another one's.
	cmd.Env = append(os.Environ(), child+"=kvspray.invalid:7651", "HTTP_PROXY="+proxy.URL,
		"http_proxy="+proxy.URL, "NO_PROXY=", "no_proxy=")
	out, err := cmd.CombinedOutput()
	proxy.Close()
	if err != nil || asked {
		t.Errorf("%v, the proxy was asked: %v\n%s", err, asked, out)
	}
}

// The target of a redirect could be any host.
func TestNoRedirect(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/elsewhere" {
			t.Error("the redirect was followed")
		}
		http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
	}))
	defer s.Close()
	_, err := Do(t.Context(), http.MethodPost, s.Listener.Addr().String(), "/v1/leave")
	if err == nil || !strings.Contains(err.Error(), "307 Temporary Redirect to POST /v1/leave") {
		t.Error(err)
	}
}

// The socket of another user exists, so the remedy is neither to start a sidecar nor another path.
func TestSocketOfAnotherUser(t *testing.T) {
	err := denied("/run/s", fmt.Errorf("no sidecar answers: %w", os.ErrPermission))
	if want := "the sidecar's socket /run/s: permission denied: run kvspray as root or as the " +
		"sidecar's user, or name this user in its engine.admin_uids"; err.Error() != want {
		t.Error(err)
	}
	if err := denied("/run/s", os.ErrNotExist); err != os.ErrNotExist {
		t.Error(err)
	}
}
