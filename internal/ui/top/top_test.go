// SPDX-License-Identifier: Apache-2.0

package top

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode"

	tea "charm.land/bubbletea/v2"
	"charm.land/lipgloss/v2"
	"github.com/google/go-cmp/cmp"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/ui/ask"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const self, other, caller = "aaaaaaaa000000000000000000000000", "bbbbbbbb000000000000000000000000",
	"cccccccc000000000000000000000000"

// snapshot is a sidecar in the middle of something, `moved` GiB later than at its start.
func snapshot(at time.Time, moved uint64) *Snapshot {
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
	return &Snapshot{At: at, Node: "node-1", Boot: self, Version: "v1", Endpoint: "10.0.0.1:7650",
		Sessions: []string{"vllm/a/tp0"}, Ready: true,
		Leases: exec.View{Open: [2]int{1, 2}, Flights: 3, Pending: 1,
			Dests: []exec.DestView{{Lease: "dddddddd:1.0", Req: "req-7", State: "open", Grants: 1,
				Age: 1500 * time.Millisecond, Left: 28 * time.Second, Trouble: "no partner yet"}},
			Sources: []exec.SourceView{{Lease: "cccccccc:9.3", Req: "req-8", State: "open", Serving: 1,
				Age: 20 * time.Millisecond, Left: 29 * time.Second}},
			Rails: spray.View{Pairs: []spray.PairView{busy, dead, pair(self, "rail0", "healthy",
				spray.Counters{})}, Waiting: map[string]int{"background": 12, "decode_waits": 1}}},
		Lanes: []Lane{{other, "tcp", "rail0"}, {other, "tcp", "rail1"}, {self, "tcp", "rail0"}},
		Totals: Totals{Transfers: map[string]uint64{"destination_ok": 10 + moved,
			"source_failed": 1}, Bytes: map[string]uint64{"tcp": moved * gib}},
		Peers:   map[string]string{other: "10.0.0.2:7650", self: "10.0.0.1:7650", caller: ""},
		Claimed: map[string]string{caller: "127.0.0.1:7650"},
		Store: &Store{Misses: 10 * moved, Tiers: []Tier{{Name: "memory", Bytes: gib, Capacity: 4 * gib,
			Hits: 80 * moved, Evicted: 7, Gets: 8 * moved, GetUS: 8000 * moved},
			{Name: "disk", Bytes: 30 * gib, Capacity: 40 * gib, Hits: 10 * moved, Gets: 2 * moved,
				GetUS: 9000 * moved}, {Name: "object", Problem: "no bucket"}}}}
}

// A drained engine is in view, and how long routers avoid it.
func TestLeaving(t *testing.T) {
	s := snapshot(time.Unix(1000, 0), 2)
	s.Leaving, s.LeavingSeconds = true, 27
	if got := Render(nil, s, 0, Plain); !strings.Contains(got, "node-1  leaving, 27 s left  ") {
		t.Errorf("%s", got)
	}
}

// Rates of the store are of the interval; of an idle one, and of one without an earlier state,
// since the start. A sidecar that restarts begins at zero.
func TestStoreRates(t *testing.T) {
	at := time.Unix(1000, 0)
	now := snapshot(at.Add(time.Second), 3)
	now.Store.Misses += 45 // 80 of 145 pages came from memory
	if d := cmp.Diff([]string{"memory", "1.00", "GiB", "4.00", "GiB", "25%", "55.2%", "1ms", "7"},
		row(t, Render(snapshot(at, 2), now, 0, Plain), "memory")); d != "" {
		t.Error(d)
	}
	for name, prev := range map[string]*Snapshot{"idle": snapshot(at, 3), "first": nil} {
		s := snapshot(at.Add(time.Second), 3)
		s.Store.Drained = true
		got := row(t, Render(prev, s, 0, Plain), "disk")
		if d := cmp.Diff([]string{"disk", "30.0", "GiB", "40.0", "GiB", "75%", "10.0%", "4.5ms", "-",
			"drained"}, got); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
	restarted := snapshot(at.Add(time.Second), 1)
	if got := row(t, Render(snapshot(at, 2), restarted, 0, Plain), "memory"); got[6] != "80.0%" {
		t.Errorf("after a restart: %v", got)
	}
	none := snapshot(at, 1)
	none.Store = nil
	if strings.Contains(Render(nil, none, 0, Plain), "STORE") {
		t.Error("a pane without a store")
	}
}

// What engines, their clients and peers call themselves does nothing to a terminal, and makes no
// lines.
func TestForeignText(t *testing.T) {
	const bad = "a\x1b[2J\r\nb\u009b1m"
	s := snapshot(time.Unix(1000, 0), 2)
	s.Node, s.Version, s.Endpoint, s.Sessions, s.Peers[other], s.Claimed[caller] = bad, bad, bad,
		[]string{bad}, bad, bad
	s.Store.Tiers[0].Name, s.Store.Tiers[1].Problem = bad, bad
	s.Leases.Dests[0].Req, s.Leases.Dests[0].Trouble, s.Leases.Sources[0].Req = bad, bad, bad
	for i := range s.Leases.Rails.Pairs {
		p := &s.Leases.Rails.Pairs[i]
		p.Path, p.Reason = spray.Path{Transport: bad, Local: bad, Remote: bad}, bad
	}
	got := Render(nil, s, 0, Plain)
	if i := strings.IndexFunc(got, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }); i >=
		0 {
		t.Errorf("%q", got[max(0, i-40):])
	}
	if want := strings.Count(Render(nil, snapshot(s.At, 2), 0, Plain), "\n"); strings.Count(got,
		"\n") != want {
		t.Errorf("%d lines, want %d:\n%s", strings.Count(got, "\n"), want, got)
	}
	if n := strings.Count(got, "a?[2J??b?1m"); n != 19 {
		t.Errorf("%d of 19 texts are there:\n%s", n, got)
	}
}

// The text that a script reads.
func TestRenderPlain(t *testing.T) {
	at := time.Unix(1000, 0)
	got := Render(snapshot(at, 2), snapshot(at.Add(4*time.Second), 3), 0, Plain)
	golden := filepath.Join("testdata", "plain.txt")
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
		t.Errorf("rendered text (-want +got), KVSPRAY_UPDATE_GOLDEN=1 writes it again:\n%s", d)
	}
	if strings.Contains(got, "\x1b") {
		t.Error("escape sequences in plain text")
	}
}

// A row of a table as its fields.
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
	a, b := snapshot(at, 2), snapshot(at.Add(4*time.Second), 3)
	// 1 GiB in 4 s is 2.15 Gb/s.
	if f := strings.Join(row(t, Render(a, b, 0, Plain), "tcp:rail0"), " "); !strings.Contains(f,
		"healthy 2.15 Gb/s 2.00 Gb/s 768 KiB 1.00 MiB 3 ") {
		t.Errorf("rail0: %s", f)
	}
	if text := Render(nil, b, 0, Plain); !strings.Contains(strings.Join(row(t, text, "tcp:rail0"),
		" "), "healthy - 2.00 Gb/s") {
		t.Errorf("a rate without an earlier state:\n%s", text)
	}
	// Another process: its counters began at nought.
	a.Boot = other
	if text := Render(a, b, 0, Plain); strings.Contains(text, "2.15 Gb/s") {
		t.Errorf("a rate between two processes:\n%s", text)
	}
	// Counters that fall, because a pair was forgotten, are no rate.
	a, b = snapshot(at, 3), snapshot(at.Add(time.Second), 2)
	if f := row(t, Render(a, b, 0, Plain), "tcp:rail0"); f[4] != "0" {
		t.Errorf("a falling counter shows as %v", f)
	}
}

func TestEmpty(t *testing.T) {
	text := Render(nil, &Snapshot{At: time.Unix(1, 0), Node: "n", Boot: self}, 0, Plain)
	for _, want := range []string{"starting", "none registered", "RAILS\n  none", "PEERS\n  none",
		"LEASES\n  none"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in:\n%s", want, text)
		}
	}
}

func TestWidth(t *testing.T) {
	at := time.Unix(1000, 0)
	for _, st := range []Style{Plain, Coloured} {
		for _, l := range strings.Split(Render(snapshot(at, 2), snapshot(at.Add(time.Second), 3), 80,
			st), "\n") {
			if w := lipgloss.Width(l); w > 80 {
				t.Errorf("%d columns on a terminal of 80: %q", w, l)
			}
		}
	}
}

// server answers as a sidecar, and counts.
func server(t *testing.T, answer func(n int64, w http.ResponseWriter)) string {
	t.Helper()
	var n atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/debug/state" {
			http.NotFound(w, r)
			return
		}
		answer(n.Add(1), w)
	}))
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		s.Close()
	})
	return strings.TrimPrefix(s.URL, "http://")
}

func asJSON(t *testing.T) func(int64, http.ResponseWriter) {
	return func(n int64, w http.ResponseWriter) {
		if err := json.NewEncoder(w).Encode(snapshot(time.Time{}, uint64(n))); err != nil {
			t.Error(err)
		}
	}
}

func TestOnceJSON(t *testing.T) {
	var b bytes.Buffer
	if err := OnceJSON(t.Context(), server(t, asJSON(t)), &b); err != nil {
		t.Fatal(err)
	}
	want, err := json.MarshalIndent(snapshot(time.Time{}, 1), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want)+"\n", b.String()); d != "" {
		t.Error(d)
	}
}

func TestOnce(t *testing.T) {
	var b bytes.Buffer
	// two answers of a few bytes
	if err := Once(t.Context(), server(t, asJSON(t)), 20*time.Millisecond, &b); err != nil {
		t.Fatal(err)
	}
	if f := row(t, b.String(), "tcp:rail0"); f[3] != "healthy" || f[4] == "-" || f[4] == "0" {
		t.Errorf("no rate in %v", f)
	}
	if strings.Contains(b.String(), "\x1b") {
		t.Error("escape sequences in what --once prints")
	}
}

func TestWhatIsNoSidecar(t *testing.T) {
	for name, c := range map[string]struct {
		answer func(int64, http.ResponseWriter)
		want   string
	}{
		"an error": {func(_ int64, w http.ResponseWriter) { w.WriteHeader(http.StatusTeapot) },
			"not a sidecar"},
		"no JSON": {func(_ int64, w http.ResponseWriter) { _, _ = fmt.Fprint(w, "<html>") },
			"another version"},
		"no end": {func(_ int64, w http.ResponseWriter) {
			_, _ = w.Write(make([]byte, ask.MaxAnswer+10))
		},
			"more than 16 MiB"},
		"other JSON": {func(_ int64, w http.ResponseWriter) { _, _ = fmt.Fprint(w, `{"leases": 5}`) },
			"another version"},
	} {
		const tries = 10 // 16 MiB may take longer than anybody's patience on a machine that is busy
		addr := server(t, c.answer)
		err := error(context.DeadlineExceeded)
		for n := 0; n < tries && errors.Is(err, context.DeadlineExceeded); n++ {
			err = Once(t.Context(), addr, time.Millisecond, &bytes.Buffer{})
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	for _, want := range []string{"no sidecar answers at http://127.0.0.1:1:", "connection refused. " +
		"Start one with 'kvspray serve'", "--http HOST:PORT"} {
		if err := Live(t.Context(), "127.0.0.1:1", time.Second, nil, nil); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("nobody there: %v: want %q in it", err, want)
		}
	}
	for _, addr := range []string{"", "host", "host:", ":7651", "127.0.0.1:7651/x", "http://", "a b:1",
		"http://u@h:1"} {
		if got, err := ask.Address(addr); err == nil || !strings.Contains(err.Error(), "host:port") {
			t.Errorf("address %q is taken for %q: %v", addr, got, err)
		}
	}
	if got, err := ask.Address("http://[::1]:7651/"); got != "[::1]:7651" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := Fetch(t.Context(), "no address\x00"); err == nil || !strings.Contains(err.Error(),
		"host:port") {
		t.Errorf("no address: %v", err)
	}
}

// What keys and answers do to the screen.
func TestModel(t *testing.T) {
	m := newModel(t.Context(), "x", time.Second)
	if !strings.Contains(m.text(), "asking") {
		t.Errorf("before the first answer: %q", m.text())
	}
	at := time.Unix(1000, 0)
	m.Update(tea.WindowSizeMsg{Width: 100, Height: 12})
	m.Update(fetched{s: snapshot(at, 2)})
	m.Update(fetched{s: snapshot(at.Add(time.Second), 3)})
	lines := func() []string { return strings.Split(m.text(), "\n") }
	if l := lines(); len(l) != 12 || !strings.Contains(l[0], "node-1") ||
		!strings.Contains(l[11], "q quit") {
		t.Errorf("%d lines on a screen of 12: %q", len(l), l)
	}
	m.Update(tea.KeyPressMsg{Code: tea.KeyPgDown})
	if l := lines(); strings.Contains(l[0], "node-1") {
		t.Error("page down does not scroll")
	}
	for range 50 {
		m.Update(tea.KeyPressMsg{Code: tea.KeyDown})
	}
	if l := lines(); !strings.Contains(strings.Join(l, "\n"), "req-8") {
		t.Errorf("the end is not where scrolling ends: %q", l)
	}
	m.Update(tea.KeyPressMsg{Code: 'g', Text: "g"})
	m.Update(tea.KeyPressMsg{Code: 'p', Text: "p"})
	m.Update(fetched{s: snapshot(at.Add(2*time.Second), 9)})
	if l := lines(); !strings.Contains(l[11], "paused") || m.cur.Totals.Bytes["tcp"] != 3<<30 {
		t.Errorf("not paused: %q", l[11])
	}
	m.Update(tea.KeyPressMsg{Code: 'p', Text: "p"})
	_, again := m.Update(fetched{err: errors.New("gone")})
	if l := lines(); !strings.Contains(l[11], "gone") || !strings.Contains(l[0], "node-1") {
		t.Errorf("after a failed fetch: %q", l)
	}
	if again == nil {
		t.Error("a failed fetch is not tried again")
	}
	if _, quit := m.Update(tea.KeyPressMsg{Code: 'q', Text: "q"}); quit == nil ||
		quit() != tea.Quit() {
		t.Error("q does not quit")
	}
}

// q ends it, and so does the context.
func TestLive(t *testing.T) {
	addr := server(t, asJSON(t))
	var out bytes.Buffer
	if err := Live(t.Context(), addr, MinInterval, strings.NewReader("q"), &out,
		tea.WithWindowSize(100, 30)); err != nil {
		t.Fatal(err)
	}
	// The context ends once something was drawn.
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	screen := &drawn{want: "node-1", then: cancel}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if err := Live(ctx, addr, MinInterval, r, screen, tea.WithWindowSize(100, 30)); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(ctx.Err(), context.Canceled) {
		t.Errorf("nothing was drawn within a minute: %q", screen.out.String())
	}
}

// drawn is a screen that does something once it shows what it waits for. One goroutine writes to
// it.
type drawn struct {
	out  bytes.Buffer
	want string
	then func()
}

func (d *drawn) Write(p []byte) (int, error) {
	d.out.Write(p)
	if strings.Contains(d.out.String(), d.want) {
		d.then()
	}
	return len(p), nil
}
