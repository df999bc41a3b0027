package proxy

import (
	"encoding/json"
	"net/http"
	"strconv"
	"testing"

	"github.com/kvspray/kvspray/internal/nodeapi"
)

// routedOf asks the router about a request.
func routedOf(t *testing.T, url, id string) (v nodeapi.RoutedList) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/v1/requests?id="+id, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	if err := json.NewDecoder(res.Body).Decode(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

// The router keeps the engines that it chose for a request. Only the whole id of the request finds
// it, also within an engine's id.
func TestRequestsOfTheRouter(t *testing.T) {
	pre, dec := newEngine(t, answerPrefill), newEngine(t, answerDecode)
	_, url := start(t, Config{Prefill: []Engine{{URL: pre.URL, Peer: "127.0.0.1:7650"}},
		Decode: decoders(dec.URL)})
	status, _, h := post(t, url, "/v1/completions", `{"model":"m","prompt":"p","max_tokens":2}`,
		"X-Request-Id", "4be2c7")
	if status != http.StatusOK {
		t.Fatal(status, h)
	}
	var v nodeapi.RoutedList
	until(t, "a record", func() bool { v = routedOf(t, url, "4be2c7"); return len(v.Records) == 1 })
	e := v.Records[0]
	if e.Req != "4be2c7" || e.Mode != string(Concurrent) || e.Status != http.StatusOK ||
		e.Prefill != pre.URL || e.Decode != dec.URL || e.LocalPrefill != "" || e.FirstUS == 0 ||
		e.TookUS < e.FirstUS {
		t.Errorf("%+v", e)
	}
	if v := routedOf(t, url, "cmpl-4be2c7-0-9f"); len(v.Records) != 1 {
		t.Errorf("an engine's id finds %+v", v)
	}
	if v := routedOf(t, url, "4be2"); len(v.Records) != 0 {
		t.Errorf("a part of the id finds %+v", v)
	}
}

// A router keeps the last requests, up to a bound.
func TestRoutedIsBounded(t *testing.T) {
	var r routed
	for i := range maxRouted + 10 {
		r.add(nodeapi.Routed{Req: strconv.Itoa(i)})
		if i == 2 && len(r.find("2").Records) != 1 {
			t.Error("a request is lost")
		}
	}
	for id, want := range map[string]int{"9": 0, "10": 1, strconv.Itoa(maxRouted + 9): 1} {
		if got := len(r.find(id).Records); got != want {
			t.Errorf("%s: %d records, want %d", id, got, want)
		}
	}
	if len(r.last) != maxRouted {
		t.Errorf("%d are kept", len(r.last))
	}
}
