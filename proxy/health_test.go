package proxy

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvspray/kvspray/internal/origin"
	kvtest "github.com/kvspray/kvspray/internal/testutil"
)

// checkNow makes one health check.
func checkNow(t *testing.T, p *Proxy, b *backend) error {
	t.Helper()
	asked := make(chan struct{})
	close(asked)
	err := p.check(t.Context(), b, asked)
	p.compare(t.Context(), b)
	return err
}

func parsed(t *testing.T, raw string) origin.URL {
	t.Helper()
	u, err := origin.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return u
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
		return strings.Contains(body, "degraded")
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
		`kvspray_proxy_engine_up{role="decode"`) {
		t.Errorf("%s", b)
	}
}

func TestDiscoversPeer(t *testing.T) {
	sidecar := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"node":"n","endpoint":"10.1.2.3:7650"}`)
	}))
	defer sidecar.Close()
	p, d := newEngine(t, answerPrefill), newEngine(t, answerDecode)
	px, url := start(t, Config{Prefill: []Engine{{URL: p.URL, Sidecar: sidecar.URL}},
		Decode: decoders(d.URL), Mode: Concurrent})
	until(t, "the peer is not learned", func() bool { return px.prefill.all[0].endpoint() != "" })
	post(t, url, "/v1/completions", `{"prompt":"a"}`)
	if got := own(d.requests()[0])["peer"]; got != "10.1.2.3:7650" {
		t.Errorf("peer %v", got)
	}
}

// /health warns of a wrong peer from the engine's first answer on; TestIdentityWarns has the cases.
func TestHealthWarnsOfAWrongPeer(t *testing.T) {
	p, d := newEngine(t, answerPrefill), newEngine(t, answerDecode) // the peer of its answer is p:1
	_, url := start(t, Config{Prefill: []Engine{{URL: p.URL, Peer: "127.0.0.1:7650"}},
		Decode: decoders(d.URL), Mode: PrefillFirst, Times: quick()})
	post(t, url, "/v1/completions", `{"prompt":"a"}`)
	until(t, "no warning", func() bool {
		resp, err := http.Get(url + "/health")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		return err == nil && strings.Contains(string(body), "set peer to p:1")
	})
}

// A sidecar that cannot be asked is logged once. /health warns of
// it until it answers.
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
		{"nobody listens to check the peer", gone.URL, "127.0.0.1:7650", "nothing checks peer"},
		{"something else", node(404, "{}").URL, "", "404 Not Found"},
		{"no JSON", node(200, "hello").URL, "", "invalid character"},
		{"no endpoint", node(200, "{}").URL, "", "its answer contains no endpoint"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var log kvtest.Log
			p, d := newEngine(t, answerPrefill), newEngine(t, answerDecode)
			px, err := New(Config{Prefill: []Engine{{URL: p.URL, Peer: c.peer, Sidecar: c.url}},
				Decode: decoders(d.URL),
				Log:    slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))})
			if err != nil {
				t.Fatal(err)
			}
			defer px.client.CloseIdleConnections()
			b := px.prefill.all[0]
			for range 3 {
				px.askSidecar(t.Context(), b)
				if err := checkNow(t, px, b); err != nil || !b.takes() {
					t.Fatalf("the engine is taken out for its sidecar: %v", err)
				}
			}
			if out := log.String(); strings.Count(out, "\n") != 1 || !strings.Contains(out,
				" sidecar="+c.url) || !strings.Contains(out, "remedy=") {
				t.Errorf("logged: %s", out)
			}
			w := httptest.NewRecorder()
			px.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/health", nil))
			for _, want := range []string{`"warning"`, "sidecar " + c.url, c.wrong,
				"set sidecar to the http.listen"} {
				if !strings.Contains(w.Body.String(), want) {
					t.Errorf("%s: no %q", w.Body, want)
				}
			}
			if b.endpoint() != c.peer {
				t.Errorf("peer %q", b.endpoint())
			}
			b.sidecar = parsed(t, node(200, `{"endpoint":"127.0.0.1:7650"}`).URL)
			px.askSidecar(t.Context(), b)
			if err := checkNow(t, px, b); err != nil {
				t.Fatal(err)
			}
			b.mu.Lock()
			defer b.mu.Unlock()
			if w := b.identity.warnings(); w != "" || b.identity.endpoint != "127.0.0.1:7650" {
				t.Errorf("it answers, still: %q, peer %q", w, b.identity.endpoint)
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
	px, url := start(t, Config{Prefill: []Engine{{URL: p.URL, Sidecar: gone.URL}},
		Decode: decoders(d.URL), Mode: Concurrent})
	if code, answer, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); code != 200 {
		t.Fatal(answer)
	}
	if got := own(d.requests()[0])["peer"]; got != "p:1" {
		t.Errorf("the decode engine received the peer %v", got)
	}
	until(t, "it is not counted as prefill first", func() bool {
		return testutil.ToFloat64(px.met.requests.WithLabelValues(string(PrefillFirst), "2xx")) == 1
	})
}

// The router's own refusals for want of an engine have the API's form, too.
func TestRefusalWithoutAnEngine(t *testing.T) {
	const down = "http://127.0.0.1:1"
	for _, path := range []string{"/v1/completions", "/tokenize"} {
		// no health checks: what requests find is all that is known
		p, err := New(Config{Decode: decoders(down)})
		if err != nil {
			t.Fatal(err)
		}
		srv := httptest.NewServer(p.Handler())
		// An engine that was tried has failed; one that is known to be down is not tried.
		status, answer, h := post(t, srv.URL, path, `{"prompt":"a"}`)
		refusal(t, path, status, h, answer, http.StatusBadGateway, codeEngineFailed, down)
		status, answer, h = post(t, srv.URL, path, `{"prompt":"a"}`)
		refusal(t, path, status, h, answer, http.StatusServiceUnavailable, codeNoEngine,
			"no decode engine is up")
		srv.Close()
		p.client.CloseIdleConnections()
	}
	http.DefaultClient.CloseIdleConnections()
}

// A leaving engine gets no new requests, and finishes those that it has.
func TestLeavingEngine(t *testing.T) {
	var leaving, silent atomic.Bool
	sidecar := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if silent.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintf(w, `{"endpoint":"10.1.2.3:7650","leaving":%v}`, leaving.Load())
	}))
	defer sidecar.Close()
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"endpoint":"10.1.2.4:7650"}`)
	}))
	defer other.Close()
	release := make(chan struct{})
	p := newEngine(t, answerPrefill)
	d0 := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
		<-release
		answerDecode(w, r, s)
	})
	d1 := newEngine(t, answerDecode)
	px, url := start(t, Config{Prefill: []Engine{{URL: p.URL, Sidecar: sidecar.URL}},
		Decode: []Engine{{URL: d0.URL, Sidecar: sidecar.URL}, {URL: d1.URL, Sidecar: other.URL}},
		Mode:   Concurrent})
	leaves := func() bool {
		return !px.prefill.any(nil, "", candidate.takes) && !px.decode.all[0].takes()
	}
	until(t, "the sidecars are not asked", func() bool {
		return px.prefill.all[0].endpoint() != "" && px.decode.any(nil, "", candidate.takes)
	})
	first := make(chan int, 1)
	go func() {
		code, _, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`)
		first <- code
	}()
	until(t, "no request goes to the first engine", func() bool { return len(d0.requests()) == 1 })
	leaving.Store(true)
	until(t, "the engines do not leave", leaves)
	px.decode.all[0].mu.Lock()
	px.decode.all[0].health.answers(time.Now(), signAlive, nil)
	px.decode.all[0].mu.Unlock()
	if !leaves() {
		t.Error("a good health check brings a leaving engine back")
	}
	before := len(p.requests())
	for range 4 {
		if code, _, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); code != 200 {
			t.Error(code)
		}
	}
	if len(d0.requests()) != 1 || len(d1.requests()) != 4 || len(p.requests()) != before {
		t.Errorf("%d, %d and %d requests: a leaving engine got new ones", len(d0.requests()),
			len(d1.requests()), len(p.requests())-before)
	}
	close(release)
	if code := <-first; code != 200 {
		t.Errorf("the request of the leaving engine: %d", code)
	}
	resp, err := http.Get(url + "/health")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, _ := io.ReadAll(resp.Body); strings.Count(string(b), `"leaving":true`) != 2 {
		t.Errorf("%s", b)
	}
	silent.Store(true)
	until(t, "the sidecar's silence is not seen", func() bool {
		return px.prefill.all[0].endpoint() == ""
	})
	if !leaves() {
		t.Error("a sidecar that does not answer brings its engine back")
	}
	silent.Store(false)
	leaving.Store(false)
	until(t, "they do not come back", func() bool {
		return px.prefill.any(nil, "", candidate.takes) && px.decode.all[0].takes()
	})
}

// A decode engine whose sidecar cannot be asked would get requests until its end.
func TestDecodeSidecarThatCannotBeAsked(t *testing.T) {
	var log kvtest.Log
	gone, d := newEngine(t, answerDecode), newEngine(t, answerDecode)
	gone.Close()
	px, err := New(Config{Decode: []Engine{{URL: d.URL, Sidecar: gone.URL}},
		Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))})
	if err != nil {
		t.Fatal(err)
	}
	defer px.client.CloseIdleConnections()
	b := px.decode.all[0]
	// Before the engine is up, a sidecar that does not answer is no fault.
	px.askSidecar(t.Context(), b)
	if log.String() != "" {
		t.Errorf("logged: %s", log.String())
	}
	for range 3 {
		if err := checkNow(t, px, b); err != nil || !b.takes() {
			t.Fatalf("the engine is taken out for its sidecar: %v", err)
		}
		px.askSidecar(t.Context(), b)
	}
	if out := log.String(); strings.Count(out, "\n") != 1 || !strings.Contains(out,
		" sidecar="+gone.URL) || !strings.Contains(out, "set sidecar to") {
		t.Errorf("logged: %s", out)
	}
	w := httptest.NewRecorder()
	px.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/health", nil))
	for _, want := range []string{`"warning"`, "sidecar " + gone.URL, "connection refused",
		"nothing shows that the engine leaves"} {
		if !strings.Contains(w.Body.String(), want) {
			t.Errorf("%s: no %q", w.Body, want)
		}
	}
}

// The mark of a sidecar that is gone ends with its engine, or after its time.
func TestLeavingEnds(t *testing.T) {
	var silent atomic.Bool
	sidecar := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if silent.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		fmt.Fprint(w, `{"endpoint":"10.1.2.3:7650","leaving":true}`)
	}))
	defer sidecar.Close()
	var log kvtest.Log
	d := newEngine(t, answerDecode)
	px, err := New(Config{Decode: []Engine{{URL: d.URL, Sidecar: sidecar.URL}},
		Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer px.client.CloseIdleConnections()
	b := px.decode.all[0]
	if err := checkNow(t, px, b); err != nil {
		t.Fatal(err)
	}
	ask := func(wantTakes bool, what string) {
		t.Helper()
		px.askSidecar(t.Context(), b)
		if b.takes() != wantTakes {
			t.Error(what)
		}
	}
	ask(false, "it does not leave")
	w := httptest.NewRecorder()
	px.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/health", nil))
	if want := "no decode engine takes requests (1 leave)"; w.Code != 503 ||
		!strings.Contains(w.Body.String(), want) {
		t.Errorf("%d %s: want %q", w.Code, w.Body, want)
	}
	silent.Store(true)
	ask(false, "a sidecar that does not answer brings its engine back")
	b.identity.sidecarAnswered = b.identity.sidecarAnswered.Add(-leavingFor)
	ask(true, "the mark has no end")

	silent.Store(false)
	ask(false, "it does not leave")
	silent.Store(true)
	ask(false, "a sidecar that does not answer brings its engine back")
	for _, unwell := range []bool{true, true, false} {
		d.mu.Lock()
		d.unwell = unwell
		d.mu.Unlock()
		if err := checkNow(t, px, b); (err != nil) != unwell {
			t.Fatal(err)
		}
	}
	if !b.takes() {
		t.Error("the mark outlives the engine")
	}
	for _, want := range []string{`msg="back end leaves"`, `msg="back end takes requests again"`} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("%q is not logged: %s", want, log.String())
		}
	}
}

// A slow sidecar does not delay health checks, and an engine that fails them does not delay its
// sidecar's answers.
func TestHealthAndSidecarDoNotWaitForEachOther(t *testing.T) {
	var checks, asks, during atomic.Int64
	var slow, unwell atomic.Bool
	d := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/health" {
			checks.Add(1)
			if unwell.Load() {
				w.WriteHeader(http.StatusServiceUnavailable)
			}
		}
	}))
	defer d.Close()
	sidecar := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asks.Add(1)
		if slow.Load() {
			before := checks.Load()
			<-r.Context().Done()
			during.Add(checks.Load() - before)
			return
		}
		fmt.Fprint(w, `{"endpoint":"10.1.2.3:7650"}`)
	}))
	defer sidecar.Close()
	px, _ := start(t, Config{Decode: []Engine{{URL: d.URL, Sidecar: sidecar.URL}}})
	until(t, "the engine is not up", func() bool { return px.decode.any(nil, "", candidate.takes) })
	slow.Store(true)
	until(t, "a health check waits for the sidecar", func() bool { return during.Load() > 0 })
	slow.Store(false)
	unwell.Store(true)
	until(t, "the engine is not down", func() bool { return !px.decode.any(nil, "", candidate.takes) })
	before := asks.Load()
	until(t, "the sidecar of an engine that is down is not asked", func() bool {
		return asks.Load() >= before+2
	})
}

// A failed request takes an engine out before its health check does. Its cache is gone all the
// same.
func TestCacheOfAnEngineThatFailedARequestIsForgotten(t *testing.T) {
	d := newEngine(t, answerDecode)
	p, url := start(t, Config{Decode: decoders(d.URL), Policy: "local"})
	body := fmt.Sprintf(`{"prompt":%q}`, strings.Repeat("a long document ", 100))
	if code, answer, _ := post(t, url, "/v1/completions", body); code != 200 ||
		p.placing.Stats().Blocks == 0 {
		t.Fatal(code, answer, p.placing.Stats())
	}
	d.CloseClientConnections()
	d.Close()
	// On a busy machine the health check can come before the request.
	code, answer, _ := post(t, url, "/v1/completions", body)
	if code != http.StatusBadGateway && code != http.StatusServiceUnavailable {
		t.Fatal(code, answer)
	}
	until(t, "the index still has the cache of an engine that ended", func() bool {
		return p.placing.Stats().Blocks == 0
	})
}

// An engine whose sidecar reports a slow device gets requests only while no other engine is fit.
// The health page has the reason. A failed device takes the engine out, by the mark that routers of
// earlier releases read, too.
func TestEngineWithABadDevice(t *testing.T) {
	var state atomic.Value
	state.Store("degraded")
	sidecar := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		s := state.Load().(string)
		fmt.Fprintf(w, `{"endpoint":"10.1.2.3:7650","leaving":%v,"health":{"state":%q,"faults":[{`+
			`"device":"GPU 0000:1b:00.0","kind":"throttled","state":%[2]q,`+
			`"text":"throttled: power brake"}]}}`,
			s == "failed", s)
	}))
	defer sidecar.Close()
	d0, d1 := newEngine(t, answerDecode), newEngine(t, answerDecode)
	px, url := start(t, Config{Decode: []Engine{{URL: d0.URL, Sidecar: sidecar.URL}, {URL: d1.URL}}})
	b := px.decode.all[0]
	until(t, "the fault is not seen", func() bool {
		return b.condition() == slow && px.decode.all[1].condition() == fit
	})
	for range 4 {
		if code, _, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); code != 200 {
			t.Error(code)
		}
	}
	if len(d0.requests()) != 0 || len(d1.requests()) != 4 {
		t.Errorf("%d requests to the slow engine, %d to the other", len(d0.requests()),
			len(d1.requests()))
	}
	w := httptest.NewRecorder()
	px.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/health", nil))
	if s := w.Body.String(); !strings.Contains(s, "GPU 0000:1b:00.0: throttled: power brake") {
		t.Errorf("%s", s)
	}
	d1.Close()
	until(t, "the other engine is not down", func() bool {
		return px.decode.all[1].condition() == down
	})
	if code, _, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); code != 200 {
		t.Errorf("the only engine is slow: %d", code)
	}
	state.Store("failed")
	until(t, "the engine does not leave", func() bool { return !b.takes() })
	state.Store("fit")
	until(t, "the engine does not come back", func() bool { return b.condition() == fit && b.takes() })
}

// A router takes no fault of a device back because one question to the sidecar got no answer. The
// mark ends as that of a sidecar that is gone.
func TestFaultOutlivesAQuestionWithoutAnswer(t *testing.T) {
	var quiet atomic.Bool
	sidecar := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if quiet.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		fmt.Fprint(w, `{"endpoint":"10.1.2.3:7650","health":{"state":"degraded"}}`)
	}))
	defer sidecar.Close()
	d := newEngine(t, answerDecode)
	px, err := New(Config{Decode: []Engine{{URL: d.URL, Sidecar: sidecar.URL}}})
	if err != nil {
		t.Fatal(err)
	}
	defer px.client.CloseIdleConnections()
	b := px.decode.all[0]
	if err := checkNow(t, px, b); err != nil {
		t.Fatal(err)
	}
	ask := func(want condition, what string) {
		t.Helper()
		px.askSidecar(t.Context(), b)
		if c := b.condition(); c != want {
			t.Errorf("%s: %s", what, c)
		}
	}
	ask(slow, "a degraded device")
	quiet.Store(true)
	ask(slow, "one question without an answer")
	b.identity.sidecarAnswered = b.identity.sidecarAnswered.Add(-leavingFor)
	ask(fit, "the mark has no end")
	quiet.Store(false)
	ask(slow, "a degraded device again")
	quiet.Store(true)
	ask(slow, "one question without an answer")
	for _, unwell := range []bool{true, true, false} {
		d.mu.Lock()
		d.unwell = unwell
		d.mu.Unlock()
		if err := checkNow(t, px, b); (err != nil) != unwell {
			t.Fatal(err)
		}
	}
	if c := b.condition(); c != fit {
		t.Errorf("the mark outlives the engine: %s", c)
	}
}

// A listed engine whose device has failed gets no requests, also if its sidecar has another engine
// that works. That one does.
func TestListedEngineBesideAFailedOne(t *testing.T) {
	d0, d1 := newEngine(t, answerDecode), newEngine(t, answerDecode)
	var affected atomic.Pointer[[]string]
	affected.Store(&[]string{})
	// A name that this host cannot resolve, with the port of the engine that works.
	elsewhere := "http://other.invalid" + d1.URL[strings.LastIndex(d1.URL, ":"):]
	sidecar := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"endpoint":"10.1.2.3:7650","health":{"state":"failed","failed":["vllm/a"],`+
			`"failed_urls":[%q,%q],"affected_urls":%s}}`, d0.URL, elsewhere, marshal(*affected.Load()))
	}))
	defer sidecar.Close()
	px, url := start(t, Config{Decode: []Engine{{URL: d0.URL, Sidecar: sidecar.URL},
		{URL: d1.URL, Sidecar: sidecar.URL}}})
	until(t, "the failed engine is left out, and only that one", func() bool {
		return !px.decode.all[0].takes() && px.decode.all[1].condition() == slow &&
			px.decode.all[1].takes()
	})
	for range 4 {
		if code, _, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); code != 200 {
			t.Error(code)
		}
	}
	if n := len(d0.requests()); n != 0 {
		t.Errorf("%d requests to the engine with the failed device", n)
	}
	// A sidecar that names the engines with faults names all of them.
	for _, x := range []struct {
		urls []string
		want condition
	}{{[]string{d0.URL}, fit}, {[]string{d0.URL, elsewhere}, slow}, {[]string{d0.URL, d1.URL}, slow}} {
		affected.Store(&x.urls)
		until(t, fmt.Sprintf("affected: %q", x.urls), func() bool {
			return px.decode.all[1].condition() == x.want
		})
	}
}

// An engine that leaves does so after a change of its role, too: the new role has not asked the
// sidecar yet. The mark of another sidecar does not count.
func TestLeavingEngineChangesItsRole(t *testing.T) {
	d := newEngine(t, answerDecode)
	sidecar := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"endpoint":"10.1.2.3:7650","leaving":true,"health":{"state":"degraded"}}`)
	}))
	defer sidecar.Close()
	is := Engine{URL: d.URL, Sidecar: sidecar.URL}
	px, err := New(Config{Prefill: []Engine{is}})
	if err != nil {
		t.Fatal(err)
	}
	defer px.client.CloseIdleConnections()
	b := px.prefill.list()[0]
	if err := checkNow(t, px, b); err != nil {
		t.Fatal(err)
	}
	px.askSidecar(t.Context(), b)
	if err := px.SetEngines(nil, []Engine{is}); err != nil {
		t.Fatal(err)
	}
	if c := px.decode.list()[0].candidate(time.Now(), ""); !c.leaving || c.condition != slow {
		t.Errorf("as decode engine: %+v", c)
	}
	is.Sidecar += "0"
	if err := px.SetEngines([]Engine{is}, nil); err != nil {
		t.Fatal(err)
	}
	if c := px.prefill.list()[0].candidate(time.Now(), ""); c.leaving || c.condition != fit {
		t.Errorf("with another sidecar: %+v", c)
	}
}

// An engine that accepts no connection is out after the first one. The request that needed it goes
// to another engine at once. Once it answers a check, it gets requests again.
func TestEngineThatAcceptsNoConnection(t *testing.T) {
	l := kvtest.FullListener(t)
	url := "http://" + l.Addr().String()
	srv := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})}
	var serving sync.WaitGroup
	defer serving.Wait()
	defer func() { _ = srv.Close() }()
	d := newEngine(t, answerDecode)
	for _, role := range []string{rolePrefill, roleDecode} {
		var log kvtest.Log
		cfg := Config{Mode: PrefillFirst, Decode: decoders(url, d.URL),
			Log: slog.New(slog.NewTextHandler(&log, nil))}
		if role == rolePrefill {
			cfg.Prefill, cfg.Decode = cfg.Decode[:1], cfg.Decode[1:]
		}
		px, err := New(cfg) // nothing watches the engines
		if err != nil {
			t.Fatal(err)
		}
		defer px.client.CloseIdleConnections()
		at := httptest.NewServer(px.Handler())
		defer at.Close()
		b := px.backends()[0]
		for range 2 {
			if code, answer, _ := post(t, at.URL, "/v1/completions", `{"prompt":"a"}`); code != 200 {
				t.Errorf("%s: %d %s", role, code, answer)
			}
		}
		if n := strings.Count(log.String(), errUnaccepted.Error()); n != 1 || b.condition() != silent {
			t.Errorf("%s: %d requests went on to another engine, and it is %s: %s", role, n, b.condition(),
				log.String())
		}
		if text := get(t, at.URL+"/health"); !strings.Contains(text,
			"a connection was not accepted within") {
			t.Errorf("/health gives no reason: %s", text)
		}
		if role == roleDecode {
			serving.Go(func() { _ = srv.Serve(l) })
			until(t, "it is not fit again", func() bool {
				return checkNow(t, px, b) == nil && b.condition() == fit
			})
		}
	}
}
