// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

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
	unwell   bool
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
	// once it is closed nobody else answers there
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
	px, url = start(t, Config{Prefill: []Prefill{{URL: p.URL, Peer: "127.0.0.1:7650"}},
		Decode: []string{d.URL}, Mode: mode})
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

func TestConcurrent(t *testing.T) {
	// Each waits for the other: only a proxy that dispatches both at once gets an answer.
	pHere, dHere := make(chan struct{}), make(chan struct{})
	meet := func(r *http.Request, mine, other chan struct{}) {
		close(mine)
		select {
		case <-other:
		case <-r.Context().Done():
		}
	}
	p, d, px, url := pair(t, Concurrent,
		func(w http.ResponseWriter, r *http.Request, s seen) {
			meet(r, pHere, dHere)
			answerPrefill(w, r,
				s)
		},
		func(w http.ResponseWriter, r *http.Request, s seen) {
			meet(r, dHere, pHere)
			answerDecode(w, r,
				s)
		})
	code, body, header := post(t, url, "/v1/chat/completions",
		`{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":7,"n":3,"stream":true,"stream_options":{"include_usage":true},"min_tokens":3,"seed":12345678901234567890,"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"evil"}}`,
		"X-Request-Id", "abc", "Authorization", "Bearer t", "Connection", "X-Hop", "X-Hop", "1")
	if code != 200 || body != `{"choices":[{"text":"hello"}]}` || header.Get("X-Request-Id") != "abc" {
		t.Fatalf("%d %s %v", code, body, header)
	}
	ps, ds := p.requests()[0], d.requests()[0]
	if ps.path != "/v1/chat/completions" || ds.path != ps.path {
		t.Error(ps.path, ds.path)
	}
	for key, want := range map[string]any{"max_tokens": 1.0, "max_completion_tokens": 1.0,
		"stream": false, "n": 1.0, "model": "m"} {
		if ps.body[key] != want {
			t.Errorf("P's %s is %v, want %v", key, ps.body[key], want)
		}
	}
	for _, key := range []string{"stream_options", "min_tokens"} {
		if _, ok := ps.body[key]; ok {
			t.Errorf("P got %s", key)
		}
	}
	if ds.body["max_tokens"] != 7.0 || ds.body["n"] != 3.0 || ds.body["stream"] != true {
		t.Errorf("D's body was changed: %v", ds.body)
	}
	if params(ps)["do_remote_decode"] != true || params(ps)["do_remote_prefill"] != false ||
		params(ds)["do_remote_prefill"] != true || params(ds)["do_remote_decode"] != false {
		t.Errorf("params %v, %v", params(ps), params(ds))
	}
	if _, ok := params(ds)["remote_host"]; ok {
		t.Error("a client's kv_transfer_params reached D")
	}
	pk, dk := own(ps), own(ds)
	if pk["v"] != 1.0 || dk["v"] != 1.0 || pk["xfer"] != dk["xfer"] ||
		len(pk["xfer"].(string)) != 32 || pk["fanout"] != 3.0 || dk["fanout"] != 3.0 ||
		dk["peer"] != "127.0.0.1:7650" {
		t.Errorf("kvspray params %v, %v", pk, dk)
	}
	for _, s := range []seen{ps, ds} {
		if s.header.Get("X-Request-Id") != "abc" || s.header.Get("Authorization") != "Bearer t" ||
			s.header.Get("X-Hop") != "" {
			t.Errorf("headers %v", s.header)
		}
	}
	// The answer is complete before it is counted.
	until(t, "the request is not counted",
		func() bool {
			return testutil.ToFloat64(px.met.requests.WithLabelValues("concurrent",
				"2xx")) == 1
		})
}

// A number that does not fit a float64 reaches the engine as it was written.
func TestFieldsStayAsWritten(t *testing.T) {
	r, err := parseRequest(kindCompletion,
		[]byte(`{"prompt":"a","seed":12345678901234567890,"temperature":0.10}`))
	if err != nil {
		t.Fatal(err)
	}
	b, err := r.forDecode(nil)
	if err != nil || !bytes.Contains(b, []byte("12345678901234567890")) || !bytes.Contains(b,
		[]byte("0.10")) {
		t.Errorf("%s, %v", b, err)
	}
}

func TestPrefillFirst(t *testing.T) {
	p, d, _, url := pair(t, PrefillFirst, answerPrefill, answerDecode)
	code, _, _ := post(t, url, "/v1/completions", `{"prompt":["a","b"],"max_tokens":5}`)
	if code != 200 {
		t.Fatal(code)
	}
	ps, ds := p.requests()[0], d.requests()[0]
	if ps.body["max_tokens"] != 1.0 || len(ps.body["prompt"].([]any)) != 2 {
		t.Errorf("P got %v", ps.body)
	}
	if _, ok := ps.body["max_completion_tokens"]; ok {
		t.Error("max_completion_tokens is a chat field")
	}
	if params(ds)["remote_engine_id"] != "p" || own(ds)["xfer"] != own(ps)["xfer"] {
		t.Errorf("D got %v", params(ds))
	}
}

// NIXL's answer describes the first prompt only: a list then must not use it.
func TestPrefillFirstNIXLParams(t *testing.T) {
	nixl := func(w http.ResponseWriter, _ *http.Request, _ seen) {
		fmt.Fprint(w, `{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1]]}}`)
	}
	_, d, px, url := pair(t, PrefillFirst, nixl, answerDecode)
	post(t, url, "/v1/completions", `{"prompt":["a","b"]}`)
	post(t, url, "/v1/completions", `{"prompt":[1,2,3]}`)
	ds := d.requests()
	if params(ds[0]) != nil || params(ds[1])["do_remote_prefill"] != true {
		t.Errorf("D got %v, %v", params(ds[0]), params(ds[1]))
	}
	if n := testutil.ToFloat64(px.met.alone.WithLabelValues(aloneParams)); n != 1 {
		t.Errorf("%v counted", n)
	}
}

func TestPrefillFails(t *testing.T) {
	for _, mode := range []Mode{Concurrent, PrefillFirst} {
		t.Run(string(mode), func(t *testing.T) {
			var d *engine
			failing := func(w http.ResponseWriter, _ *http.Request, _ seen) {
				if mode == Concurrent {
					until(t, "D was not asked", func() bool { return len(d.requests()) > 0 })
				}
				http.Error(w, "no", http.StatusInternalServerError)
			}
			decode := func(w http.ResponseWriter, r *http.Request, s seen) {
				if params(s) != nil {
					d.hang(r) // waits for a partner
					return
				}
				answerDecode(w, r, s)
			}
			_, d, px, url := pairWith(t, mode, failing, decode, &d)
			code, body, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`)
			if code != 200 || !strings.Contains(body, "hello") {
				t.Fatal(code, body)
			}
			last := d.requests()[len(d.requests())-1]
			if params(last) != nil {
				t.Errorf("D was asked to wait for a failed P: %v", params(last))
			}
			if n := testutil.ToFloat64(px.met.alone.WithLabelValues(aloneFailed)); n != 1 {
				t.Errorf("%v local prefills counted", n)
			}
			if mode == Concurrent {
				waitFor(t, d.gone, "D's first request was not cancelled")
			}
		})
	}
}

// A request that is wrong is the client's affair: it gets the decode engine's word, and no prefill
// counts as failed.
func TestClientIsWrong(t *testing.T) {
	for _, mode := range []Mode{Concurrent, PrefillFirst} {
		t.Run(string(mode), func(t *testing.T) {
			var d *engine
			unknown := func(w http.ResponseWriter, _ *http.Request, _ seen) {
				http.Error(w, "no such model", http.StatusNotFound)
			}
			_, _, px, url := pairWith(t, mode, unknown, unknown, &d)
			code, body, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`)
			if code != http.StatusNotFound || !strings.Contains(body, "no such model") {
				t.Fatal(code, body)
			}
			if n := testutil.ToFloat64(px.met.alone.WithLabelValues(aloneFailed)); n != 0 {
				t.Errorf("%v prefills counted as failed", n)
			}
			if n := testutil.ToFloat64(px.met.alone.WithLabelValues(aloneRefused)); mode == PrefillFirst &&
				n != 1 {
				t.Errorf("%v refusals counted", n)
			}
		})
	}
}

// pairWith is pair for a decode function that needs its engine.
func pairWith(t *testing.T, mode Mode, prefill, decode func(http.ResponseWriter, *http.Request,
	seen), dp **engine) (*engine, *engine, *Proxy, string) {
	p, d := newEngine(t, prefill), newEngine(t, decode)
	*dp = d
	px, url := start(t, Config{Prefill: []Prefill{{URL: p.URL, Peer: "127.0.0.1:7650"}},
		Decode: []string{d.URL}, Mode: mode})
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

// A client that goes away takes both requests with it.
func TestClientDisconnect(t *testing.T) {
	for _, mode := range []Mode{Concurrent, PrefillFirst} {
		t.Run(string(mode), func(t *testing.T) {
			var p, d *engine
			arrived := make(chan struct{}, 2)
			p = newEngine(t, func(_ http.ResponseWriter, r *http.Request,
				_ seen) {
				arrived <- struct{}{}
				p.hang(r)
			})
			d = newEngine(t, func(_ http.ResponseWriter, r *http.Request,
				_ seen) {
				arrived <- struct{}{}
				d.hang(r)
			})
			_, url := start(t, Config{Prefill: []Prefill{{URL: p.URL, Peer: "127.0.0.1:1"}},
				Decode: []string{d.URL}, Mode: mode})
			ctx, cancel := context.WithCancel(context.Background())
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions",
				strings.NewReader(`{"prompt":"a"}`))
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				if _, err := http.DefaultClient.Do(req); !errors.Is(err, context.Canceled) {
					t.Errorf("%v", err)
				}
			}()
			<-arrived
			if mode == Concurrent {
				<-arrived
			}
			cancel()
			waitFor(t, done, "the client's call did not end")
			waitFor(t, p.gone, "P's request was not cancelled")
			if mode == Concurrent {
				waitFor(t, d.gone, "D's request was not cancelled")
			} else if n := len(d.requests()); n != 0 {
				t.Errorf("D got %d requests", n)
			}
		})
	}
}

// Both engines' requests end with the client's, in any order. That P's has ended is no failure of
// P.
func TestClientDisconnectIsNoFailedPrefill(t *testing.T) {
	const clients = 32 // half of them would be counted
	arrived := make(chan struct{}, 2)
	hang := func(_ http.ResponseWriter, r *http.Request,
		_ seen) {
		arrived <- struct{}{}
		<-r.Context().Done()
	}
	p, d := newEngine(t, hang), newEngine(t, hang)
	px, url := start(t, Config{Prefill: []Prefill{{URL: p.URL, Peer: "127.0.0.1:1"}},
		Decode: []string{d.URL}, Mode: Concurrent})
	for range clients {
		ctx, cancel := context.WithCancel(context.Background())
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions",
			strings.NewReader(`{"prompt":"a"}`))
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			defer cancel()
			<-arrived
			<-arrived
		}()
		if _, err := http.DefaultClient.Do(req); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		until(t, "the request did not end",
			func() bool { return testutil.ToFloat64(px.met.inFlight) == 0 })
	}
	if n := testutil.ToFloat64(px.met.alone.WithLabelValues(aloneFailed)); n != 0 {
		t.Errorf("%v failed prefills counted of %d clients that went away", n, clients)
	}
}

// Each event reaches the client before the next is made.
func TestStreaming(t *testing.T) {
	next := make(chan struct{})
	decode := func(w http.ResponseWriter, r *http.Request, _ seen) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			fmt.Fprintf(w, "data: {\"i\":%d}\n\n", i)
			w.(http.Flusher).Flush()
			select {
			case <-next:
			case <-r.Context().Done():
				return
			}
		}
		fmt.Fprint(w, "data: [DONE]\n\n")
	}
	_, _, _, url := pair(t, Concurrent, answerPrefill, decode)
	resp, err := http.Post(url+"/v1/completions", "application/json",
		strings.NewReader(`{"prompt":"a","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if ct := resp.Header.Get("Content-Type"); ct != "text/event-stream" {
		t.Error(ct)
	}
	lines := bufio.NewScanner(resp.Body)
	for i := range 3 {
		if !lines.Scan() || lines.Text() != fmt.Sprintf(`data: {"i":%d}`, i) {
			t.Fatalf("event %d: %q", i, lines.Text())
		}
		lines.Scan()
		next <- struct{}{}
	}
	if !lines.Scan() || lines.Text() != "data: [DONE]" {
		t.Error(lines.Text())
	}
}

// An answer that breaks off must not look complete.
func TestDecodeBreaksOff(t *testing.T) {
	decode := func(w http.ResponseWriter, _ *http.Request, _ seen) {
		fmt.Fprint(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
	_, _, px, url := pair(t, Concurrent, answerPrefill, decode)
	resp, err := http.Post(url+"/v1/completions", "application/json",
		strings.NewReader(`{"prompt":"a","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("%q looked complete", b)
	}
	for _, b := range []*backend{px.prefill.all[0], px.decode.all[0]} {
		until(t, b.url+" still counts a request", func() bool { return load(b) == 0 })
	}
}

// So must an answer that is only passed on.
func TestPassBreaksOff(t *testing.T) {
	_, _, px, url := pair(t, Concurrent, answerPrefill, func(w http.ResponseWriter,
		_ *http.Request, _ seen) {
		fmt.Fprint(w, `{"data":[`)
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	// else it broke before the header went out
	if resp, err := http.Get(url + "/v1/models?limit=1"); err == nil {
		defer resp.Body.Close()
		if b, err := io.ReadAll(resp.Body); err == nil {
			t.Errorf("%q looked complete", b)
		}
	}
	until(t, "a place is still taken", func() bool { return len(px.slots) == 0 })
}

// vLLM merges these into the same map as its kv_transfer_params.
func TestNoParamsByTheBackDoor(t *testing.T) {
	for _, body := range []string{
		`{"prompt":"a","vllm_xargs":{"kv_transfer_params":"x","mine":7}}`,
		`{"prompt":"a","echo":true,"vllm_xargs":{"kv_transfer_params":{"kvspray":{"v":1}},"mine":7}}`,
	} {
		_, d, _, url := pair(t, PrefillFirst, answerPrefill, answerDecode)
		if code, answer, _ := post(t, url, "/v1/completions", body); code != http.StatusOK {
			t.Fatal(code, answer)
		}
		x, _ := d.requests()[0].body["vllm_xargs"].(map[string]any)
		if _, there := x[paramsKey]; there || x["mine"] != 7.0 {
			t.Errorf("%s became %v", body, x)
		}
	}
}

func TestStatusClass(t *testing.T) {
	for code, want := range map[int]string{0: "none", 200: "2xx", 302: "3xx", 404: "4xx", 502: "5xx"} {
		if got := statusClass(code); got != want {
			t.Errorf("%d: %s", code, got)
		}
	}
}

func load(b *backend) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.load
}

func TestDecodeUnreachable(t *testing.T) {
	p, d := newEngine(t, answerPrefill), newEngine(t, answerDecode)
	dead := newEngine(t, answerDecode)
	dead.Close()
	px, err := New(Config{Prefill: []Prefill{{URL: p.URL, Peer: "a:1"}}, Decode: []string{dead.URL,
		d.URL}, Mode: Concurrent})
	if err != nil {
		t.Fatal(err)
	}
	defer px.client.CloseIdleConnections()
	srv := httptest.NewServer(px.Handler())
	defer srv.Close()
	defer http.DefaultClient.CloseIdleConnections()
	for range 4 {
		if code, body, _ := post(t, srv.URL, "/v1/completions", `{"prompt":"a"}`); code != 200 {
			t.Fatal(code, body)
		}
	}
	if n := len(d.requests()); n != 4 {
		t.Errorf("%d requests", n)
	}
	if n := testutil.ToFloat64(px.met.retries); n != 1 {
		t.Errorf("%v retries: a back end that cannot be reached is out until it is healthy again", n)
	}
	d.Close()
	if code, body, _ := post(t, srv.URL, "/v1/completions", `{"prompt":"a"}`); code !=
		http.StatusBadGateway || !strings.Contains(body, `"error"`) {
		t.Error(code, body)
	}
	if code, _, _ := post(t, srv.URL, "/v1/completions", `{"prompt":"a"}`); code !=
		http.StatusServiceUnavailable {
		t.Error(code)
	}
}

func TestHealth(t *testing.T) {
	p, d, px, url := pair(t, PrefillFirst, answerPrefill, answerDecode)
	status := func() (int, string) {
		resp, err := http.Get(url + "/health")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b)
	}
	set := func(e *engine, unwell bool) {
		e.mu.Lock()
		e.unwell = unwell
		e.mu.Unlock()
	}
	if code, body := status(); code != 200 || !strings.Contains(body, `"status":"ok"`) {
		t.Fatal(code, body)
	}
	set(p, true)
	until(t, "P does not go down", func() bool {
		_, body := status()
		return strings.Contains(body,
			"degraded")
	})
	if code, _, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); code != 200 ||
		len(p.requests()) != 0 {
		t.Error("a request went to a prefill engine that is down")
	}
	if n := testutil.ToFloat64(px.met.alone.WithLabelValues(aloneNoPrefill)); n != 1 {
		t.Errorf("%v counted", n)
	}
	set(d, true)
	until(t, "D does not go down", func() bool {
		code,
			_ := status()
		return code == http.StatusServiceUnavailable
	})
	set(p, false)
	set(d, false)
	until(t, "they do not come back", func() bool {
		_, body := status()
		return strings.Contains(body,
			`"status":"ok"`)
	})
	resp, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, _ := io.ReadAll(resp.Body); !strings.Contains(string(b),
		`kvspray_proxy_backend_up{role="decode"`) {
		t.Errorf("%s", b)
	}
}

func TestDiscoversPeer(t *testing.T) {
	sidecar := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"node":"n","endpoint":"10.1.2.3:7650"}`)
	}))
	defer sidecar.Close()
	p, d := newEngine(t, answerPrefill), newEngine(t, answerDecode)
	px, url := start(t, Config{Prefill: []Prefill{{URL: p.URL, Sidecar: sidecar.URL}},
		Decode: []string{d.URL}, Mode: Concurrent})
	until(t, "the peer is not learned", func() bool { return px.prefill.all[0].peerAddr() != "" })
	post(t, url, "/v1/completions", `{"prompt":"a"}`)
	if got := own(d.requests()[0])["peer"]; got != "10.1.2.3:7650" {
		t.Errorf("peer %v", got)
	}
}

// An operator who names the wrong sidecar is told by /health: from the first answer of the engine
// on, or at once where its sidecar can be asked.
func TestWrongPeerIsTold(t *testing.T) {
	sidecar := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"node":"n","endpoint":"127.0.0.2:7650"}`)
	}))
	defer sidecar.Close()
	says := func(peer string) func(http.ResponseWriter, *http.Request, seen) {
		return func(w http.ResponseWriter, _ *http.Request, _ seen) {
			fmt.Fprintf(w, `{"choices":[{"text":"x"}],"kv_transfer_params":{"kvspray":{"v":1,"peer":%q}}}`,
				peer)
		}
	}
	for _, c := range []struct {
		name, peer, engine, sidecar string
		warning                     string
	}{
		{"by its engine", "127.0.0.1:7650", "127.0.0.2:7650", "", "pass --prefill-peer 127.0.0.2:7650"},
		{"another port", "127.0.0.1:7650", "127.0.0.1:7660", "", "pass --prefill-peer 127.0.0.1:7660"},
		{"by its sidecar", "127.0.0.1:7650", "", sidecar.URL, "pass --prefill-peer 127.0.0.2:7650"},
		{"right, and the sidecar is another's", "127.0.0.1:7650", "127.0.0.1:7650", sidecar.URL,
			"--prefill-sidecar is " + sidecar.URL + ", whose endpoint is 127.0.0.2:7650"},
		{"right", "127.0.0.2:7650", "127.0.0.2:7650", sidecar.URL, ""},
		{"nothing said", "127.0.0.1:7650", "", "", ""},
		{"asked for", "", "127.0.0.2:7650", sidecar.URL, ""},
		{"asked of another's", "", "127.0.0.1:7650", sidecar.URL, "--prefill-sidecar is " + sidecar.URL +
			", whose endpoint is 127.0.0.2:7650"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, d := newEngine(t, says(c.engine)), newEngine(t, answerDecode)
			px, url := start(t, Config{Prefill: []Prefill{{URL: p.URL, Peer: c.peer, Sidecar: c.sidecar}},
				Decode: []string{d.URL}, Mode: PrefillFirst})
			b := px.prefill.all[0]
			if c.engine != "" {
				post(t, url, "/v1/completions", `{"prompt":"a"}`)
			}
			if c.engine != "" || c.sidecar != "" {
				until(t, "nothing was compared", func() bool {
					b.mu.Lock()
					defer b.mu.Unlock()
					return b.said != "" && (c.engine == "" || b.said == c.engine)
				})
			}
			resp, err := http.Get(url + "/health")
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Fatal(err)
			}
			if warned := strings.Contains(string(body), `"warning"`); warned != (c.warning != "") ||
				!strings.Contains(string(body), c.warning) {
				t.Errorf("%s: want warning %q", body, c.warning)
			}
			if c.peer != "" && b.peerAddr() != c.peer {
				t.Errorf("the operator's word is overruled by %s", b.peerAddr())
			}
		})
	}
}

// A sidecar that --prefill-sidecar names and that cannot be asked is told of once in the log, and
// by /health until it answers.
func TestSidecarThatCannotBeAsked(t *testing.T) {
	node := func(status int, body string) *httptest.Server {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			fmt.Fprint(w, body)
		}))
		t.Cleanup(s.Close)
		return s
	}
	gone := newEngine(t, answerPrefill)
	gone.Close()
	for _, c := range []struct{ name, url, peer, wrong string }{
		{"nobody listens", gone.URL, "", "connection refused"},
		{"nobody listens to check the peer", gone.URL, "127.0.0.1:7650", "nothing checks --prefill-peer"},
		{"something else", node(404, "{}").URL, "", "404 Not Found"},
		{"no JSON", node(200, "hello").URL, "", "invalid character"},
		{"no endpoint", node(200, "{}").URL, "", "its answer contains no endpoint"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var log kvtest.Log
			p, d := newEngine(t, answerPrefill), newEngine(t, answerDecode)
			px, err := New(Config{Prefill: []Prefill{{URL: p.URL, Peer: c.peer, Sidecar: c.url}},
				Decode: []string{d.URL},
				Log:    slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))})
			if err != nil {
				t.Fatal(err)
			}
			defer px.client.CloseIdleConnections()
			b := px.prefill.all[0]
			for range 3 {
				if err := px.check(t.Context(), b); err != nil {
					t.Fatalf("the engine is taken out for its sidecar: %v", err)
				}
			}
			if out := log.String(); strings.Count(out, "\n") != 1 || !strings.Contains(out,
				"prefill_sidecar="+c.url) || !strings.Contains(out, "remedy=") {
				t.Errorf("logged: %s", out)
			}
			w := httptest.NewRecorder()
			px.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/health", nil))
			for _, want := range []string{`"warning"`, "--prefill-sidecar " + c.url, c.wrong,
				"pass the http.listen"} {
				if !strings.Contains(w.Body.String(), want) {
					t.Errorf("%s: no %q", w.Body, want)
				}
			}
			if b.peerAddr() != c.peer {
				t.Errorf("peer %q", b.peerAddr())
			}
			b.sidecar = node(200, `{"endpoint":"127.0.0.1:7650"}`).URL
			if err := px.check(t.Context(), b); err != nil {
				t.Fatal(err)
			}
			b.mu.Lock()
			defer b.mu.Unlock()
			if w := b.warningsLocked(); w != "" || b.peer != "127.0.0.1:7650" {
				t.Errorf("it answers, still: %q, peer %q", w, b.peer)
			}
			if strings.Count(log.String(), "\n") != 1 {
				t.Errorf("logged: %s", log.String())
			}
		})
	}
}

// While it cannot be asked, D learns from P's answer where P's sidecar is: the cache moves all the
// same, after the prefill.
func TestSidecarThatCannotBeAskedCostsNoTransfer(t *testing.T) {
	gone := newEngine(t, answerPrefill)
	gone.Close()
	p, d := newEngine(t, answerPrefill), newEngine(t, answerDecode)
	px, url := start(t, Config{Prefill: []Prefill{{URL: p.URL, Sidecar: gone.URL}},
		Decode: []string{d.URL}, Mode: Concurrent})
	if code, answer, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); code != 200 {
		t.Fatal(answer)
	}
	if got := own(d.requests()[0])["peer"]; got != "p:1" {
		t.Errorf("D is told of %v", got)
	}
	until(t, "it is not counted as prefill first", func() bool {
		return testutil.ToFloat64(px.met.requests.WithLabelValues(string(PrefillFirst), "2xx")) == 1
	})
}

func TestLeastLoaded(t *testing.T) {
	a, b := &backend{url: "a"}, &backend{url: "b"}
	p := newPool([]*backend{a, b})
	counts := map[*backend]int{}
	for range 10 {
		counts[p.take(nil)]++
	}
	if counts[a] != 5 || counts[b] != 5 {
		t.Errorf("%v", counts)
	}
	a.done()
	if got := p.take(nil); got != a {
		t.Error("the less loaded one was not taken")
	}
	if got := p.take(map[*backend]bool{a: true, b: true}); got != nil {
		t.Error("took one that was to be skipped")
	}
	a.suspect(errors.New("x"))
	if got := p.take(nil); got != b {
		t.Error("took one that is down")
	}
	if up, changed := a.note(nil); !up || !changed {
		t.Error("did not come back")
	}
	if up, _ := a.note(errors.New("once")); !up {
		t.Error("one failed check took it out")
	}
	if up, changed := a.note(errors.New("twice")); up || !changed {
		t.Error("two failed checks did not take it out")
	}
}

func TestAlone(t *testing.T) {
	for body, alone := range map[string]bool{
		`{"prompt":"a"}`:                              false,
		`{"prompt":"a","n":null}`:                     false,
		`{"prompt":"a","echo":false}`:                 false,
		`{"prompt":"a","echo":true}`:                  true,
		`{"prompt":"a","prompt_logprobs":1}`:          true,
		`{"prompt":"a","n":17}`:                       true,
		`{"prompt":"a","n":"x"}`:                      true,
		`{"prompt":[]}`:                               true,
		`{}`:                                          true,
		`{"prompt":"a","use_beam_search":true,"n":4}`: true,
		`{"prompt":[[1,2],[3]],"n":16,"stream":true}`: false,
		`{"prompt":[1,2,3],"prompt_embeds":"xxxx"}`:   true,
	} {
		r, err := parseRequest(kindCompletion, []byte(body))
		if err != nil || (r.alone != "") != alone {
			t.Errorf("%s: alone %q, %v", body, r.alone, err)
		}
	}
	for raw, want := range map[string]int{`"a"`: 1, `[1,2]`: 1, `["a","b"]`: 2, `[[1],[2],[3]]`: 3,
		`[]`: 0, `null`: 0, ``: 0} {
		if got := countPrompts(json.RawMessage(raw)); got != want {
			t.Errorf("countPrompts(%s) = %d", raw, got)
		}
	}
}

func TestBadBodies(t *testing.T) {
	p, d := newEngine(t, answerPrefill), newEngine(t, answerDecode)
	_, url := start(t, Config{Prefill: []Prefill{{URL: p.URL, Peer: "a:1"}}, Decode: []string{d.URL},
		BodyBytes: 100})
	for body, want := range map[string]string{
		"":                       codeInvalidBody,
		"[]":                     codeInvalidBody,
		"null":                   codeInvalidBody,
		"{":                      codeInvalidBody,
		"prompt=a":               codeInvalidBody,
		`{"prompt":"a"} {}`:      codeInvalidBody,
		`{"prompt":"\xff"`:       codeInvalidBody,
		strings.Repeat("x", 101): codeBodyTooLarge,
	} {
		status := map[string]int{codeInvalidBody: 400, codeBodyTooLarge: 413}[want]
		for _, path := range []string{"/v1/completions", "/v1/chat/completions"} {
			got, answer, h := post(t, url, path, body)
			refusal(t, path+" "+body, got, h, answer, status, want, "body")
		}
	}
	if len(p.requests())+len(d.requests()) != 0 {
		t.Error("an engine saw a bad body")
	}
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

// What is no route is refused in the API's form, with what there is instead, and reaches no engine.
func TestNoRoute(t *testing.T) {
	p, d := newEngine(t, answerPrefill), newEngine(t, answerDecode)
	_, url := start(t, Config{Prefill: []Prefill{{URL: p.URL, Peer: "a:1"}}, Decode: []string{d.URL}})
	for _, x := range []struct {
		method, path string
		status       int
		code, text   string
		allow        string
	}{
		{"GET", "/", 404, codeUnknownURL, "POST /v1/completions", ""},
		{"GET", "/v1/nope", 404, codeUnknownURL, "GET /v1/nope", ""},
		{"POST", "/v1/embeddings", 404, codeUnknownURL, "POST /v1/chat/completions", ""},
		{"POST", "/v1/completions/", 404, codeUnknownURL, "POST /v1/completions", ""},
		{"GET", "/v1/completions", 405, codeMethod, "use POST", "POST"},
		{"DELETE", "/v1/chat/completions", 405, codeMethod, "DELETE is not allowed at " +
			"/v1/chat/completions", "POST"},
		{"POST", "/v1/models", 405, codeMethod, "use GET", "GET, HEAD"},
		{"PUT", "/health", 405, codeMethod, "use GET", "GET, HEAD"},
	} {
		req, err := http.NewRequest(x.method, url+x.path, strings.NewReader(`{"prompt":"a"}`))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		if err = errors.Join(err, resp.Body.Close()); err != nil {
			t.Fatal(err)
		}
		refusal(t, x.method+" "+x.path, resp.StatusCode, resp.Header, string(b), x.status, x.code, x.text)
		if got := resp.Header.Get("Allow"); got != x.allow {
			t.Errorf("%s %s: it allows %q, want %q", x.method, x.path, got, x.allow)
		}
	}
	if len(p.requests())+len(d.requests()) != 0 {
		t.Error("an engine saw what is no route")
	}
}

// The router's own refusals for want of an engine have the API's form, too.
func TestNoEngineIsTold(t *testing.T) {
	const nobody = "http://127.0.0.1:1"
	for _, path := range []string{"/v1/completions", "/tokenize"} {
		// no health checks: what requests find is all that is known
		p, err := New(Config{Decode: []string{nobody}})
		if err != nil {
			t.Fatal(err)
		}
		srv := httptest.NewServer(p.Handler())
		// An engine that was tried has failed; one that is known to be down is not tried.
		status, answer, h := post(t, srv.URL, path, `{"prompt":"a"}`)
		refusal(t, path, status, h, answer, http.StatusBadGateway, codeEngineFailed, nobody)
		status, answer, h = post(t, srv.URL, path, `{"prompt":"a"}`)
		refusal(t, path, status, h, answer, http.StatusServiceUnavailable, codeNoEngine,
			"no decode engine is up")
		srv.Close()
		p.client.CloseIdleConnections()
	}
	http.DefaultClient.CloseIdleConnections()
}

// A prefill would compute for nobody, and hold blocks until it has waited long enough.
func TestNoPrefillWithoutADecodeEngine(t *testing.T) {
	for _, mode := range []Mode{Concurrent, PrefillFirst} {
		t.Run(string(mode), func(t *testing.T) {
			p := newEngine(t, answerPrefill)
			px, url := start(t, Config{Prefill: []Prefill{{URL: p.URL, Peer: "127.0.0.1:1"}},
				Decode: []string{"http://127.0.0.1:1"}, Mode: mode})
			px.decode.all[0].suspect(errors.New("as a request has found it"))
			status, answer, h := post(t, url, "/v1/completions", `{"prompt":"a"}`)
			refusal(t, "/v1/completions", status, h, answer, http.StatusServiceUnavailable, codeNoEngine,
				"no decode engine is up")
			if n := len(p.requests()); n != 0 {
				t.Errorf("the prefill got %d requests", n)
			}
		})
	}
}

func TestPass(t *testing.T) {
	_, d, _, url := pair(t, PrefillFirst, answerPrefill, func(w http.ResponseWriter,
		_ *http.Request, s seen) {
		w.WriteHeader(http.StatusTeapot)
		fmt.Fprint(w, s.path)
	})
	resp, err := http.Get(url + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusTeapot ||
		string(b) != "/v1/models" || len(d.requests()) != 1 {
		t.Error(resp.Status, string(b))
	}
}

func TestNewRefuses(t *testing.T) {
	for name, c := range map[string]Config{
		"no decode": {},
		"mode":      {Decode: []string{"http://a:1"}, Mode: "x"},
		"url":       {Decode: []string{"a:1"}},
		"no peer":   {Decode: []string{"http://a:1"}, Prefill: []Prefill{{URL: "http://p:1"}}},
		"bad port": {Decode: []string{"http://a:1"}, Prefill: []Prefill{{URL: "http://p:1",
			Peer: "x:y"}}},
		"port 0": {Decode: []string{"http://a:1"}, Prefill: []Prefill{{URL: "http://p:1",
			Peer: "x:0"}}},
		"no host": {Decode: []string{"http://a:1"}, Prefill: []Prefill{{URL: "http://p:1",
			Peer: ":7650"}}},
		"bad peer": {Decode: []string{"http://a:1"}, Prefill: []Prefill{{URL: "http://p:1", Peer: "x"}}},
	} {
		if _, err := New(c); err == nil {
			t.Errorf("%s accepted", name)
		}
	}
}

// Serve lets a request in flight finish, then ends with everything joined.
func TestServeDrains(t *testing.T) {
	arrived, finish := make(chan struct{}), make(chan struct{})
	p := newEngine(t, answerPrefill)
	d := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
		close(arrived)
		<-finish
		answerDecode(w, r, s)
	})
	px, err := New(Config{Prefill: []Prefill{{URL: p.URL, Peer: "a:1"}}, Decode: []string{d.URL}})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- px.Serve(ctx, l) }()
	answered := make(chan int, 1)
	go func() {
		code, _, _ := post(t, "http://"+l.Addr().String(), "/v1/completions", `{"prompt":"a"}`)
		answered <- code
	}()
	<-arrived
	cancel()
	close(finish)
	if code := <-answered; code != 200 {
		t.Error(code)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
	http.DefaultClient.CloseIdleConnections()
}

func FuzzParseRequest(f *testing.F) {
	f.Add([]byte(`{"prompt":["a",[1]],"n":2,"kv_transfer_params":{}}`))
	f.Add([]byte(`{"prompt":[null],"n":1e3}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, body []byte) {
		r, err := parseRequest(kindCompletion, body)
		if err != nil {
			return
		}
		if r.n < 1 || r.prompts < 0 {
			t.Fatalf("n %d, prompts %d", r.n, r.prompts)
		}
		for _, make := range []func() ([]byte, error){
			func() ([]byte, error) { return r.forPrefill("x") },
			func() ([]byte, error) { return r.forDecode(nil) },
		} {
			b, err := make()
			if err != nil || !json.Valid(b) {
				t.Fatalf("%s: %v", b, err)
			}
		}
	})
}
