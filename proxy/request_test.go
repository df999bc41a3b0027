package proxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

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

// The router reads the model that the engine will read.
func TestModelOfARequest(t *testing.T) {
	for _, k := range []kind{kindChat, kindPassed} {
		for _, body := range []string{`{"model":"a","Model":"b","MODEL":"c"}`,
			`{"model":"b","mod\u0065l":"a"}`, `{"x":{"model":"b"},"model":"a"}`} {
			if r, err := parseRequest(k, []byte(body)); err != nil || r.model != "a" {
				t.Errorf("kind %d, %s: %+v, %v", k, body, r, err)
			}
		}
	}
}

func TestBadBodies(t *testing.T) {
	p, d := newEngine(t, answerPrefill), newEngine(t, answerDecode)
	_, url := start(t, Config{Prefill: []Engine{{URL: p.URL, Peer: "a:1"}}, Decode: decoders(d.URL),
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

// A path that is no route is refused in the API's form, with the routes that exist, and reaches no
// engine.
func TestNoRoute(t *testing.T) {
	p, d := newEngine(t, answerPrefill), newEngine(t, answerDecode)
	_, url := start(t, Config{Prefill: []Engine{{URL: p.URL, Peer: "a:1"}}, Decode: decoders(d.URL)})
	for _, x := range []struct {
		method, path string
		status       int
		code, text   string
		allow        string
	}{
		{"GET", "/nothing", 404, codeUnknownURL, "POST /v1/completions", ""},
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
		"twice":   {Decode: decoders("http://a:1", "http://a:1/")},
		"mode":    {Decode: decoders("http://a:1"), Mode: "x"},
		"url":     {Decode: decoders("a:1")},
		"no peer": {Decode: decoders("http://a:1"), Prefill: []Engine{{URL: "http://p:1"}}},
		"bad port": {Decode: decoders("http://a:1"), Prefill: []Engine{{URL: "http://p:1",
			Peer: "x:y"}}},
		"port 0": {Decode: decoders("http://a:1"), Prefill: []Engine{{URL: "http://p:1",
			Peer: "x:0"}}},
		"no host": {Decode: decoders("http://a:1"), Prefill: []Engine{{URL: "http://p:1",
			Peer: ":7650"}}},
		"bad peer": {Decode: decoders("http://a:1"), Prefill: []Engine{{URL: "http://p:1", Peer: "x"}}},
	} {
		if _, err := New(c); err == nil {
			t.Errorf("%s accepted", name)
		}
	}
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
		if tokens, q := r.question(); tokens != nil && q != nil || q != nil && !json.Valid(q) {
			t.Fatalf("%d tokens and %s", len(tokens), q)
		}
		for _, b := range [][]byte{r.forPrefill("x", ""), r.forDecode(nil)} {
			if !json.Valid(b) {
				t.Fatalf("%s", b)
			}
		}
	})
}

// splitObject finds what encoding/json finds in correct JSON. Without the connectors' keys, no
// parser finds them in what is left, whatever it was.
func FuzzSplitObject(f *testing.F) {
	for _, seed := range []string{`{}`, ` { "a" : 1 , "b":[{"c":"]\\\"}"}] } `, `{"a":1,"a":2}`,
		`{"kv_transfer_p\u0061rams":{}}`, `{"a":"\\","kv_transfer_params":{"x":"\"}"}}`, `{"a":[}`,
		`{"a":1"kv_transfer_params":2}`, `{"a":}`, `{"a" 1}`, `{"a":1,}`, `{,}`, `{"a":1}x`, `null`, ``,
		`{"vllm_xargs":{"kv_transfer_params":{},"x":NaN}}`, `{"a":-1.5e+3,"b":true}`, `["a"]`,
		`{"extra_args":{"kv_transfer_params":1,"kv_transfer_params":2}}`, `{"`, `{"a`, `{"a":"\`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		fields, _, ok := splitObject(raw)
		var want map[string]json.RawMessage
		if json.Unmarshal(raw, &want) == nil && want != nil && utf8.Valid(raw) {
			if !ok || !maps.EqualFunc(fields, want, func(a, b json.RawMessage) bool {
				return bytes.Equal(a, b)
			}) {
				t.Errorf("%q: %q, %v, want %q", raw, fields, ok, want)
			}
		}
		if !ok {
			return
		}
		withoutParams(fields)
		var left map[string]any
		if json.Unmarshal(encode(fields), &left) != nil {
			return
		}
		for _, key := range connectorKeys {
			if _, has := left[key]; has {
				t.Errorf("%q has %s", raw, key)
			}
			for _, extra := range extraKeys {
				if x, _ := left[extra].(map[string]any); x[key] != nil {
					t.Errorf("%q has %s in %s", raw, key, extra)
				}
			}
		}
		r, err := parseRequest(kindCompletion, raw)
		if err != nil {
			t.Fatal(err)
		}
		r.question()
		r.forDecode(nil)
	})
}
