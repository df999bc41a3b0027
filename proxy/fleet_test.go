package proxy

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// serving is an engine with a list of models, whose answers have its name.
func serving(t *testing.T, name string, models ...string) *engine {
	t.Helper()
	e := newEngine(t, func(w http.ResponseWriter, r *http.Request, _ seen) {
		if r.URL.Path != "/v1/models" {
			fmt.Fprintf(w, `{"choices":[{"text":%q}]}`, name)
			return
		}
		var cards []string
		for _, m := range models {
			cards = append(cards, fmt.Sprintf(`{"id":%q,"max_model_len":7}`, m))
		}
		fmt.Fprintf(w, `{"object":"list","data":[%s]}`, strings.Join(cards, ","))
	})
	e.lists = true
	return e
}

// known waits until the router has the models of all its engines.
func known(t *testing.T, p *Proxy) {
	t.Helper()
	until(t, "the models", func() bool {
		return !slices.ContainsFunc(p.backends(), func(b *backend) bool {
			return b.candidate(b.last(), "").serves != servesIt
		})
	})
}

func get(t *testing.T, url string) string {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A request goes where its model is served, the list of models has all of them, and an unknown one
// is refused as OpenAI's API does.
func TestModels(t *testing.T) {
	a, b := serving(t, "from a", "x", "both"), serving(t, "from b", "both", "y")
	for _, policy := range []string{DefaultPolicy, "auto"} {
		p, url := start(t, Config{Decode: decoders(a.URL, b.URL), Mode: PrefillFirst, Policy: policy})
		known(t, p)
		for model, want := range map[string]string{"x": "from a", "y": "from b", "both": "from",
			"": "from"} {
			for range 4 {
				code, answer, _ := post(t, url, "/v1/completions", completion(model, "hi"))
				if code != 200 || !strings.Contains(answer, want) {
					t.Errorf("%s, model %q: %d %s", policy, model, code, answer)
				}
			}
		}
		for _, path := range []string{"/v1/completions", "/v1/chat/completions", "/tokenize"} {
			code, answer, _ := post(t, url, path, `{"model":"z","messages":[],"prompt":"hi"}`)
			var e struct{ Error map[string]any }
			if err := json.Unmarshal([]byte(answer), &e); err != nil || code != 404 ||
				e.Error["code"] != "model_not_found" || e.Error["param"] != "model" ||
				e.Error["type"] != "invalid_request_error" {
				t.Errorf("%s %s: %d %s", policy, path, code, answer)
			}
		}
		text := get(t, url+"/v1/models")
		var list struct {
			Object string
			Data   []struct {
				ID     string
				MaxLen int `json:"max_model_len"`
			}
		}
		if err := json.Unmarshal([]byte(text), &list); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(list); got != "{list [{both 7} {x 7} {y 7}]}" {
			t.Errorf("%s: %s", policy, got)
		}
	}
}

// A model whose only engine is down is not an unknown one.
func TestModelOfAnEngineThatIsDown(t *testing.T) {
	a, b := serving(t, "from a", "x"), serving(t, "from b", "y")
	p, url := start(t, Config{Decode: decoders(a.URL, b.URL), Mode: PrefillFirst})
	known(t, p)
	b.Close()
	until(t, "it is not down", func() bool { return p.decode.all[1].condition() == down })
	if code, answer, _ := post(t, url, "/v1/completions", completion("y", "hi")); code != 503 ||
		!strings.Contains(answer, codeNoEngine) {
		t.Errorf("%d %s", code, answer)
	}
}

// Engines come and go while requests are in flight: a new one gets requests, one that is left out
// gets none, and its answer goes on to its end.
func TestSetEngines(t *testing.T) {
	for _, policy := range []string{DefaultPolicy, "auto"} {
		more, begun := make(chan struct{}), make(chan struct{})
		old := newEngine(t, func(w http.ResponseWriter, _ *http.Request, _ seen) {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: {}\n\n")
			_ = http.NewResponseController(w).Flush()
			close(begun)
			<-more
			fmt.Fprint(w, "data: [DONE]\n\n")
		})
		fresh := newEngine(t, answerDecode)
		p, url := start(t, Config{Decode: decoders(old.URL), Mode: PrefillFirst, Policy: policy})
		answered := make(chan string)
		go func() {
			_, answer, _ := post(t, url, "/v1/completions", `{"prompt":"a","stream":true}`)
			answered <- answer
		}()
		waitFor(t, begun, "no answer has begun")
		if err := p.SetEngines(nil, decoders("no URL")); err == nil {
			t.Error("a list with a mistake is taken")
		}
		kept := p.decode.all[0]
		if err := p.SetEngines(nil, decoders(old.URL, fresh.URL)); err != nil {
			t.Fatal(err)
		}
		if p.decode.list()[0] != kept {
			t.Error("an engine that stays begins anew")
		}
		if err := p.SetEngines(nil, decoders(fresh.URL)); err != nil {
			t.Fatal(err)
		}
		for range 4 {
			if code, answer, _ := post(t, url, "/v1/completions", prompt("b")); code != 200 {
				t.Errorf("%s: %d %s", policy, code, answer)
			}
		}
		if n := len(old.requests()); n != 1 {
			t.Errorf("%s: %d requests to an engine that was left out", policy, n)
		}
		close(more)
		if answer := <-answered; !strings.HasSuffix(answer, "data: [DONE]\n\n") {
			t.Errorf("%s: %s", policy, answer)
		}
		until(t, "the engine that was left out is still watched", func() bool {
			text := get(t, url+"/metrics")
			return !strings.Contains(text, old.URL)
		})
		if err := p.SetEngines(nil, nil); err != nil {
			t.Fatal(err)
		}
		if code, answer, _ := post(t, url, "/v1/completions", prompt("c")); code != 503 {
			t.Errorf("%s: %d %s", policy, code, answer)
		}
	}
}

// An engine that is left out while it holds a cache gets the release.
func TestReleaseAtAnEngineThatWasLeftOut(t *testing.T) {
	began, end := make(chan struct{}), make(chan struct{})
	pre := newEngine(t, answerPrefill)
	dec := newEngine(t, func(w http.ResponseWriter, _ *http.Request, _ seen) {
		close(began)
		<-end
		w.WriteHeader(http.StatusInternalServerError)
	})
	p, url := start(t, Config{Prefill: []Engine{{URL: pre.URL, Peer: "127.0.0.1:7650"}},
		Decode: decoders(dec.URL), Mode: PrefillFirst})
	done := make(chan struct{})
	go func() {
		defer close(done)
		post(t, url, "/v1/completions", prompt("a"))
	}()
	waitFor(t, began, "no request")
	if err := p.SetEngines(nil, decoders(dec.URL)); err != nil {
		t.Fatal(err)
	}
	close(end)
	waitFor(t, done, "no answer")
	until(t, "no release", func() bool {
		return slices.ContainsFunc(pre.requests(), func(s seen) bool {
			return own(s)["release"] == true
		})
	})
}
