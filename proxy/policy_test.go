package proxy

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
)

// lines collects a log.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// prompt is a streamed request with a prompt of some text.
func prompt(text string) string { return fmt.Sprintf(`{"prompt": %q, "stream": true}`, text) }

// Prompts with one prefix go to one engine, which may compute alone; the log has prediction and
// outcome. After the loss of that engine another one answers within the request.
func TestPolicyAuto(t *testing.T) {
	var engines []*engine
	var urls []string
	for range 3 {
		e := newEngine(t, answerDecode)
		engines, urls = append(engines, e), append(urls, e.URL)
	}
	log := &lines{}
	_, url := start(t, Config{Decode: decoders(urls...), Mode: PrefillFirst, Policy: "auto",
		Log: slog.New(slog.NewTextHandler(log, nil))})
	body := prompt(strings.Repeat("a long document ", 1000))
	for range 6 {
		if code, answer, _ := post(t, url, "/v1/completions", body); code != 200 ||
			!strings.Contains(answer, "hello") {
			t.Fatalf("%d %s", code, answer)
		}
	}
	holder := -1
	for i, e := range engines {
		switch n := len(e.requests()); {
		case n == 6 && holder < 0:
			holder = i
		case n != 0:
			t.Errorf("engine %d got %d of 6 requests", i, n)
		}
	}
	until(t, "no line of a decision with its outcome", func() bool {
		text := log.String()
		return strings.Count(text, "msg=placed") == 6 && strings.Contains(text, "choice=run") &&
			strings.Contains(text, "reused=3968") && strings.Contains(text, "actual=") &&
			strings.Contains(text, "regret=")
	})
	if holder < 0 {
		t.Fatal("no engine got all requests")
	}
	engines[holder].Close()
	if code, answer, _ := post(t, url, "/v1/completions", body); code != 200 ||
		!strings.Contains(answer, "hello") {
		t.Errorf("after the loss of the holder: %d %s", code, answer)
	}
}

// Policies fetch and local use a prefill engine always and never. A prefill engine that fails is
// replaced by the decode engine.
func TestPolicyFetchAndLocal(t *testing.T) {
	for policy, want := range map[string]int{"fetch": 1, "local": 0, "": 1, "least-loaded": 1} {
		p, d := newEngine(t, answerPrefill), newEngine(t, answerDecode)
		px, url := start(t, Config{Prefill: []Engine{{URL: p.URL, Peer: "127.0.0.1:7650"}},
			Decode: decoders(d.URL), Mode: PrefillFirst, Policy: policy})
		if code, answer, _ := post(t, url, "/v1/completions", prompt("x")); code != 200 {
			t.Fatalf("%s: %d %s", policy, code, answer)
		}
		if n := len(p.requests()); n != want {
			t.Errorf("%s: the prefill engine got %d requests, want %d", policy, n, want)
		}
		if got := params(d.requests()[0]) != nil; got != (want == 1) {
			t.Errorf("%s: the decode engine has parameters: %v", policy, got)
		}
		_, metrics, _ := getMetrics(t, url)
		if has := strings.Contains(metrics, "kvspray_proxy_placements_total"); has !=
			(policy == "fetch" || policy == "local") {
			t.Errorf("%s: metrics of a policy: %v", policy, has)
		}
		p.Close()
		if code, answer, _ := post(t, url, "/v1/completions", prompt("y")); code != 200 {
			t.Errorf("%s without its prefill engine: %d %s", policy, code, answer)
		}
		// The client has its answer a moment before the router's handler returns.
		until(t, policy+": requests are in flight at the end", func() bool {
			return load(px.prefill.all[0]) == 0 && load(px.decode.all[0]) == 0
		})
	}
}

func getMetrics(t *testing.T, url string) (int, string, http.Header) {
	t.Helper()
	resp, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var b bytes.Buffer
	if _, err := b.ReadFrom(resp.Body); err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, b.String(), resp.Header
}

// The policy learns the rates from the sidecars of both engines.
func TestPolicyLearnsFromSidecars(t *testing.T) {
	p, d := newEngine(t, answerPrefill), newEngine(t, answerDecode)
	ps := newEngine(t, func(w http.ResponseWriter, r *http.Request, _ seen) {
		if r.URL.Path == "/v1/links" {
			fmt.Fprint(w, `{"peers":[{"endpoint":"127.0.0.1:7660","links":[{"state":"healthy",`+
				`"bytes_per_second":1000}]}]}`)
			return
		}
		fmt.Fprint(w, `{"endpoint":"127.0.0.1:7650"}`)
	})
	ds := newEngine(t, func(w http.ResponseWriter, _ *http.Request, _ seen) {
		fmt.Fprint(w, `{"endpoint":"127.0.0.1:7660"}`)
	})
	log := &lines{}
	_, url := start(t, Config{Prefill: []Engine{{URL: p.URL, Sidecar: ps.URL}},
		Decode: []Engine{{URL: d.URL, Sidecar: ds.URL}}, Mode: Concurrent, Policy: "fetch",
		Log: slog.New(slog.NewTextHandler(log, nil))})
	// 1,000 bytes per second take long for any prompt: the prediction shows it.
	until(t, "the learned rate is in no prediction", func() bool {
		post(t, url, "/v1/completions", prompt("z"))
		for line := range strings.Lines(log.String()) {
			var transfer float64
			if _, rest, ok := strings.Cut(line, " transfer="); ok {
				if _, err := fmt.Sscanf(rest, "%g", &transfer); err == nil && transfer > 100 {
					return true
				}
			}
		}
		return false
	})
}

func TestPolicyIsChecked(t *testing.T) {
	for want, cfg := range map[string]Config{
		"policy":      {Policy: "best"},
		"token_bytes": {Policy: "auto", TokenBytes: -1},
	} {
		cfg.Decode, cfg.Mode = decoders("http://127.0.0.1:1"), PrefillFirst
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}
