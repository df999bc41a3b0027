// SPDX-License-Identifier: Apache-2.0

package status

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvspray/kvspray/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const stateBody = `{"node":"p0","boot":"aa","version":"v1","endpoint":"10.0.0.1:7650","ready":true,
 "problems":["store tier disk: read-only"],
 "sessions":["vllm/a/tp0"],"totals":{"Transfers":{"source_ok":12,"source_failed":1}},
 "leases":{"open":[0,2],"rails":{"pairs":[
  {"peer":"bb","path":{"transport":"tcp","local":"eth0","remote":"eth0"},"state":"healthy",
   "counters":{"bytes":3221225472}},
  {"peer":"bb","path":{"transport":"tcp","local":"eth1","remote":"eth1"},"state":"excluded",
   "reason":"silent for 1s","counters":{"bytes":1}}]}}}`

const reachBody = `{"node":"p0","boot":"aa","peers":[
 {"boot":"bb","node":"d0","endpoint":"10.0.0.2:7650","pairs":[
  {"transport":"tcp","local":"eth1","remote":"eth1","lanes":2},
  {"transport":"tcp","local":"eth0","remote":"eth0","lanes":2}]},
 {"boot":"cc","node":"d1","endpoint":"10.0.0.3:7650","pairs":[
  {"transport":"tcp","local":"eth0","remote":"eth0","lanes":0,"why":"refused\u001b[2J"}]},
 {"boot":"dd","node":"","endpoint":"","pairs":[
  {"transport":"tcp","local":"eth0","remote":"eth0","lanes":0,"idle":true}]}]}`

const storeBody = `{"tiers":[{"name":"memory","bytes":1073741824,"capacity_bytes":17179869184},
 {"name":"disk","bytes":0,"capacity_bytes":1099511627776}]}`

const want = `p0  ready  10.0.0.1:7650  kvspray v1
engines    vllm/a/tp0
transfers  0 receiving, 2 sending; ended: source failed 1, source ok 12
store      memory 1.0 GiB of 16.0 GiB, disk 0 B of 1.0 TiB
peers      3
  10.0.0.2:7650   d0  4 lanes  3.0 GiB sent  tcp:eth0 tcp:eth1
  10.0.0.3:7650   d1  no lane  0 B sent
  (it connected)  -   idle     0 B sent
! no lane to d1: refused?[2J
! rail tcp:eth1 to eth1 at d0 is excluded: silent for 1s
! store tier disk: read-only
`

// sidecar answers like one; an empty body is 404.
func sidecar(t *testing.T, state, reach, store string) string {
	t.Helper()
	bodies := map[string]string{"/debug/state": state, "/v1/reach": reach, "/v1/store": store}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if bodies[q.URL.Path] == "" {
			http.NotFound(w, q)
			return
		}
		_, _ = w.Write([]byte(bodies[q.URL.Path]))
	}))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

func TestOneScreen(t *testing.T) {
	s, err := Read(t.Context(), sidecar(t, stateBody, reachBody, storeBody))
	if err != nil {
		t.Fatal(err)
	}
	var text, asJSON bytes.Buffer
	if err := s.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, text.String()); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
	var back Status
	if err := s.WriteJSON(&asJSON); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(asJSON.Bytes(), &back); err != nil || !cmp.Equal(*s, back) {
		t.Errorf("%v: %s", err, cmp.Diff(*s, back))
	}
}

// An engine that drains is no engine in service, whatever else is well.
func TestLeaving(t *testing.T) {
	leaves := strings.Replace(stateBody, `"ready":true`,
		`"ready":true,"leaving":true,"leaving_seconds":27`, 1)
	s, err := Read(t.Context(), sidecar(t, leaves, reachBody, storeBody))
	if err != nil {
		t.Fatal(err)
	}
	var text, asJSON bytes.Buffer
	if err := errors.Join(s.WriteText(&text), s.WriteJSON(&asJSON)); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(text.String(), "p0  leaving, 27 s left  10.0.0.1:7650  kvspray v1\n"+
		"engines    vllm/a/tp0 (leaving: no new requests from routers for 27 s)\n") {
		t.Errorf("%s", &text)
	}
	for _, part := range []string{`"state": "leaving"`, `"leaving_seconds": 27`} {
		if !strings.Contains(asJSON.String(), part) {
			t.Errorf("%s is not in:\n%s", part, &asJSON)
		}
	}
}

func TestNothingYet(t *testing.T) {
	s, err := Read(t.Context(), sidecar(t, `{"node":"n","boot":"aa"}`, `{"boot":"aa"}`, ""))
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	if err := s.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"n  starting", "engines    none", "store      off", "none yet",
		"no engine is connected"} {
		if !strings.Contains(text.String(), part) {
			t.Errorf("%q is not in:\n%s", part, &text)
		}
	}
}

func TestManyPeers(t *testing.T) {
	var peers []string
	for range 40 {
		peers = append(peers, `{"boot":"bb","node":"d","pairs":[]}`)
	}
	reach := `{"boot":"aa","peers":[` + strings.Join(peers, ",") + `]}`
	s, err := Read(t.Context(), sidecar(t, stateBody, reach, ""))
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	if err := s.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(text.String(), "\n"); n > 35 || !strings.Contains(text.String(),
		"and 24 more (--output json)") {
		t.Errorf("%d lines:\n%s", n, &text)
	}
}

func TestNoSidecar(t *testing.T) {
	for addr, text := range map[string]string{"127.0.0.1:1": "no sidecar answers", "here": "host:port",
		sidecar(t, "", "", ""): "another version"} {
		if _, err := Read(t.Context(), addr); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v, want %q", addr, err, text)
		}
	}
}
