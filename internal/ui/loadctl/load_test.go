package loadctl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
)

// engine answers as vLLM and the plug-in do. answers has JSON by method, or by path; what is
// missing succeeds.
type engine struct {
	ranks   int
	answers map[string][]string // one after another; the last one again and again
	calls   []string
	token   string
	sleeps  string
}

func (e *engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name := strings.TrimPrefix(r.URL.RequestURI(), "/")
	var body struct {
		Method string   `json:"method"`
		Args   []string `json:"args"`
	}
	if r.URL.Path == "/collective_rpc" {
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || body.Args == nil {
			http.Error(w, "bad body", http.StatusBadRequest)
			return
		}
		name = strings.TrimPrefix(body.Method, "kvspray_load_")
		if name != "check" && len(body.Args) > 0 {
			e.token = body.Args[0]
		}
		if name == "cancel" && len(body.Args) == 3 {
			e.sleeps = body.Args[2]
		}
	}
	e.calls = append(e.calls, name)
	answer := map[string]string{
		"check":                 `{"digest":"d","bytes":10,"tensors":2,"files":1,"checked":true}`,
		"arm":                   `{"token":"T","state":"armed"}`,
		"begin":                 `{"token":"T","digest":"d"}`,
		"poll":                  `{"token":"T","state":"loaded","digest":"d","bytes":10,"total":10}`,
		"finish":                `{"token":"T","state":"named","weights":"d","bytes":10,"seconds":2}`,
		"release":               `{"token":"T","state":"done","weights":"d"}`,
		"cancel":                `{"token":"T","state":"failed","error":"stopped"}`,
		"wake_up?tags=weights":  `{"status":"sleeping"}`,
		"wake_up?tags=kv_cache": `{"status":"awake"}`,
	}[name]
	if list := e.answers[name]; len(list) > 0 {
		answer = list[0]
		if len(list) > 1 {
			e.answers[name] = list[1:]
		}
	}
	answer = strings.ReplaceAll(answer, `"T"`, `"`+e.token+`"`)
	if status, text, ok := strings.Cut(answer, " "); ok && len(status) == 3 {
		var code int
		_, _ = fmt.Sscan(status, &code)
		http.Error(w, text, code)
		return
	}
	if body.Method != "" && !strings.HasPrefix(answer, "[") {
		answer = "[" + strings.Repeat(answer+",", e.ranks-1) + answer + "]"
	}
	if body.Method != "" {
		answer = `{"results":` + answer + `}`
	}
	_, _ = w.Write([]byte(answer))
}

func load(t *testing.T, e *engine, change func(*Loader)) (string, error) {
	t.Helper()
	srv := httptest.NewServer(e)
	defer srv.Close()
	var out, log strings.Builder
	l := Loader{Engine: srv.URL, Source: "/m", Level: 2, Out: &out, Log: &log}
	if change != nil {
		change(&l)
	}
	err := l.Run(context.Background())
	return out.String(), err
}

func TestLoad(t *testing.T) {
	e := &engine{ranks: 2, answers: map[string][]string{
		"poll": {`[{"token":"T","state":"loaded","digest":"d","bytes":10},` +
			`{"token":"T","state":"loading","digest":"d","bytes":5,"total":10}]`,
			`{"token":"T","state":"loaded","digest":"d","bytes":10,"total":10}`},
	}}
	out, err := load(t, e, nil)
	if err != nil || out != "d is loaded on 2 ranks, 20 bytes in 2.00 s. The engine is awake\n" {
		t.Fatal(out, err)
	}
	want := []string{"check", "arm", "sleep?level=2", "wake_up?tags=weights", "begin", "poll", "poll",
		"finish", "release", "wake_up?tags=kv_cache"}
	if !slices.Equal(e.calls, want) {
		t.Error("calls:", e.calls)
	}
	e = &engine{ranks: 1}
	out, err = load(t, e, func(l *Loader) { l.Asleep, l.JSON, l.Level = true, true, 1 })
	if err != nil || out != `{"weights":"d","ranks":1,"bytes":10,"seconds":2,"awake":false}`+"\n" {
		t.Fatal(out, err)
	}
	if !slices.Contains(e.calls, "sleep?level=1") ||
		slices.Contains(e.calls, "wake_up?tags=kv_cache") {
		t.Error("calls:", e.calls)
	}
}

// Whatever fails, the engine does not wake up, and the error has its state and a remedy.
func TestFailures(t *testing.T) {
	for _, c := range []struct {
		name, answer, want string
		last               string // of the calls
	}{
		{"check", `{"error":"tensor x is missing"}`,
			"rank 0: tensor x is missing. The engine is as it was", "check"},
		{"check", `[{"digest":"d"},{"digest":"e"}]`, "d on one rank and e on another", "check"},
		{"check", `[]`, "no rank answers check", "check"},
		{"check", `["no"]`, "a plug-in of another version", "check"},
		{"check", "404 not found", "VLLM_SERVER_DEV_MODE=1", "check"},
		{"check", "500 Method 'x' is not implemented.", "start the engine with KVSPRAY_LOAD=1", "check"},
		{"arm", `[{"token":"T","state":"armed"},{"error":"another load"}]`, "rank 1: another load",
			"cancel"},
		{"arm", `{"token":"other","state":"armed"}`, `for the load "other"`, "cancel"},
		{"sleep?level=2", "500 no", "no. The engine serves nothing until", "cancel"},
		{"wake_up?tags=weights", `{"status":"awake"}`, "nothing is loaded", "cancel"},
		{"wake_up?tags=weights", "500 no memory", "no memory. The engine serves nothing", "cancel"},
		{"begin", `{"error":"changed"}`, "changed. The engine serves nothing", "cancel"},
		{"begin", `[{"token":"T"}]`, "1 ranks answer begin, and 2 the check", "cancel"},
		{"poll", `[{"token":"T","state":"loaded","digest":"d"},{"state":"failed","error":"disk"}]`,
			"rank 1: disk. The engine serves nothing until another load succeeds: load again", "cancel"},
		{"poll", `[{"token":"T","state":"loaded","digest":"d"},` +
			`{"token":"T","state":"done","digest":"d"}]`,
			`rank 1 is "done"`, "cancel"},
		{"poll", `{"token":"T","state":"loaded","digest":"e"}`, `with "e" while d is loaded`, "cancel"},
		{"poll", `{"token":"old","state":"loaded","digest":"d"}`, `for the load "old"`, "cancel"},
		{"poll", "500 gone", "gone. The engine serves nothing", "cancel"},
		{"finish", `{"error":"no"}`, "no. The engine serves nothing until", "cancel"},
		{"finish", `[{"token":"T","state":"named","weights":"d"},` +
			`{"token":"T","state":"named","weights":"e"}]`, `rank 1 has named its weights "e"`, "cancel"},
		{"release", `{"error":"no"}`, "has the new weights, and may refuse to wake up", "release"},
		{"wake_up?tags=kv_cache", "500 no memory", "has the new weights and sleeps",
			"wake_up?tags=kv_cache"},
		{"wake_up?tags=kv_cache", `{"status":"sleeping"}`, `has the new weights and is "sleeping"`,
			"wake_up?tags=kv_cache"},
	} {
		e := &engine{ranks: 2, answers: map[string][]string{c.name: {c.answer}}}
		out, err := load(t, e, nil)
		if err == nil || !strings.Contains(err.Error(), c.want) || out != "" {
			t.Errorf("%s answers %s: %q, %v", c.name, c.answer, out, err)
		}
		if got := e.calls[len(e.calls)-1]; got != c.last {
			t.Errorf("%s answers %s: the last call is %s, want %s", c.name, c.answer, got, c.last)
		}
	}
	_, err := load(t, &engine{ranks: 1}, func(l *Loader) { l.Engine = "http://127.0.0.1:1" })
	if err == nil || !strings.Contains(err.Error(), "no engine answers at http://127.0.0.1:1") {
		t.Error(err)
	}
}

// What did not sleep yet is as it was.
func TestDisarmed(t *testing.T) {
	e := &engine{ranks: 2, answers: map[string][]string{
		"sleep?level=2": {"500 busy"}, "cancel": {`{"token":"T","state":"disarmed"}`},
	}}
	_, err := load(t, e, nil)
	if err == nil || !strings.HasSuffix(err.Error(), "busy. The engine has the weights that it had") {
		t.Error(err)
	}
	// One rank belongs to another load.
	e = &engine{ranks: 2, answers: map[string][]string{
		"arm":    {`[{"token":"T","state":"armed"},{"error":"another load"}]`},
		"cancel": {`[{"token":"T","state":"disarmed"},{"error":"this rank belongs to another"}]`},
	}}
	_, err = load(t, e, nil)
	if err == nil ||
		!strings.HasSuffix(err.Error(), "another load. The engine has the weights that it had") {
		t.Error(err)
	}
}

// A sleep that may come yet keeps the ranks guarded.
func TestLostSleep(t *testing.T) {
	for answer, want := range map[string]string{"500 no": "", "504 a proxy": "yes"} {
		e := &engine{ranks: 1, answers: map[string][]string{"sleep?level=2": {answer}}}
		if _, err := load(t, e, nil); err == nil || e.sleeps != want {
			t.Errorf("%s: %v, %q", answer, err, e.sleeps)
		}
	}
}

// An engine that wakes up as a whole is put to sleep again.
func TestWholeWake(t *testing.T) {
	e := &engine{ranks: 1, answers: map[string][]string{
		"wake_up?tags=weights": {`{"status":"awake"}`},
	}}
	if _, err := load(t, e, nil); err == nil {
		t.Error("loaded")
	}
	want := []string{"check", "arm", "sleep?level=2", "wake_up?tags=weights", "sleep?level=2",
		"cancel"}
	if !slices.Equal(e.calls, want) {
		t.Error("calls:", e.calls)
	}
}

// A command that is stopped stops the load, whenever that is.
func TestStopped(t *testing.T) {
	for _, at := range []string{
		"arm", "sleep?level=2", "wake_up?tags=weights", "begin", "poll", "finish",
	} {
		e := &engine{ranks: 1, answers: map[string][]string{
			"poll": {`{"token":"T","state":"loading","digest":"d","total":10}`},
		}}
		if at == "finish" {
			delete(e.answers, "poll")
		}
		ctx, stop := context.WithCancelCause(context.Background())
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			e.ServeHTTP(w, r)
			if e.calls[len(e.calls)-1] == at {
				stop(errors.New("interrupted"))
				<-ctx.Done()
			}
		}))
		var out strings.Builder
		l := Loader{Engine: srv.URL, Source: "/m", Level: 2, Out: &out, Log: &out}
		err := l.Run(ctx)
		srv.Close()
		if err == nil || !strings.Contains(err.Error(), "interrupted. The engine serves nothing") {
			t.Errorf("%s: %v", at, err)
		}
		if got := e.calls[len(e.calls)-1]; got != "cancel" {
			t.Errorf("%s: the last call is %s", at, got)
		}
	}
}
