package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	neturl "net/url"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/spans/spanstest"
)

const (
	clientTrace  = "0af7651916cd43dd8448eb211c80319c"
	clientSpan   = "b7ad6b7169203331"
	clientParent = "00-" + clientTrace + "-" + clientSpan + "-01"
	unsampled    = "00-" + clientTrace + "-" + clientSpan + "-00"
	tracedPrompt = `{"prompt":"hello"}`
)

// tracedPair is pair with a collector; nil: none.
func tracedPair(t *testing.T, col *spanstest.Collector, mode Mode, prefill,
	decode func(http.ResponseWriter, *http.Request, seen)) (p, d *engine, url string) {
	t.Helper()
	p, d = newEngine(t, prefill), newEngine(t, decode)
	cfg := Config{Prefill: []Engine{{URL: p.URL, Peer: "127.0.0.1:7650"}}, Decode: decoders(d.URL),
		Mode: mode}
	if col != nil {
		cfg.OTLP = col.URL
	}
	_, url = start(t, cfg)
	return p, d, url
}

// spanned waits for the spans of one request, and returns them by name.
func spanned(t *testing.T, col *spanstest.Collector, names ...string) map[string]spanstest.Span {
	t.Helper()
	until(t, "the spans come", func() bool { return len(col.Spans()) >= len(names) })
	out := map[string]spanstest.Span{}
	for _, s := range col.Spans() {
		if !slices.Contains(names, s.Name) || out[s.Name].Name != "" {
			t.Fatalf("span %s is not expected, or comes twice: %+v", s.Name, col.Spans())
		}
		out[s.Name] = s
	}
	return out
}

// A request's spans are below the client's, and the engines get those of their own requests, as a
// header and for the connector. Without a traceparent, or with a malformed one, the trace is new.
func TestSpansOfARequest(t *testing.T) {
	for _, mode := range []Mode{Concurrent, PrefillFirst} {
		for what, given := range map[string]string{"client": clientParent, "none": "",
			"malformed": "malformed", "zeros": strings.Repeat("0", 55),
			"long": "00-" + strings.Repeat("f", 1<<12)} {
			t.Run(fmt.Sprint(mode, "/", what), func(t *testing.T) {
				t.Parallel()
				spansOfARequest(t, mode, given)
			})
		}
	}
}

func spansOfARequest(t *testing.T, mode Mode, given string) {
	col := spanstest.New(t)
	prefilled := make(chan struct{})
	p, d, url := tracedPair(t, col, mode, func(w http.ResponseWriter, r *http.Request, s seen) {
		defer close(prefilled)
		answerPrefill(w, r, s)
	}, func(w http.ResponseWriter, r *http.Request, s seen) {
		waitFor(t, prefilled, "no prefill")
		answerDecode(w, r, s)
	})
	var header []string
	if given != "" {
		header = []string{"traceparent", given}
	}
	if code, body, _ := post(t, url, "/v1/completions", tracedPrompt, append(header, "X-Request-Id",
		"r-1")...); code != http.StatusOK {
		t.Fatalf("%d %s", code, body)
	}
	all := spanned(t, col, "kvspray.request", "kvspray.prefill", "kvspray.decode")
	root := all["kvspray.request"]
	wantParent := ""
	if given == clientParent {
		wantParent = clientSpan
	}
	if root.Parent != wantParent || (root.Trace == clientTrace) != (wantParent != "") ||
		root.Kind != "server" || root.Service != "kvspray-router" || root.Failed != "" ||
		root.Number["http.response.status_code"] != 200 ||
		root.Text["http.route"] != "/v1/completions" || root.Text["kvspray.mode"] != string(mode) {
		t.Errorf("%s, %.60q: %+v", mode, given, root)
	}
	for name, e := range map[string]*engine{"kvspray.prefill": p, "kvspray.decode": d} {
		s, asked := all[name], e.requests()
		want := "00-" + s.Trace + "-" + s.ID + "-01"
		if len(asked) != 1 || asked[0].header.Get("Traceparent") != want ||
			own(asked[0])["traceparent"] != want {
			t.Errorf("%s: %s gets %+v, want %s", mode, name, asked, want)
		}
		if s.Trace != root.Trace || s.Parent != root.ID || s.Kind != "client" || s.Failed != "" ||
			s.Text["kvspray.request"] != "r-1" || s.Text["url.full"] != e.URL ||
			s.Number["kvspray.tries"] != 1 || s.Start.Before(root.Start) || s.End.After(root.End) ||
			!s.End.After(s.Start) {
			t.Errorf("%s: %+v below %+v", mode, s, root)
		}
	}
	if mode == PrefillFirst && all["kvspray.decode"].Start.Before(all["kvspray.prefill"].End) {
		t.Error("the decode begins before the prefill ends")
	}
	// What the prefill's connector has added is still there.
	if mode == PrefillFirst && (own(d.requests()[0])["peer"] != "p:1" ||
		params(d.requests()[0])["remote_engine_id"] != "p") {
		t.Errorf("params of the decode: %v", params(d.requests()[0]))
	}
}

// A client that does not want a trace has none, and its header goes on unchanged.
func TestUnsampledRequest(t *testing.T) {
	col := spanstest.New(t)
	p, d, url := tracedPair(t, col, PrefillFirst, answerPrefill, answerDecode)
	post(t, url, "/v1/completions", tracedPrompt, "traceparent", unsampled)
	post(t, url, "/v1/completions", tracedPrompt)
	for _, e := range []*engine{p, d} {
		if s := e.requests()[0]; s.header.Get("Traceparent") != unsampled ||
			own(s)["traceparent"] != unsampled { // the connector must not begin a trace, either
			t.Errorf("%+v", s)
		}
	}
	all := spanned(t, col, "kvspray.request", "kvspray.prefill", "kvspray.decode") // of the second one
	if all["kvspray.request"].Trace == clientTrace {
		t.Errorf("%+v", all)
	}
}

// A router without a collector makes no trace, and passes a client's on.
func TestRouterWithoutCollector(t *testing.T) {
	for _, mode := range []Mode{Concurrent, PrefillFirst} {
		prefilled := make(chan struct{}, 4)
		p, d, url := tracedPair(t, nil, mode, func(w http.ResponseWriter, r *http.Request, s seen) {
			answerPrefill(w, r, s)
			prefilled <- struct{}{}
		}, func(w http.ResponseWriter, r *http.Request, s seen) {
			waitFor(t, prefilled, "no prefill")
			answerDecode(w, r, s)
		})
		for i, x := range []struct{ given, header, params string }{{"", "", ""}, {"junk", "junk", ""},
			{unsampled, unsampled, unsampled}, {clientParent, clientParent, clientParent}} {
			var header []string
			if x.given != "" {
				header = []string{"traceparent", x.given}
			}
			post(t, url, "/v1/completions", tracedPrompt, header...)
			for _, e := range []*engine{p, d} {
				s := e.requests()[i]
				inParams, _ := own(s)["traceparent"].(string)
				if s.header.Get("Traceparent") != x.header || inParams != x.params {
					t.Errorf("%s, %q: header %q, parameter %q", mode, x.given, s.header.Get("Traceparent"),
						inParams)
				}
			}
		}
	}
}

// The spans of a request that goes wrong have the reason, and those of one that decode serves alone
// have no prefill.
func TestSpansOfAFailure(t *testing.T) {
	col := spanstest.New(t)
	broken := func(w http.ResponseWriter, _ *http.Request, _ seen) {
		w.WriteHeader(http.StatusInternalServerError)
		fmt.Fprint(w, "no memory")
	}
	_, _, url := tracedPair(t, col, PrefillFirst, broken, answerDecode)
	post(t, url, "/v1/completions", tracedPrompt)
	all := spanned(t, col, "kvspray.request", "kvspray.prefill", "kvspray.decode")
	if all["kvspray.request"].Text["kvspray.local_prefill"] != aloneFailed ||
		all["kvspray.request"].Failed != "" || all["kvspray.prefill"].Failed != "error: failed: 500" ||
		all["kvspray.decode"].Failed != "" {
		t.Errorf("%+v", all)
	}

	col = spanstest.New(t)
	_, _, url = tracedPair(t, col, Concurrent, answerPrefill,
		func(w http.ResponseWriter, r *http.Request, _ seen) { panic(http.ErrAbortHandler) })
	post(t, url, "/v1/completions", `{"prompt":"x","echo":true}`)
	all = spanned(t, col, "kvspray.request", "kvspray.decode")
	if s := all["kvspray.request"]; s.Failed == "" || s.Number["http.response.status_code"] != 502 ||
		s.Text["kvspray.local_prefill"] != aloneRequest || all["kvspray.decode"].Failed == "" {
		t.Errorf("%+v", all)
	}
}

// No text of an engine or a client, and no password, reaches the collector.
func TestSpansHaveNoSecrets(t *testing.T) {
	col := spanstest.New(t)
	p, d := newEngine(t, func(w http.ResponseWriter, _ *http.Request, s seen) {
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprint(w, "the prompt is: ", s.body["prompt"])
	}), newEngine(t, answerDecode)
	withUser := func(url string) string { return strings.Replace(url, "//", "//user:password@", 1) }
	_, url := start(t, Config{Prefill: []Engine{{URL: withUser(p.URL), Peer: "127.0.0.1:7650"}},
		Decode: decoders(withUser(d.URL)), Mode: PrefillFirst, OTLP: col.URL})
	post(t, url, "/v1/completions", `{"prompt":"a secret"}`)
	all := spanned(t, col, "kvspray.request", "kvspray.prefill", "kvspray.decode")
	if s := all["kvspray.prefill"]; s.Failed != "error: refused: 400" || s.Text["url.full"] != p.URL {
		t.Errorf("%+v", s)
	}
	text := fmt.Sprintf("%+v", all)
	for _, secret := range []string{"secret", "password", "user:"} {
		if strings.Contains(text, secret) {
			t.Errorf("%q is in %s", secret, text)
		}
	}
	refused := &neturl.Error{Op: "Post", URL: "http://user:password@a", Err: &net.OpError{Op: "dial",
		Err: errors.New("refused")}}
	for err, want := range map[error]string{refused: "not reached",
		context.DeadlineExceeded: "no answer in time", io.ErrUnexpectedEOF: "no whole answer"} {
		if got := classOf(err); got != want {
			t.Errorf("%v: %q, want %q", err, got, want)
		}
	}
}

// A clock that was set in between moves no span against the others.
func TestSpansAreOfOneClock(t *testing.T) {
	began := time.Now()
	c := clock{began.Add(time.Second)}
	if got := c.at(began); !got.Equal(began) || c.at(time.Time{}) != (time.Time{}) {
		t.Errorf("%v is placed at %v", began, got)
	}
}

// Requests go on while the collector is away.
func TestRouterWithoutAnswerOfTheCollector(t *testing.T) {
	col := spanstest.New(t)
	_, _, url := tracedPair(t, col, PrefillFirst, answerPrefill, answerDecode)
	col.Close()
	if code, body, _ := post(t, url, "/v1/completions", tracedPrompt); code != http.StatusOK {
		t.Fatalf("%d %s", code, body)
	}
	until(t, "the loss is counted", func() bool {
		resp, err := http.Get(url + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return err == nil && strings.Contains(string(b), `kvspray_proxy_spans_total{outcome="dropped"} 3`)
	})
}

// Of requests without a trace the router takes a share.
func TestTraceShare(t *testing.T) {
	p, err := New(Config{Decode: decoders("http://a"), OTLP: "http://b", TraceShare: 0.25})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for range 1000 {
		if p.traceOf(http.Header{}) != nil {
			n++
		}
	}
	if n < 150 || n > 350 {
		t.Errorf("%d of 1000 requests are traced: want about 250", n)
	}
	if p.traceOf(http.Header{traceHeader: {clientParent}}) == nil {
		t.Error("a client's trace is left out")
	}
	for want, cfg := range map[string]Config{`otlp "b:1"`: {OTLP: "b:1"},
		`otlp "http://...@b"`: {OTLP: "http://u:p@b"}, "trace_share 2": {TraceShare: 2}} {
		cfg.Decode = decoders("http://a")
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

// Off, a request without a traceparent costs no allocation.
func TestTracingOffIsFree(t *testing.T) {
	p, err := New(Config{Decode: decoders("http://a")})
	if err != nil {
		t.Fatal(err)
	}
	j, h, b := &job{p: p}, http.Header{}, &backend{}
	if n := testing.AllocsPerRun(1000, func() {
		j.trace = p.traceOf(h)
		hop := j.trace.hop(true)
		hop.begin(b)
		hop.end(nil)
		if hop.traceparent() != "" {
			t.Error("there is a traceparent")
		}
		j.traced()
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// Parameters of other connectors, and damaged ones, stay as they are.
func TestWithTraceparent(t *testing.T) {
	for in, want := range map[string]string{
		`{"kvspray":{"v":1,"x":[1]},"a":2}`: `{"kvspray":{"v":1,"x":[1],"traceparent":"T"},"a":2}`,
		`{"a":2}`:                           `{"a":2}`,
		`{"kvspray":null}`:                  `{"kvspray":null}`,
		`{"kvspray":"x"}`:                   `{"kvspray":"x"}`,
		`[1]`:                               `[1]`,
	} {
		var got, expected any
		if err := json.Unmarshal(withOwn(json.RawMessage(in), "T", hints{}), &got); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal([]byte(want), &expected); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, expected) {
			t.Errorf("%s becomes %v, want %s", in, got, want)
		}
	}
	if in := json.RawMessage(`{"kvspray":{}}`); &withOwn(in, "", hints{})[0] != &in[0] {
		t.Error("parameters are changed without a traceparent")
	}
}
