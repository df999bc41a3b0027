package status

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/google/go-cmp/cmp"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/nodeapi/debug"
	"github.com/kvspray/kvspray/internal/ui/ask"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const self, other, caller = "aaaaaaaa000000000000000000000000", "bbbbbbbb000000000000000000000000",
	"cccccccc000000000000000000000000"

// sidecar is one during transfers, `moved` GiB later than at its start.
func sidecar(at time.Time, moved uint64) *Status {
	const gib = 1 << 30
	pair := func(peer, rail, state string, c spray.Counters) spray.PairView {
		return spray.PairView{Peer: peer, Path: spray.Path{Transport: "tcp", Local: rail, Remote: rail},
			State: state, Counters: c, Window: 1 << 20,
			Rate: 250e6, Samples: 9, Delay: 230 * time.Microsecond}
	}
	dead := pair(other, "rail1", "excluded", spray.Counters{Bytes: gib, Errors: 2, Failed: 3,
		TimedOut: 1, Doubled: 2, Exclusions: 4})
	dead.Reason, dead.Left = "silent for 1s while other rails to this peer moved", 300*time.Millisecond
	busy := pair(other, "rail0", "healthy", spray.Counters{Bytes: moved * gib, Hedges: 5,
		Exclusions: 1, Readmissions: 1})
	busy.InFlight, busy.Flights = 786432, 3
	lanes := func(rail string, n int, why string, idle bool) nodeapi.PairReach {
		return nodeapi.PairReach{Transport: "tcp", Local: rail, Remote: rail, Lanes: n, Why: why,
			Idle: idle}
	}
	s := &Status{At: at, State: debug.State{Node: nodeapi.Node{Node: "node-1", Boot: self,
		Version: "v1", Endpoint: "10.0.0.1:7650", Workers: []string{"vllm/a/tp0"}, Ready: true,
		Problems: []string{"clock: not synchronized"}},
		Leases: exec.View{Open: [2]int{1, 2}, Flights: 3, Pending: 1,
			Dests: []exec.DestView{{Lease: "dddddddd:1.0", Req: "req-7", State: "open", Grants: 1,
				Age: 1500 * time.Millisecond, Left: 28 * time.Second, Trouble: "no grant yet"}},
			Sources: []exec.SourceView{{Lease: "cccccccc:9.3", Req: "req-8", State: "open", Serving: 1,
				Age: 20 * time.Millisecond, Left: 29 * time.Second}},
			Rails: spray.View{Pairs: []spray.PairView{busy, dead, pair(self, "rail0", "healthy",
				spray.Counters{})}, Waiting: map[string]int{"background": 12, "decode_waits": 1}}},
		Totals: nodeapi.Totals{Transfers: map[string]uint64{"destination_ok": 10 + moved,
			"source_failed": 1}, Bytes: map[string]uint64{"tcp": moved * gib}},
		Store: &nodeapi.Store{Misses: 10 * moved, Tiers: []nodeapi.StoreTier{
			{Name: "memory", Bytes: gib, Capacity: 4 * gib, Hits: 80 * moved, Evicted: 7,
				Gets: 8 * moved, GetSeconds: 0.008 * float64(moved)},
			{Name: "disk", Bytes: 30 * gib, Capacity: 40 * gib, Hits: 10 * moved, Gets: 2 * moved,
				GetSeconds: 0.009 * float64(moved)}, {Name: "object", Problem: "no bucket"}}}},
		Reach: []nodeapi.PeerReach{
			{Boot: other, Node: "node-2", Endpoint: "10.0.0.2:7650", Pairs: []nodeapi.PairReach{
				lanes("rail1", 0, "connection refused", false), lanes("rail0", 2, "", false)}},
			{Boot: caller, Claimed: "127.0.0.1:7650", Pairs: []nodeapi.PairReach{
				lanes("rail0", 0, "", true)}},
			{Boot: "dddddddd", Node: "node-4", Endpoint: "10.0.0.4:7650", Pairs: []nodeapi.PairReach{
				lanes("rail0", 0, "no route to host", false)}}}}
	s.judge()
	return s
}

func TestText(t *testing.T) {
	at := time.Unix(1000, 0)
	got := sidecar(at.Add(4*time.Second), 3).Text(sidecar(at, 2))
	golden := filepath.Join("testdata", "status.txt")
	if os.Getenv("KVSPRAY_UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got); d != "" {
		t.Errorf("text (-want +got), KVSPRAY_UPDATE_GOLDEN=1 writes it again:\n%s", d)
	}
}

// The JSON form has everything that the text shows.
func TestJSON(t *testing.T) {
	s := sidecar(time.Time{}, 2)
	var b bytes.Buffer
	if err := s.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	var back Status
	if err := json.Unmarshal(b.Bytes(), &back); err != nil || !cmp.Equal(*s, back) {
		t.Errorf("%v: %s", err, cmp.Diff(*s, back))
	}
}

// A drained engine is not in service, whatever else is well.
func TestLeaving(t *testing.T) {
	s := sidecar(time.Unix(1000, 0), 2)
	s.Leaving, s.LeavingSeconds = true, 27
	s.judge()
	for _, want := range []string{"node-1  leaving, 27 s left  10.0.0.1:7650  ",
		"\nengines    vllm/a/tp0 (leaving: no new requests from routers for 27 s)\n"} {
		if got := s.Text(nil); !strings.Contains(got, want) {
			t.Errorf("%q is not in:\n%s", want, got)
		}
	}
	if s.Phase != "leaving" {
		t.Errorf("state %q, want leaving", s.Phase)
	}
	s.LeavingSeconds = 0
	s.Problems = []string{"GPU 0000:1b:00.0: Xid 79 (GPU has fallen off the bus): restart the host"}
	s.judge()
	for _, want := range []string{"node-1  leaving  10.0.0.1:7650  ",
		"\nengines    vllm/a/tp0 (their devices have failed: no requests from routers)\n",
		"\n! GPU 0000:1b:00.0: Xid 79"} {
		if got := s.Text(nil); !strings.Contains(got, want) {
			t.Errorf("%q is not in:\n%s", want, got)
		}
	}
}

// Rates of the store are of the interval; of an idle one, and of one without an earlier state,
// since the start. A sidecar that restarts begins at zero.
func TestStoreRates(t *testing.T) {
	at := time.Unix(1000, 0)
	now := sidecar(at.Add(time.Second), 3)
	now.Store.Misses += 45 // 80 of 145 pages came from memory
	if d := cmp.Diff([]string{"memory", "1.00", "GiB", "4.00", "GiB", "25%", "55.2%", "1ms", "7"},
		row(t, now.Text(sidecar(at, 2)), "memory")); d != "" {
		t.Error(d)
	}
	for name, prev := range map[string]*Status{"idle": sidecar(at, 3), "first": nil} {
		s := sidecar(at.Add(time.Second), 3)
		s.Store.Drained = true
		got := row(t, s.Text(prev), "disk")
		if d := cmp.Diff([]string{"disk", "30.0", "GiB", "40.0", "GiB", "75%", "10.0%", "4.5ms", "-",
			"drained"}, got); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
	restarted := sidecar(at.Add(time.Second), 1)
	if got := row(t, restarted.Text(sidecar(at, 2)), "memory"); got[6] != "80.0%" {
		t.Errorf("after a restart: %v", got)
	}
}

// Names of engines, their clients and peers do nothing to a terminal, and make no lines.
func TestForeignText(t *testing.T) {
	const bad = "a\x1b[2J\r\nb\u009b1m"
	s := sidecar(time.Unix(1000, 0), 2)
	s.Node.Node, s.Version, s.Endpoint = bad, bad, bad
	s.Workers, s.Problems = []string{bad}, []string{bad}
	s.Reach[0].Node, s.Reach[0].Endpoint, s.Reach[1].Claimed = bad, bad, bad
	s.Reach[2].Node, s.Reach[2].Pairs[0].Why = bad, bad
	s.Reach[0].Pairs[1].Local = bad
	s.Store.Tiers[0].Name, s.Store.Tiers[1].Problem = bad, bad
	s.Leases.Dests[0].Req, s.Leases.Dests[0].Trouble, s.Leases.Sources[0].Req = bad, bad, bad
	p := &s.Leases.Rails.Pairs[1]
	p.Path, p.Reason = spray.Path{Transport: bad, Local: bad, Remote: bad}, bad
	s.judge()
	got := s.Text(nil)
	if i := strings.IndexFunc(got, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }); i >=
		0 {
		t.Errorf("%q", got[max(0, i-40):])
	}
	if want := strings.Count(sidecar(s.At, 2).Text(nil), "\n"); strings.Count(got, "\n") != want {
		t.Errorf("%d lines, want %d:\n%s", strings.Count(got, "\n"), want, got)
	}
	const texts = 27 // 4 in the head, 5 of peers, 5 of rails, 3 of leases, 2 of tiers, 8 of troubles
	if n := strings.Count(got, "a?[2J??b?1m"); n != texts {
		t.Errorf("%d of %d texts are there:\n%s", n, texts, got)
	}
}

// row is a row of a table as its fields.
func row(t *testing.T, text, key string) []string {
	t.Helper()
	for _, l := range strings.Split(text, "\n") {
		if f := strings.Fields(l); len(f) > 0 && f[0] == key {
			return f
		}
	}
	t.Fatalf("no row %q in:\n%s", key, text)
	return nil
}

func TestRates(t *testing.T) {
	at := time.Unix(1000, 0)
	a, b := sidecar(at, 2), sidecar(at.Add(4*time.Second), 3)
	// 1 GiB in 4 s is 2.15 Gb/s
	if f := strings.Join(row(t, b.Text(a), "tcp:rail0"), " "); !strings.Contains(f,
		"healthy 2.15 Gb/s 2.00 Gb/s 768 KiB 1.00 MiB 3 ") {
		t.Errorf("rail0: %s", f)
	}
	if text := b.Text(nil); !strings.Contains(strings.Join(row(t, text, "tcp:rail0"), " "),
		"healthy - 2.00 Gb/s") {
		t.Errorf("a rate without an earlier state:\n%s", text)
	}
	a.Boot = other // another process: its counters began at 0
	if text := b.Text(a); strings.Contains(text, "2.15 Gb/s") {
		t.Errorf("a rate between two processes:\n%s", text)
	}
	// Counters that fall, because a pair was forgotten, are no rate.
	a, b = sidecar(at, 3), sidecar(at.Add(time.Second), 2)
	if f := row(t, b.Text(a), "tcp:rail0"); f[4] != "0" {
		t.Errorf("a falling counter shows as %v", f)
	}
}

func TestNothingYet(t *testing.T) {
	s := &Status{At: time.Unix(1, 0), State: debug.State{Node: nodeapi.Node{Node: "n",
		Boot: self}}}
	s.judge()
	const want = `n  starting    boot aaaaaaaa  kvspray
engines    none
transfers  0 receiving, 0 sending; ended: none
received   nothing
queue      chunks none; 0 slices in flight; waiting for a prefill: 0
peers      none yet: requests and gossip name them
store      off

! no engine is connected: kvspray doctor checks the socket
`
	if d := cmp.Diff(want, s.Text(nil)); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

// One screen shows a bounded number of rows.
func TestManyRows(t *testing.T) {
	s := sidecar(time.Unix(1, 0), 1)
	for range 40 {
		s.Reach = append(s.Reach, nodeapi.PeerReach{Boot: other, Node: "d"})
	}
	s.judge()
	text := s.Text(nil)
	if n := strings.Count(text, "\n"); n > 55 {
		t.Errorf("%d lines:\n%s", n, text)
	}
	for _, want := range []string{"and 27 more (--output json)\n\nrails",
		"and 35 more (--output json)\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in:\n%s", want, text)
		}
	}
}

// A small screen shows the beginning of the text, and problems in its lower half.
func TestFit(t *testing.T) {
	text := sidecar(time.Unix(1, 0), 2).Text(nil)
	lines := strings.Split(fit(text, 70, 12), "\n")
	if len(lines) != 12 || !strings.HasPrefix(lines[0], "node-1") ||
		!strings.HasPrefix(lines[10], "! clock") || lines[11] != "" {
		t.Errorf("%d lines on a screen of 12: %q", len(lines), lines)
	}
	for _, l := range lines {
		if n := len([]rune(l)); n > 70 {
			t.Errorf("%d columns on a screen of 70: %q", n, l)
		}
	}
	if got := fit(text, 500, 500); got != text {
		t.Errorf("a large screen shows %q", got)
	}
	if got := fit("a\nb\nc\n! d\n! e\n  and 4 more\n", 70, 5); got != "a\nb\n! e\n  and 4 more\n" {
		t.Errorf("a small screen shows %q", got)
	}
	if got := fit("a\n! b\n", 1, 1); got != "a\n" {
		t.Errorf("a screen of one cell shows %q", got)
	}
}

// server answers as a sidecar; an answer of nil is 404.
func server(t *testing.T, state, reach func() []byte) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var b []byte
		switch r.URL.Path {
		case "/debug/state":
			b = state()
		case "/v1/reach":
			b = reach()
		}
		if b == nil {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write(b)
	}))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Error(err)
	}
	return b
}

func TestRead(t *testing.T) {
	want := sidecar(time.Time{}, 2)
	s, err := Read(t.Context(), server(t, func() []byte { return encode(t, want.State) },
		func() []byte { return encode(t, nodeapi.Reach{Peers: want.Reach}) }))
	if err != nil {
		t.Fatal(err)
	}
	s.At = want.At
	if d := cmp.Diff(want, s); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

func TestNoSidecar(t *testing.T) {
	text := func(s string) func() []byte { return func() []byte { return []byte(s) } }
	none := func() []byte { return nil }
	for name, c := range map[string]struct{ addr, want string }{
		"refused":    {"127.0.0.1:1", "no sidecar answers at http://127.0.0.1:1: "},
		"no address": {"here", "host:port"},
		"404":        {server(t, none, none), "another version"},
		"no reach":   {server(t, text("{}"), none), "another version"},
		"no JSON":    {server(t, text("<html>"), none), "another version"},
		"other JSON": {server(t, text(`{"leases": 5}`), none), "another version"},
		"no end": {server(t, text(strings.Repeat(" ", ask.MaxAnswer+10)), none),
			"more than 16 MiB"},
	} {
		err := Watch(t.Context(), c.addr, time.Minute, &bytes.Buffer{})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// prints cancels a context after a number of writes.
type prints struct {
	out    bytes.Buffer
	left   int
	cancel context.CancelFunc
}

func (p *prints) Write(b []byte) (int, error) {
	if p.left--; p.left == 0 {
		p.cancel()
	}
	return p.out.Write(b)
}

// Watch shows rates from the second status on, keeps the last one while the sidecar does not
// answer, and ends with its context.
func TestWatch(t *testing.T) {
	asked := uint64(0)
	addr := server(t, func() []byte {
		if asked++; asked == 3 {
			return nil
		}
		return encode(t, sidecar(time.Time{}, asked).State)
	}, func() []byte { return encode(t, nodeapi.Reach{}) })
	ctx, cancel := context.WithCancel(t.Context())
	out := &prints{left: 4, cancel: cancel}
	if err := Watch(ctx, addr, MinInterval, out); err != nil {
		t.Fatal(err)
	}
	all := strings.SplitAfter(out.out.String(), "\n\nnode-1")
	if len(all) != 4 || strings.Contains(out.out.String(), "\x1b") {
		t.Fatalf("%d prints, want 4 without escape codes:\n%s", len(all), out.out.String())
	}
	for i, text := range all {
		rated := row(t, text, "tcp:rail0")[4] != "-"
		failed := strings.Contains(text, "! state of ")
		if rated != (i > 0) || failed != (i == 2) {
			t.Errorf("print %d: rates %v, failure %v:\n%s", i, rated, failed, text)
		}
	}
	if f := row(t, all[3], "received"); f[2] != "4.00" {
		t.Error(fmt.Sprint("the last print has ", f, ", want 4 GiB"))
	}
}
