package proxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

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
			answerPrefill(w, r, s)
		},
		func(w http.ResponseWriter, r *http.Request, s seen) {
			meet(r, dHere, pHere)
			answerDecode(w, r, s)
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
			return testutil.ToFloat64(px.met.requests.WithLabelValues("concurrent", "2xx")) == 1
		})
}

// A number that does not fit a float64 reaches the engine as it was written.
func TestFieldsStayAsWritten(t *testing.T) {
	r, err := parseRequest(kindCompletion,
		[]byte(`{"prompt":"a","seed":12345678901234567890,"temperature":0.10}`))
	if err != nil {
		t.Fatal(err)
	}
	b := r.forDecode(nil)
	if !bytes.Contains(b, []byte("12345678901234567890")) || !bytes.Contains(b, []byte("0.10")) {
		t.Errorf("%s", b)
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
					d.hang(r) // waits for its peer
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

func TestDecodeUnreachable(t *testing.T) {
	p, d := newEngine(t, answerPrefill), newEngine(t, answerDecode)
	dead := newEngine(t, answerDecode)
	dead.Close()
	px, err := New(Config{Prefill: []Engine{{URL: p.URL, Peer: "a:1"}}, Decode: decoders(dead.URL,
		d.URL), Mode: Concurrent})
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
	// The request whose connection broke has failed; the engine is out, and later ones are refused.
	until(t, "an engine that is gone is still asked", func() bool {
		code, _, _ := post(t, srv.URL, "/v1/completions", `{"prompt":"a"}`)
		return code == http.StatusServiceUnavailable
	})
}

func TestTakeAlternatesAndSkips(t *testing.T) {
	a, b := &backend{health: testHealth()}, &backend{health: testHealth()}
	p := &pool{all: []*backend{a, b}}
	counts := map[*backend]int{}
	for range 10 {
		counts[p.take(nil, "", candidate.takes)]++
	}
	if counts[a] != 5 || counts[b] != 5 {
		t.Errorf("%v", counts)
	}
	a.done()
	if got := p.take(nil, "", candidate.takes); got != a {
		t.Error("the less loaded one was not taken")
	}
	if got := p.take(map[*backend]bool{a: true, b: true}, "", candidate.possible); got != nil {
		t.Error("took one that was to be skipped")
	}
	a.outcome(errors.New("x"), signRefused, 0)
	if got := p.take(nil, "", candidate.possible); got != b {
		t.Error("took one that is down")
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

// Without a decode engine a prefill would be wasted, and hold its blocks until the match timeout.
func TestNoPrefillWithoutADecodeEngine(t *testing.T) {
	for _, mode := range []Mode{Concurrent, PrefillFirst} {
		t.Run(string(mode), func(t *testing.T) {
			p := newEngine(t, answerPrefill)
			px, url := start(t, Config{Prefill: []Engine{{URL: p.URL, Peer: "127.0.0.1:1"}},
				Decode: decoders("http://127.0.0.1:1"), Mode: mode})
			px.decode.all[0].outcome(errors.New("as a request has found it"), signRefused, 0)
			status, answer, h := post(t, url, "/v1/completions", `{"prompt":"a"}`)
			refusal(t, "/v1/completions", status, h, answer, http.StatusServiceUnavailable, codeNoEngine,
				"no decode engine is up")
			if n := len(p.requests()); n != 0 {
				t.Errorf("the prefill got %d requests", n)
			}
		})
	}
}

// The reason why no engine takes requests counts none that takes some.
func TestReasonWithoutAnEngine(t *testing.T) {
	now := time.Now()
	engine := func(c condition, leaving bool) *backend {
		b := &backend{health: health{slowAfter: time.Hour, silentAfter: 2 * time.Hour,
			gone: c == down}, identity: identity{leaving: leaving}}
		switch c {
		case busy:
			b.health.busyUntil = now.Add(time.Hour)
		case slow:
			b.health.lateCheck = true
		case silent:
			b.health.asked = now.Add(-3 * time.Hour)
		}
		if got := b.condition(); got != c {
			t.Fatalf("%v, want %v", got, c)
		}
		return b
	}
	for want, engines := range map[string][]*backend{
		"no decode engine took requests (2 do now)": {engine(fit, false), engine(slow, false),
			engine(busy, false), engine(fit, true)},
		"no decode engine takes requests (1 leave)": {engine(fit, true), engine(busy, false)},
		"no decode engine is fit (1 are busy or fail)": {engine(busy, false), engine(silent, false),
			engine(down, true)},
		"no decode engine is up": {engine(silent, false), engine(down, false)},
	} {
		if got := (&pool{all: engines}).none(roleDecode); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
