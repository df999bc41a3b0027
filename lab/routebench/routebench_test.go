package routebench

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// The clients get whole streams from the engines, and count answers that are none.
func TestClientsAndEngines(t *testing.T) {
	e, err := startEngines(2, time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	defer e.stop()
	var addresses []string
	for _, u := range e.urls {
		addresses = append(addresses, strings.TrimPrefix(u, "http://"))
	}
	for _, tokens := range []int{1, 7} {
		got := load{clients: 6, each: 3, tokens: tokens, prompt: 5000}.run(addresses)
		if got.failed != 0 || len(got.first) != 18 || got.at(0.5) <= 0 || got.at(0.99) < got.at(0.5) {
			t.Errorf("%+v", got)
		}
	}
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if strings.HasSuffix(r.URL.Path, "completions") {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer other.Close()
	got := load{clients: 2, each: 2, tokens: 3}.run([]string{other.Listener.Addr().String()})
	if got.failed != 4 || !errors.Is(got.err, errAnswer) {
		t.Errorf("%+v", got)
	}
}

// A prefill engine answers with parameters, and engines list their model.
func TestOtherAnswers(t *testing.T) {
	e, err := startEngines(1, time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	defer e.stop()
	resp, err := http.Post(e.urls[0]+"/v1/completions", "application/json",
		strings.NewReader(`{"kv_transfer_params":{"do_remote_decode":true}}`))
	for _, want := range []string{`"do_remote_prefill":true`, `"id":"model"`} {
		if err != nil {
			t.Fatal(err)
		}
		text, err2 := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err2 != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s, %v: want %s", text, err2, want)
		}
		resp, err = http.Get(e.urls[0] + "/v1/models")
	}
	_ = resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
}
