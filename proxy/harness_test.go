package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/leaktest"
	kvtest "github.com/kvspray/kvspray/internal/testutil"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const patience = time.Minute // of a test that is about to fail

// engine is a back end that records what it was asked and answers through a function.
type engine struct {
	*httptest.Server
	t *testing.T

	mu       sync.Mutex
	seen     []seen
	answer   func(w http.ResponseWriter, r *http.Request, s seen)
	release  func(*http.Request) // waits before a release is answered; nil: not
	unwell   bool
	lists    bool          // answer takes the questions for models
	gone     chan struct{} // closed once a request's context ended before its answer
	goneOnce sync.Once
}

type seen struct {
	path   string
	header http.Header
	body   map[string]any
}

func newEngine(t *testing.T, answer func(w http.ResponseWriter, r *http.Request, s seen)) *engine {
	e := &engine{t: t, answer: answer, gone: make(chan struct{})}
	e.Server = httptest.NewUnstartedServer(http.HandlerFunc(e.serve))
	// an address of this test only: no other server answers there after it is closed
	l, err := net.Listen("tcp", net.JoinHostPort(kvtest.Loopback(), "0"))
	if err != nil {
		t.Fatal(err)
	}
	_ = e.Listener.Close()
	e.Listener = l
	e.Start()
	t.Cleanup(e.Close)
	return e
}

func (e *engine) serve(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/health" {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.unwell {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		return
	}
	if r.URL.Path == "/v1/models" && !e.lists && r.Header.Get(requestIDHeader) == "" {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	s := seen{path: r.URL.Path, header: r.Header.Clone()}
	raw, err := io.ReadAll(r.Body)
	if err != nil {
		e.t.Error(err)
	}
	if len(raw) > 0 {
		if err := json.Unmarshal(raw, &s.body); err != nil {
			e.t.Errorf("%s: %v", raw, err)
		}
	}
	e.mu.Lock()
	e.seen = append(e.seen, s)
	e.mu.Unlock()
	if own(s)["release"] == true {
		if e.release != nil {
			e.release(r)
		}
		fmt.Fprint(w, "{}")
		return
	}
	e.answer(w, r, s)
}

func (e *engine) requests() []seen {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]seen(nil), e.seen...)
}

// hang answers nothing until the request is canceled.
func (e *engine) hang(r *http.Request) {
	select {
	case <-r.Context().Done():
		e.goneOnce.Do(func() { close(e.gone) })
	case <-time.After(patience):
		e.t.Error("a request was never cancelled")
	}
}

func params(s seen) map[string]any {
	p, _ := s.body[paramsKey].(map[string]any)
	return p
}

func own(s seen) map[string]any {
	k, _ := params(s)["kvspray"].(map[string]any)
	return k
}

func answerPrefill(w http.ResponseWriter, _ *http.Request, s seen) {
	xfer, _ := own(s)["xfer"].(string)
	fmt.Fprintf(w,
		`{"choices":[{"text":"x"}],"kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":"p","kvspray":{"v":1,"xfer":%q,"peer":"p:1","fanout":1}}}`, xfer)
}

func answerDecode(w http.ResponseWriter, _ *http.Request, _ seen) {
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprint(w, `{"choices":[{"text":"hello"}]}`)
}

// defaultBodies are the bytes of all bodies in flight.
var defaultBodies = int64(config.DefaultRouter().MaxBodies)

// decoders are engines with nothing but URLs.
func decoders(urls ...string) (list []Engine) {
	for _, url := range urls {
		list = append(list, Engine{URL: url})
	}
	return list
}

// start runs a proxy over the engines and returns its URL.
func start(t *testing.T, cfg Config) (*Proxy, string) {
	t.Helper()
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(p.Handler())
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { p.Watch(ctx) })
	t.Cleanup(func() {
		srv.Close()
		cancel()
		wg.Wait()
		http.DefaultClient.CloseIdleConnections()
	})
	return p, srv.URL
}

func pair(t *testing.T, mode Mode, prefill, decode func(http.ResponseWriter, *http.Request,
	seen)) (p, d *engine, px *Proxy, url string) {
	p, d = newEngine(t, prefill), newEngine(t, decode)
	px, url = start(t, Config{Prefill: []Engine{{URL: p.URL, Peer: "127.0.0.1:7650"}},
		Decode: decoders(d.URL), Mode: mode})
	return p, d, px, url
}

func post(t *testing.T, url, path, body string, header ...string) (int, string, http.Header) {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b), resp.Header
}

// pairWith is pair for a decode function that needs its engine.
func pairWith(t *testing.T, mode Mode, prefill, decode func(http.ResponseWriter, *http.Request,
	seen), dp **engine) (*engine, *engine, *Proxy, string) {
	p, d := newEngine(t, prefill), newEngine(t, decode)
	*dp = d
	px, url := start(t, Config{Prefill: []Engine{{URL: p.URL, Peer: "127.0.0.1:7650"}},
		Decode: decoders(d.URL), Mode: mode})
	return p, d, px, url
}

func waitFor(t *testing.T, c <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(patience):
		t.Fatal(what)
	}
}

// until waits for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for !ok() {
		select {
		case <-ctx.Done():
			t.Fatal(what)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func load(b *backend) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.load
}

// refusal checks all of an answer that is the router's own: clients of the API read every field.
func refusal(t *testing.T, what string, status int, h http.Header, answer string, wantStatus int,
	wantCode, wantText string) {
	t.Helper()
	var e struct {
		Error map[string]any `json:"error"`
	}
	if err := json.Unmarshal([]byte(answer), &e); err != nil ||
		h.Get("Content-Type") != "application/json" {
		t.Errorf("%s: %s, %v: %q", what, h.Get("Content-Type"), err, answer)
		return
	}
	kind := "invalid_request_error"
	if wantStatus >= 500 {
		kind = "server_error"
	}
	message, _ := e.Error["message"].(string)
	param, hasParam := e.Error["param"]
	if status != wantStatus || e.Error["code"] != wantCode || e.Error["type"] != kind || !hasParam ||
		param != nil || len(e.Error) != 4 || !strings.Contains(message, wantText) {
		t.Errorf("%s: %d %s: want %d, code %s, and %q in the message", what, status, answer, wantStatus,
			wantCode, wantText)
	}
}
