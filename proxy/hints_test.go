package proxy

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestHintsOf(t *testing.T) {
	const longest = 10 * time.Minute
	for _, c := range []struct {
		fields string
		pin    time.Duration
		ahead  bool
		want   string // results
	}{
		{`{}`, 0, false, ""},
		{`{"agent_hint": null}`, 0, false, ""},
		{`{"agent_hint": {"session_id": "s", "parent_session_id": "p"}}`, 0, false, "unknown"},
		{`{"agent_hint": {"pin": true, "ttl": 90}}`, 90 * time.Second, false, "pin"},
		{`{"agent_hints": {"pin": true, "ttl": 0.5}}`, 500 * time.Millisecond, false, "pin"},
		{`{"agent_hint": {"pin": true}}`, defaultTTL, false, "pin"},
		{`{"agent_hint": {"pin": false, "ttl": 90, "cache_control": {"ttl": 5}}}`, 0, false, "unknown"},
		{`{"agent_hint": {"cache_control": {"type": "ephemeral", "ttl": 300}}}`, 5 * time.Minute, false,
			"pin"},
		{`{"agent_hint": {"cache_control": {}}}`, defaultTTL, false, "pin"},
		{`{"agent_hint": {"pin": true, "ttl": 3600}}`, longest, false, "pin_shortened"},
		{`{"agent_hint": {"pin": true, "ttl": 1e300}}`, longest, false, "pin_shortened"},
		{`{"agent_hint": {"pin": true, "ttl": 1e999}}`, 0, false, "malformed"},
		{`{"agent_hint": {"pin": true, "ttl": -1}}`, 0, false, "malformed"},
		{`{"agent_hint": {"pin": true, "ttl": "soon"}}`, 0, false, "malformed"},
		{`{"agent_hint": {"pin": 1}}`, 0, false, "malformed"},
		{`{"agent_hint": {"ttl": 300}}`, 0, false, "unknown"},
		{`{"agent_hint": 3}`, 0, false, "malformed"},
		{`{"agent_hint": [1, }`, 0, false, "malformed"},
		{`{"agent_hint": {"prefetch": true}}`, 0, true, "prefetch"},
		{`{"agent_hint": {"context_management": {"edits": [{"type": "evict"}, {"type": "prefetch"}]}}}`,
			0, true, "prefetch"},
		{`{"agent_hint": {"context_management": {"edits": [{"type": "offload"}]}}}`, 0, false,
			"unknown"},
		{`{"agent_hint": {"prefetch": true, "pin": true, "ttl": 1}}`, time.Second, true,
			"pin prefetch"},
		{`{"agent_hint": {"x": "` + strings.Repeat("x", maxHint) + `"}}`, 0, false, "malformed"},
		{`{"agent_hint": {"context_management": {"edits": [` +
			strings.Repeat(`{},`, maxHintPlan) + `{}]}}}`, 0, false, "malformed"},
	} {
		fields, _, ok := splitObject([]byte(c.fields))
		if !ok { // as a client's body with such a part: the engine refuses it
			fields = map[string]json.RawMessage{"agent_hint": json.RawMessage(`[1, `)}
		}
		h, results := hintsOf(fields, longest)
		if got := strings.Join(results, " "); h.pin != c.pin || h.prefetch != c.ahead || got != c.want {
			t.Errorf("%.80s: %+v, %q, want %v, %v, %q", c.fields, h, got, c.pin, c.ahead, c.want)
		}
	}
	pin := map[string]json.RawMessage{"agent_hint": json.RawMessage(`{"pin": true}`)}
	h, results := hintsOf(pin, 0)
	if h.pin != 0 || !slices.Equal(results, []string{hintOff}) {
		t.Errorf("a router without max_pin: %+v, %v", h, results)
	}
}

// The engine that answers gets a pin, whatever computes the prompt; a prefill engine gets none. A
// client's own parameters stay out.
func TestPinReachesTheEngineThatAnswers(t *testing.T) {
	const hinted = `{"prompt": "x"%s, "agent_hint": {"pin": true, "ttl": 60},
		"kv_transfer_params": {"kvspray": {"v": 1, "pin": true, "ttl": 9999}}}`
	for _, mode := range []Mode{Concurrent, PrefillFirst} {
		prefilled := make(chan struct{}, 1)
		p, d := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
			answerPrefill(w, r, s)
			prefilled <- struct{}{}
		}), newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
			if own(s)["xfer"] != nil {
				waitFor(t, prefilled, "no prefill")
			}
			answerDecode(w, r, s)
		})
		_, url := start(t, Config{Prefill: []Engine{{URL: p.URL, Peer: "127.0.0.1:7650"}},
			Decode: decoders(d.URL), Mode: mode, MaxPin: time.Minute})
		for i, more := range []string{"", `, "echo": true`} {
			if code, answer, _ := post(t, url, "/v1/completions", fmt.Sprintf(hinted, more)); code != 200 {
				t.Fatalf("%s: %d %s", mode, code, answer)
			}
			o := own(d.requests()[i])
			if o["pin"] != true || o["ttl"] != 60.0 {
				t.Errorf("%s%s: the decode engine got %v", mode, more, o)
			}
			if (o["xfer"] != nil) != (more == "") {
				t.Errorf("%s%s: a transfer: %v", mode, more, o)
			}
		}
		if o := own(p.requests()[0]); len(p.requests()) != 1 || o["pin"] != nil || o["ttl"] != nil {
			t.Errorf("%s: the prefill engine got %v", mode, o)
		}
		if _, metrics, _ := getMetrics(t, url); !strings.Contains(metrics,
			`kvspray_proxy_hints_total{result="pin"} 2`) {
			t.Errorf("%s: metrics: %.200s", mode, metrics)
		}
	}
}

// A prompt that is wanted for a later turn goes to the engine that will compute it, for one token.
// If that fails, or without a policy, it is an ordinary request.
func TestPrefetch(t *testing.T) {
	const body = `{"prompt": "%s", "max_tokens": 50, "min_tokens": 5, "stream": true,
		"agent_hint": {"prefetch": true}}`
	for _, policy := range []string{"fetch", "auto", "least-loaded"} {
		p, d := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
			if s.body["max_tokens"] == 1.0 && params(s) == nil {
				answerDecode(w, r, s)
				return
			}
			answerPrefill(w, r, s)
		}), newEngine(t, answerDecode)
		px, url := start(t, Config{Prefill: []Engine{{URL: p.URL, Peer: "127.0.0.1:7650"}},
			Decode: decoders(d.URL), Mode: PrefillFirst, Policy: policy})
		if code, answer, _ := post(t, url, "/v1/completions", fmt.Sprintf(body, "x")); code != 200 ||
			!strings.Contains(answer, "hello") {
			t.Fatalf("%s: %d %s", policy, code, answer)
		}
		if policy == "least-loaded" {
			if n := len(d.requests()); n != 1 || d.requests()[0].body["max_tokens"] != 50.0 {
				t.Errorf("without a policy: %d requests", n)
			}
			continue
		}
		if len(p.requests()) != 1 || len(d.requests()) != 0 {
			t.Fatalf("%s: %d and %d requests", policy, len(p.requests()), len(d.requests()))
		}
		if s := p.requests()[0]; s.body["max_tokens"] != 1.0 || s.body["min_tokens"] != nil ||
			s.body["stream"] != true || params(s) != nil {
			t.Errorf("%s: %v", policy, s.body)
		}
		p.Close()
		if code, answer, _ := post(t, url, "/v1/completions", fmt.Sprintf(body, "y")); code != 200 ||
			!strings.Contains(answer, "hello") {
			t.Fatalf("%s without the engine: %d %s", policy, code, answer)
		}
		// If a health check has found P down before, D computes the next turn, and its prompt now.
		if r := d.requests(); len(r) != 1 ||
			r[0].body["max_tokens"] != 50.0 && r[0].body["max_tokens"] != 1.0 {
			t.Errorf("%s without the engine: %d requests", policy, len(r))
		}
		until(t, policy+": requests are in flight at the end", func() bool {
			return load(px.prefill.all[0]) == 0 && load(px.decode.all[0]) == 0
		})
	}
}
