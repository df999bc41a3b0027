package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvspray/kvspray/proxy/internal/feed/feedtest"
)

const block = 16 // tokens

// reporting is an engine with KV events. Its tokens are the bytes of a prompt.
type reporting struct {
	*engine
	*feedtest.Publisher
	asked atomic.Int64 // for tokens
	mute  atomic.Bool  // answers no such question
	model atomic.Value // name; none: base
}

func newReporting(t *testing.T) *reporting {
	e := &reporting{Publisher: feedtest.New(t)}
	e.engine = newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
		switch r.URL.Path {
		case "/v1/models":
			name, _ := e.model.Load().(string)
			if name == "" {
				name = "base"
			}
			fmt.Fprintf(w, `{"data":[{"id":%q},{"id":"sql","parent":%[1]q}]}`, name)
		case "/tokenize":
			e.asked.Add(1)
			if e.mute.Load() {
				w.WriteHeader(http.StatusNotFound)
				return
			}
			text, _ := s.body["prompt"].(string)
			tokens := bytesOf(text)
			if err := json.NewEncoder(w).Encode(map[string]any{"count": len(tokens),
				"tokens": tokens}); err != nil {
				t.Error(err)
			}
		default:
			answerDecode(w, r, s)
		}
	})
	e.lists = true
	return e
}

func (e *reporting) reported() Engine {
	return Engine{URL: e.URL, Events: e.Publisher.Endpoint(), Replay: e.Publisher.Replay()}
}

// completions counts the requests for completions.
func (e *reporting) completions() int {
	n := 0
	for _, s := range e.requests() {
		if s.path == "/v1/completions" {
			n++
		}
	}
	return n
}

func bytesOf(text string) []uint32 {
	out := make([]uint32, len(text))
	for i, c := range []byte(text) {
		out[i] = uint32(c)
	}
	return out
}

// storedText is an event about the whole blocks of a text.
func storedText(text string) any {
	n := len(text) / block
	var names []string
	for i := range n {
		names = append(names, text[:(i+1)*block])
	}
	return feedtest.Stored(hashes(names), nil, bytesOf(text[:n*block]), block)
}

// hashes are names of at most 64 bytes.
func hashes(names []string) []string {
	for i, n := range names {
		var h uint64 = 14695981039346656037
		for _, c := range []byte(n) {
			h = (h ^ uint64(c)) * 1099511628211
		}
		names[i] = fmt.Sprint(h)
	}
	return names
}

// values are the metrics of a router.
func values(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := strings.TrimPrefix(f.GetName(), "kvspray_proxy_")
			for _, l := range m.GetLabel() {
				if l.GetName() != "role" && l.GetName() != "url" {
					name += " " + l.GetValue()
				}
			}
			out[name] += m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return out
}

func completion(model, prompt string) string {
	return fmt.Sprintf(`{"model": %q, "prompt": %q, "stream": true}`, model, prompt)
}

// aboutAll reports whether the feeds of all engines are usable for a model.
func aboutAll(p *Proxy, model string) bool {
	list := p.about(model)
	return len(list) > 0 && !slices.Contains(list, false)
}

// A request goes to the engine that reports its blocks. Other requests are not drawn there.
func TestEventsDecide(t *testing.T) {
	a, b := newReporting(t), newReporting(t)
	log, reg := &lines{}, prometheus.NewRegistry()
	p, url := start(t, Config{Decode: []Engine{a.reported(), b.reported()}, Mode: PrefillFirst,
		Policy: "cache", Registry: reg,
		Log: slog.New(slog.NewTextHandler(log, nil))})
	until(t, "the feeds", func() bool {
		return values(t, reg)["kv_events_up"] == 2 && aboutAll(p, "base") && aboutAll(p, "")
	})
	text := strings.Repeat("a document of some length. ", 400)
	b.Publish(storedText(text))
	until(t, "the blocks", func() bool {
		return values(t, reg)["kv_blocks"] == float64(len(text)/block)
	})
	for range 3 {
		post(t, url, "/v1/completions", completion("base", text))
	}
	if x, y := a.completions(), b.completions(); x != 0 || y != 3 {
		t.Errorf("%d and %d requests", x, y)
	}
	if n := a.asked.Load() + b.asked.Load(); n != 1 {
		t.Errorf("%d questions for equal prompts", n)
	}
	cached := fmt.Sprintf("reported=true cached=%d", (len(text)-1)/block*block)
	until(t, "no line with the hit", func() bool { return strings.Count(log.String(), cached) == 3 })
	// An adapter has the same tokens and other blocks, as has a salt.
	before := strings.Count(log.String(), "reported=false")
	post(t, url, "/v1/completions", completion("sql", text))
	post(t, url, "/v1/completions", `{"cache_salt": "s", "stream": true, "prompt": "`+text+`"}`)
	until(t, "a hit of another model", func() bool {
		return strings.Count(log.String(), "reported=false") == before+2
	})
	b.Publish(feedtest.Cleared())
	until(t, "no blocks", func() bool { return values(t, reg)["kv_blocks"] == 0 })
	got := values(t, reg)
	for name, want := range map[string]float64{"kv_events_total": 2, "kv_event_batches_total": 2,
		"kv_event_gaps_total": 0, "kv_event_replays_total ok": 2, "tokenizations_total asked": 1,
		"tokenizations_total kept": 2, "tokenizations_total none": 1, "kv_event_voids_total gap": 0} {
		if got[name] != want {
			t.Errorf("%s is %v, want %v", name, got[name], want)
		}
	}
	if got["kv_index_bytes"] == 0 {
		t.Error("the index has no memory")
	}
}

// A router that starts later has the whole index, by replay. test/e2e has the goal of its time.
func TestWholeIndexAfterARestart(t *testing.T) {
	e := newReporting(t)
	const batches, each = 1000, 8
	tokens := make([]uint32, each*block)
	for i := range batches {
		var names []string
		for j := range each {
			names = append(names, fmt.Sprintf("%032d", i*each+j))
		}
		for j := range tokens {
			tokens[j] = uint32(i*31+j) % 50_000
		}
		e.Publish(feedtest.Stored(names, nil, tokens, block))
	}
	for range 2 {
		reg := prometheus.NewRegistry()
		p, err := New(Config{Decode: []Engine{e.reported()}, Mode: PrefillFirst, Policy: "auto",
			Registry: reg})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { defer close(done); p.Watch(ctx) }()
		until(t, "the whole index", func() bool {
			return values(t, reg)["kv_blocks"] == batches*each && values(t, reg)["kv_events_up"] == 1
		})
		cancel()
		<-done
	}
}

// Without events, or without tokens, a policy works as before, and the log has one line about it.
func TestEventsThatDoNotCome(t *testing.T) {
	a, b := newReporting(t), newReporting(t)
	gone := b.reported()
	b.Publisher.Close()
	a.mute.Store(true)
	log, reg := &lines{}, prometheus.NewRegistry()
	p, url := start(t, Config{Decode: []Engine{a.reported(), gone}, Mode: PrefillFirst,
		Policy: "auto", Registry: reg,
		Log: slog.New(slog.NewTextHandler(log, nil))})
	b.mute.Store(true)
	until(t, "the feed, and the models of the engine without one", func() bool {
		unseen := p.decode.all[1]
		unseen.mu.Lock()
		defer unseen.mu.Unlock()
		return p.about("base") != nil && unseen.models.base("base")
	})
	text := strings.Repeat("a document of some length. ", 400)
	began := time.Now()
	for range 4 {
		if code, answer, _ := post(t, url, "/v1/completions", completion("base", text)); code != 200 {
			t.Fatalf("%d %s", code, answer)
		}
	}
	limit := 1 + int64(time.Since(began)/tokenizePause)
	if x, y := a.completions(), b.completions(); x*y != 0 {
		t.Errorf("%d and %d requests with one prefix", x, y)
	}
	for line, want := range map[string]int{"no KV events from an engine": 1,
		"does not answer POST /tokenize": 2} { // each engine is asked once
		if n := strings.Count(log.String(), line); n != want {
			t.Errorf("%q: %d lines", line, n)
		}
	}
	if x, y := a.asked.Load(), b.asked.Load(); min(x, y) < 1 || max(x, y) > limit {
		t.Errorf("%d and %d questions although none is answered, want at most %d", x, y, limit)
	}
}

// An engine without answers is skipped for a while, and costs the others nothing. A prompt without
// tokens does not count against its engine.
func TestTokenizePausesOneEngine(t *testing.T) {
	a, b := newReporting(t), newReporting(t)
	a.mute.Store(true)
	reg := prometheus.NewRegistry()
	p, url := start(t, Config{Decode: []Engine{a.reported(), b.reported()}, Mode: PrefillFirst,
		Policy: "auto", Registry: reg})
	until(t, "the feeds", func() bool { return aboutAll(p, "base") })
	began := time.Now()
	for i := range 8 {
		post(t, url, "/v1/completions", completion("base", fmt.Sprint("prompt ", i)))
		post(t, url, "/v1/completions", completion("base", ""))
	}
	limit := 1 + int64(time.Since(began)/tokenizePause)
	got := values(t, reg)
	slow := p.decode.all[1].mute.until.Load() != 0 // a busy machine delays an answer of the other one
	if n := a.asked.Load(); n > limit || !slow && got["tokenizations_total asked"] < float64(8-limit) {
		t.Errorf("%d questions to an engine that does not answer, %v", n, got)
	}
	p.lost(p.decode.all[0])
	if len(p.tokens.kept) != 0 || p.tokens.order.Len() != 0 || p.tokens.tokens != 0 {
		t.Error("tokens of an engine that is lost are kept")
	}
	for status, want := range map[int]bool{200: false, 302: false, 400: true, 404: false, 405: false,
		413: true, 422: true, 429: false, 500: false, 503: false} {
		if ofQuestion(status) != want {
			t.Errorf("%d: %v", status, !want)
		}
	}
	var m mute
	now := time.Now()
	if !m.fail(now) || m.fail(now.Add(tokenizeLog/2)) || !m.fail(now.Add(tokenizeLog)) ||
		!m.paused(now.Add(tokenizeLog)) || m.paused(now.Add(tokenizeLog+tokenizePause)) {
		t.Error("lines and pauses of an engine")
	}
}

// A slow list of models costs neither the sidecar's endpoint nor the engine's health.
func TestSlowListOfModels(t *testing.T) {
	events := feedtest.New(t)
	var asked, checks atomic.Int64
	hold := make(chan struct{})
	pre := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
		if r.URL.Path == "/v1/models" {
			asked.Add(1)
			<-hold
			return
		}
		answerPrefill(w, r, s)
	})
	pre.lists = true
	defer close(hold)
	sidecar := newEngine(t, func(w http.ResponseWriter, r *http.Request, _ seen) {
		if r.URL.Path == "/v1/node" {
			checks.Add(1)
		}
		fmt.Fprint(w, `{"endpoint":"127.0.0.1:7650"}`)
	})
	d := newEngine(t, answerDecode)
	p, _ := start(t, Config{Prefill: []Engine{{URL: pre.URL, Sidecar: sidecar.URL,
		Events: events.Endpoint(), Replay: events.Replay()}}, Decode: decoders(d.URL), Policy: "auto"})
	b := p.prefill.all[0]
	until(t, "the question for models", func() bool { return asked.Load() > 0 })
	until(t, "the next checks", func() bool {
		if b.endpoint() == "" || !b.takes() {
			t.Fatalf("peer %q, up %v", b.endpoint(), b.takes())
		}
		return checks.Load() > 3
	})
	if n := asked.Load(); n > checks.Load()/2 {
		t.Errorf("%d questions of %d checks", n, checks.Load())
	}
}

// Events of an engine with another model do not count for a request.
func TestEventsOfAnotherModel(t *testing.T) {
	a, b := newReporting(t), newReporting(t)
	b.model.Store("other")
	log := &lines{}
	p, url := start(t, Config{Decode: []Engine{a.reported(), b.reported()}, Mode: PrefillFirst,
		Policy: "auto",
		Log:    slog.New(slog.NewTextHandler(log, nil))})
	document := strings.Repeat("a long document ", 200)
	b.Publish(storedText(document))
	until(t, "the models are not known", func() bool {
		return slices.Equal(p.about("base"), []bool{true, false}) &&
			slices.Equal(p.about("other"), []bool{false, true})
	})
	for range 3 {
		post(t, url, "/v1/completions", fmt.Sprintf(`{"model":"base","prompt":%q}`, document))
	}
	if text := log.String(); strings.Contains(text, "cached=3") || b.completions() > 0 {
		t.Errorf("hits or requests of another model: %s", text)
	}
}

// Events that cannot predict a hit are named once.
func TestEventsOfLittleUse(t *testing.T) {
	a := newReporting(t)
	log := &lines{}
	p, _ := start(t, Config{Decode: []Engine{a.reported()}, Mode: PrefillFirst, Policy: "auto",
		Log: slog.New(slog.NewTextHandler(log, nil))})
	a.Subscribed(1)
	a.Publish(map[string]any{"type": "BlockStored", "block_hashes": []int{1}, "token_ids": []int{1},
		"block_size": 1, "group_idx": 1, "kv_cache_spec_kind": "sliding_window"})
	until(t, "no line", func() bool {
		return strings.Contains(log.String(), "caches of several kinds")
	})
	if p.about("base") != nil {
		t.Error("tokens are asked for although no event can use them")
	}
}

func TestEventsAreChecked(t *testing.T) {
	ok := Engine{URL: "http://127.0.0.1:2", Events: "tcp://a:1", Replay: "tcp://a:2"}
	for want, e := range map[string]Engine{
		`decode engine http://e: events "a:1"`:    {Events: "a:1"},
		`replay "tcp://*:1": the host is missing`: {Events: "tcp://a:1", Replay: "tcp://*:1"},
		`replay "tcp://a:1" without events`:       {Replay: "tcp://a:1"},
	} {
		e.URL = "http://e"
		_, err := New(Config{Decode: []Engine{e}, Mode: PrefillFirst, Policy: "auto"})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
	if _, err := New(Config{Decode: []Engine{ok}}); err == nil || !strings.Contains(err.Error(),
		"policy is least-loaded") {
		t.Errorf("events without a policy: %v", err)
	}
	p, err := New(Config{Decode: []Engine{{URL: "http://127.0.0.1:1"}, ok}, Mode: PrefillFirst,
		Policy: "auto"})
	if err != nil || p.decode.all[0].reporter != nil || p.decode.all[1].reporter == nil {
		t.Errorf("an engine without events beside one with them: %v", err)
	}
}

func TestQuestions(t *testing.T) {
	for body, want := range map[string]string{
		`{"prompt": "hi", "max_tokens": 5}`:                `{"prompt":"hi"}`,
		`{"prompt": ["hi"], "model": "m"}`:                 `{"model":"m","prompt":"hi"}`,
		`{"prompt": "hi", "add_special_tokens": false}`:    `{"add_special_tokens":false,"prompt":"hi"}`,
		`{"prompt": [1, 2]}`:                               "[1 2]",
		`{"prompt": [[1, 2]]}`:                             "[1 2]",
		`{"prompt": [[[1]]]}`:                              "",
		`{"prompt": ["a", "b"]}`:                           "",
		`{"prompt": [1, -2]}`:                              "",
		`{"prompt": [1.5]}`:                                "",
		`{"prompt": [1, 2e3]}`:                             "",
		`{"prompt": [1, "a"]}`:                             "",
		`{"prompt": [1, null]}`:                            "",
		`{"prompt": [4294967295, 0]}`:                      "[4294967295 0]",
		`{"prompt": [4294967296]}`:                         "",
		"{\"prompt\": [ 1 ,\n2\t]}":                        "[1 2]",
		`{"prompt": [ [ 1 , 2 ] ]}`:                        "[1 2]",
		`{"prompt": [[]]}`:                                 "",
		`{"prompt": []}`:                                   "",
		`{"prompt": 5}`:                                    "",
		`{}`:                                               "",
		`{"prompt": "hi", "cache_salt": "s"}`:              "",
		`{"prompt": "hi", "echo": true}`:                   "",
		`{"prompt": "` + strings.Repeat("x", 5<<20) + `"}`: "",
	} {
		checkQuestion(t, kindCompletion, body, want)
	}
	checkQuestion(t, kindCompletion, `{"prompt": [1`+strings.Repeat(",1", maxTokens)+`]}`, "")
	for body, want := range map[string]string{
		`{"messages": [{"role": "user", "content": "hi"}], "tools": [], "n": 2}`: `{"messages":` +
			`[{"role":"user","content":"hi"}],"tools":[]}`,
		`{"messages": [{"content": [{"type": "text", "text": "hi"}]}]}`: `{"messages":` +
			`[{"content":[{"type":"text","text":"hi"}]}]}`,
		`{"messages": [{"content": [{"type": "image_url"}]}]}`:         "",
		`{"messages": [], "reasoning_effort": "high"}`:                 "",
		`{"messages": [], "tools": [{"a": 1}], "tool_choice": "none"}`: "",
		`{"messages": "hi"}`:               "",
		`{"messages": [{"content": [5]}]}`: "",
	} {
		checkQuestion(t, kindChat, body, want)
	}
}

func checkQuestion(t *testing.T, k kind, body, want string) {
	t.Helper()
	r, err := parseRequest(k, []byte(body))
	if err != nil {
		t.Fatal(err)
	}
	tokens, q := r.question()
	got := string(q)
	if tokens != nil {
		got = fmt.Sprint(tokens)
	}
	if got != want {
		t.Errorf("%.80s: %s, want %s", body, got, want)
	}
}

// A long prompt of token ids is read at once.
func TestTokenIDsAllocateOnce(t *testing.T) {
	raw := []byte("[1" + strings.Repeat(", 12345", 32<<10) + "]")
	fewest := math.Inf(1) // other goroutines of this process allocate, too
	for range 20 {
		fewest = min(fewest, testing.AllocsPerRun(10, func() {
			if tokens, _ := onePrompt(raw, true); len(tokens) != 32<<10+1 || countPrompts(raw) != 1 {
				t.Error(len(tokens))
			}
		}))
	}
	if fewest > 1 {
		t.Errorf("%v allocations, want 1", fewest)
	}
}

// Answers are kept within bounds, the last used ones longest.
func TestKeptTokens(t *testing.T) {
	tk := newTokenizer(prometheus.NewRegistry())
	key := func(i int) (k [32]byte) {
		k[0], k[1] = byte(i), byte(i>>8)
		return k
	}
	tk.put(key(0), make([]uint32, keptTokens/2)) // one answer must not displace all others
	for i := 1; i < 20; i++ {
		tk.put(key(i), make([]uint32, keptTokens/8))
		tk.get(key(1))
		if tk.tokens > keptTokens {
			t.Fatal(tk.tokens)
		}
	}
	for i, want := range map[int]bool{0: false, 1: true, 2: false, 19: true} {
		if _, ok := tk.get(key(i)); ok != want {
			t.Errorf("answer %d: %v", i, ok)
		}
	}
}
