package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/ui/ask"
)

func reachOf(t *testing.T, code int, body string) (*Reach, error) {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path != "/v1/reach" {
			t.Errorf("asked for %s", q.URL.Path)
		}
		w.WriteHeader(code)
		_, _ = w.Write([]byte(body))
	}))
	defer s.Close()
	c := config.Default()
	c.HTTP.Listen = strings.TrimPrefix(s.URL, "http://")
	return Peers(context.Background(), c)
}

const reachBody = `{"node": "p", "boot": "00", "peers": [
 {"boot": "6eb288290c23017c4b0d6642e4c1b251", "node": "d0", "endpoint": "10.0.0.6:7650", "dials": true, "pairs": [
  {"transport": "gdr", "local": "mlx5_0", "remote": "mlx5_0", "lanes": 2},
  {"transport": "gdr", "local": "mlx5_0", "remote": "mlx5_1", "lanes": 0, "why": "no path from rail mlx5_0 to mlx5_1: retry exceeded (status 12)"},
  {"transport": "gdr", "local": "mlx5_1", "remote": "mlx5_1", "lanes": 1},
  {"transport": "tcp", "local": "eth0", "remote": "eth0", "lanes": 0, "why": "the peer's \u001b[2J rail is\ndown"}]},
 {"boot": "ff", "endpoint": "10.0.0.7:7650", "dials": false, "pairs": [
  {"transport": "tcp", "local": "eth0", "remote": "eth0", "lanes": 0, "why": "no lane has been opened yet"}]},
 {"boot": "ee", "node": "d\u001b[2J", "endpoint": "", "claimed": "10.0.0.8:7650", "dials": true, "pairs": []},
 {"boot": "dd", "endpoint": "", "dials": true, "pairs": []}]}`

const reachText = `peer 10.0.0.6:7650 (node "d0", boot 6eb28829)
  gdr      mlx5_0 mlx5_1
    mlx5_0 2 up   no [1]
    mlx5_1 -      1 up
  tcp    eth0
    eth0 no [2]
  [1] no path from rail mlx5_0 to mlx5_1: retry exceeded (status 12)
  [2] the peer's ?[2J rail is?down
peer 10.0.0.7:7650 (boot ff)
  tcp    eth0
    eth0 no [1]
  [1] no lane has been opened yet
  (the peer opens the lanes, because its boot id is lower: see 'kvspray doctor --peers' there)
peer that connected to this sidecar, and announced the endpoint "10.0.0.8:7650" (node "d\x1b[2J", boot ee)
  no transport in common
peer that connected to this sidecar, and announced no endpoint (boot dd)
  no transport in common
`

// TestPeers: a sidecar's answer, as a matrix for each transport, and unchanged as JSON.
func TestPeers(t *testing.T) {
	r, err := reachOf(t, http.StatusOK, reachBody)
	if err != nil {
		t.Fatal(err)
	}
	var text, raw bytes.Buffer
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(reachText, text.String()); diff != "" {
		t.Error(diff)
	}
	if err := r.WriteJSON(&raw); err != nil {
		t.Fatal(err)
	}
	var back Reach
	if err := json.Unmarshal(raw.Bytes(), &back); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(*r, back); diff != "" {
		t.Error(diff)
	}
	if r.Reached() {
		t.Error("two peers have no lane")
	}
	if r.Peers = r.Peers[:1]; !r.Reached() {
		t.Error("the first peer has lanes")
	}
	if r.Peers = nil; !r.Reached() {
		t.Error("no peer is missing, and Reached is false")
	}
}

// TestPeersBadAnswers: each error has its cause and a remedy.
func TestPeersBadAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		code int
		body string
		want string
	}{
		"not found": {http.StatusNotFound, "", "another version"},
		"no JSON":   {http.StatusOK, "hello", "another version"},
		"too long":  {http.StatusOK, strings.Repeat(" ", ask.MaxAnswer+1), "16 MiB"},
	} {
		if _, err := reachOf(t, c.code, c.body); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	c := config.Default()
	c.HTTP.Listen = config.Off
	if _, err := Peers(context.Background(), c); err == nil ||
		!strings.Contains(err.Error(), "--http") {
		t.Error(err)
	}
	c.HTTP.Listen = "127.0.0.1:1"
	if _, err := Peers(context.Background(), c); err == nil || !strings.Contains(err.Error(),
		"kvspray serve") {
		t.Error(err)
	}
}

// TestPeersTextIsBounded: a big mesh, and a long reason with half a letter at its end.
func TestPeersTextIsBounded(t *testing.T) {
	r := Reach{Node: "n"}
	for i := range 200 {
		r.Peers = append(r.Peers, nodeapi.PeerReach{Boot: "b", Endpoint: fmt.Sprint(i), Dials: true,
			Pairs: []nodeapi.PairReach{{Transport: "tcp", Local: "l", Remote: "r", Why: strings.Repeat("é", 4000)}}})
	}
	var b bytes.Buffer
	if err := r.WriteText(&b); err != nil {
		t.Fatal(err)
	}
	if b.Len() > 64*1024 || !strings.Contains(b.String(), "and 136 more peers") {
		t.Errorf("%d bytes", b.Len())
	}
}
