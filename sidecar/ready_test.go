package sidecar

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/testutil"
)

// A node whose socket engines cannot reach is not ready, and names the reason; it is ready again
// once the socket could be made again.
func TestReadyWithTheEnginesSocket(t *testing.T) {
	dir := testutil.ShortDir(t)
	own, other := filepath.Join(dir, "own"), filepath.Join(dir, "other")
	n := start(t, func(c *config.Config) { c.Engine.Socket = filepath.Join(own, "s.sock") })
	if code, body := get(t, n, "/readyz"); code != 200 {
		t.Fatalf("%d %s", code, body)
	}
	// A file is where the directory was: the socket is gone, and cannot be made again.
	if err := os.Rename(own, other); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(own, nil, 0o600); err != nil {
		// The node has been quicker, and has its socket again.
		if err := os.Rename(own, filepath.Join(dir, "again")); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(own, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if code, body := get(t, n, "/readyz"); code != 503 || !strings.Contains(body, own) {
		t.Errorf("/readyz without the socket: %d %s", code, body)
	}
	if _, body := get(t, n, "/v1/node"); !strings.Contains(body, "engines cannot connect: ") {
		t.Errorf("/v1/node without the socket: %s", body)
	}
	if err := os.Remove(own); err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, patience, "the node is not ready again", func() bool {
		code, _ := get(t, n, "/readyz")
		return code == 200
	})
}

// What only leaves parts of a node without their service is shown, and the node stays ready.
func TestReadyWithProblems(t *testing.T) {
	n := start(t, nil)
	n.conv.missed.Store(&[]string{"dead:1", "dead:2"})
	if _, body := get(t, n, "/v1/node"); !strings.Contains(body,
		"peer.gossip.join: no answer from dead:1, dead:2") {
		t.Error(body)
	}
	if code, body := get(t, n, "/readyz"); code != 200 {
		t.Errorf("%d %s", code, body)
	}
	n.conv.missed.Store(&[]string{})
	if _, body := get(t, n, "/v1/node"); strings.Contains(body, "peer.gossip.join") {
		t.Error(body)
	}
}
