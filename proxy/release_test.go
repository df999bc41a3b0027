package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	kvtest "github.com/kvspray/kvspray/internal/testutil"
)

// releases are the transfers that a prefill engine was asked to release.
func releases(e *engine) (list []string) {
	for _, s := range e.requests() {
		if k := own(s); k["release"] == true && params(s)["do_remote_decode"] == false {
			xfer, _ := k["xfer"].(string)
			list = append(list, xfer)
		}
	}
	return list
}

// begun are the transfers that it was asked to compute.
func begun(e *engine) (list []string) {
	for _, s := range e.requests() {
		if params(s)["do_remote_decode"] == true {
			xfer, _ := own(s)["xfer"].(string)
			list = append(list, xfer)
		}
	}
	return list
}

// What a prefill engine keeps ends with the request: if the decode engine refuses it, fails, or
// computes the prompt itself. Nothing is released that the decode engine fetches.
func TestEndOfARequestEndsThePrefillsHold(t *testing.T) {
	for _, c := range []struct {
		name     string
		decode   func(http.ResponseWriter, *http.Request, seen)
		second   bool // a decode engine that answers
		status   int
		released bool
	}{
		{"an answer", answerDecode, false, 200, false},
		{"a mistake of the client", refuses(400), false, 400, true},
		{"full", refuses(429), false, 429, true},
		{"broken", refuses(500), false, 500, true},
		{"broken, and another one computes", refuses(500), true, 200, true},
		{"full, and another one fetches", refuses(429), true, 200, false},
		{"lost", func(http.ResponseWriter, *http.Request, seen) { panic(http.ErrAbortHandler) }, false,
			502, true},
	} {
		for _, mode := range []Mode{PrefillFirst, Concurrent} {
			t.Run(c.name+" "+string(mode), func(t *testing.T) {
				var computed atomic.Bool
				p := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
					answerPrefill(w, r, s)
					computed.Store(true)
				})
				d := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
					until(t, "P has not answered", computed.Load)
					c.decode(w, r, s)
				})
				cfg := Config{Mode: mode, Prefill: []Engine{{URL: p.URL, Peer: "p:1"}},
					Decode: decoders(d.URL)}
				if c.second {
					cfg.Decode = append(cfg.Decode, Engine{URL: newEngine(t, answerDecode).URL})
				}
				px, url := start(t, cfg)
				if c.second {
					px.decode.next = 0 // the first engine gets the first request
				}
				status, body, _ := post(t, url, "/v1/completions", `{"model":"m","prompt":"a","n":2}`,
					"Authorization", "Bearer client")
				if status != c.status {
					t.Fatal(status, body)
				}
				if c.released {
					until(t, "the cache is not released", func() bool { return len(releases(p)) > 0 })
				}
				until(t, "the request does not end", func() bool { return len(px.slots) == 0 })
				got, want := releases(p), begun(p)
				if !c.released {
					want = nil
				}
				if !slices.Equal(got, want) {
					t.Errorf("released %v, want %v", got, want)
				}
				for _, s := range p.requests() {
					if own(s)["release"] == true && (s.body["model"] != "m" || own(s)["fanout"] == nil ||
						own(s)["peer"] != "p:1" || s.header.Get("Authorization") != "Bearer client") {
						t.Errorf("the release has the body %v", s)
					}
				}
			})
		}
	}
}

// refuses answers a client's mistake.
func refuses(status int) func(http.ResponseWriter, *http.Request, seen) {
	return func(w http.ResponseWriter, _ *http.Request, _ seen) {
		http.Error(w, `{"error":"no"}`, status)
	}
}

// A prefill engine that answers no release delays neither the end of the client's answer, which has
// several parts after a failover, nor another request in its place.
func TestReleaseDelaysNothing(t *testing.T) {
	part := strings.Repeat("a", maxHeld)
	p := newEngine(t, answerPrefill)
	done := make(chan struct{})
	p.release = func(r *http.Request) {
		select {
		case <-done:
		case <-r.Context().Done():
			t.Error("the release has ended")
		}
	}
	broken := newFaulty(t, answerDecode)
	broken.status.Store(500)
	d := newEngine(t, func(w http.ResponseWriter, _ *http.Request, _ seen) {
		_ = http.NewResponseController(w).Flush() // in chunks
		fmt.Fprint(w, part, part, part)
	})
	px, url := start(t, Config{Mode: PrefillFirst, Prefill: []Engine{{URL: p.URL}},
		Decode: decoders(broken.URL, d.URL)})
	px.decode.next = 0 // the first engine gets the first request
	status, body, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`)
	if status != 200 || body != part+part+part {
		t.Errorf("%d, %d bytes", status, len(body))
	}
	until(t, "its place is not free", func() bool { return len(px.slots) == 0 })
	until(t, "nothing is released", func() bool { return len(releases(p)) == 1 })
	if n := testutil.ToFloat64(px.met.releases.WithLabelValues(releaseSent)); n != 0 {
		t.Error("the client waited for the release")
	}
	close(done)
	until(t, "the release does not end", func() bool {
		return testutil.ToFloat64(px.met.releases.WithLabelValues(releaseSent)) == 1
	})
}

// A client goes away while a decode engine has its request, or after one has failed: the decode
// engine may never ask for the cache.
func TestReleaseAfterTheClientHasGone(t *testing.T) {
	for _, mode := range []Mode{PrefillFirst, Concurrent} {
		t.Run(string(mode), func(t *testing.T) {
			arrived := make(chan struct{})
			var d *engine
			computed := make(chan struct{})
			p, d, _, url := pairWith(t, mode, func(w http.ResponseWriter, r *http.Request, s seen) {
				answerPrefill(w, r, s)
				close(computed)
			}, func(_ http.ResponseWriter, r *http.Request, _ seen) {
				<-computed
				close(arrived)
				d.hang(r)
			}, &d)
			ctx, cancel := context.WithCancel(t.Context())
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions",
				strings.NewReader(`{"prompt":"a"}`))
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				<-arrived
				cancel()
			}()
			if _, err := http.DefaultClient.Do(req); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			waitFor(t, d.gone, "the decode engine's request goes on")
			until(t, "nothing is released", func() bool { return len(releases(p)) == 1 })
			if got, want := releases(p), begun(p); !slices.Equal(got, want) {
				t.Errorf("released %v, want %v", got, want)
			}
		})
	}
}

// answerer is a transport in place of engines and network.
type answerer func(*http.Request) *http.Response

func (f answerer) RoundTrip(r *http.Request) (*http.Response, error) { return f(r), nil }

// At the bound of the releases that wait, a further one is dropped and counted, with one line of
// the log for all of a second. At the end of the router those that wait are sent.
func TestReleasesAreBounded(t *testing.T) {
	kvtest.Bubble(t, func(t *testing.T) {
		var log kvtest.Log
		px, err := New(Config{Mode: PrefillFirst, Prefill: []Engine{{URL: "http://p"}},
			Decode: decoders("http://d"), Log: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			t.Fatal(err)
		}
		var sent atomic.Int64
		px.client.Transport = answerer(func(r *http.Request) *http.Response {
			w := httptest.NewRecorder()
			var s seen
			if r.Method == http.MethodPost && json.NewDecoder(r.Body).Decode(&s.body) != nil {
				t.Error("a body is no JSON")
			}
			switch {
			case own(s)["release"] == true:
				sent.Add(1)
			case r.URL.Host == "d" && s.body != nil:
				w.WriteHeader(http.StatusBadRequest)
			case s.body != nil:
				answerPrefill(w, r, s)
			}
			resp := w.Result()
			resp.Request = r
			return resp
		})
		const over = 3
		h := px.Handler()
		for range releaseQueue + over {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost,
				"/v1/completions", strings.NewReader(`{"prompt":"a"}`)))
			if w.Code != http.StatusBadRequest {
				t.Fatal(w.Code, w.Body)
			}
		}
		if n := testutil.ToFloat64(px.met.releases.WithLabelValues(releaseDropped)); n != over {
			t.Errorf("%v releases are dropped", n)
		}
		if n := strings.Count(log.String(), "could not be released"); n != 1 {
			t.Errorf("%d lines: %s", n, log.String())
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		px.Watch(ended)
		if n := sent.Load(); n != releaseQueue {
			t.Errorf("%d of %d releases were sent at the end", n, releaseQueue)
		}
	})
}

// Connectors without our key have no release.
func TestOtherConnectorsGetNoRelease(t *testing.T) {
	p := newEngine(t, func(w http.ResponseWriter, _ *http.Request, _ seen) {
		fmt.Fprint(w, `{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1]]}}`)
	})
	d := newEngine(t, refuses(400))
	px, url := start(t, Config{Mode: PrefillFirst, Prefill: []Engine{{URL: p.URL}},
		Decode: decoders(d.URL)})
	if status, body, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); status != 400 {
		t.Error(status, body)
	}
	until(t, "the request does not end", func() bool { return len(px.slots) == 0 })
	if n := len(p.requests()); n != 1 {
		t.Errorf("P got %d requests", n)
	}
}

// A router that ends cuts requests after its drain time, and releases what they keep. One cannot
// notice that its connection is closed: its client has sent another request behind it.
func TestReleaseOfRequestsThatAreCut(t *testing.T) {
	for _, next := range []string{"", "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"} {
		arrived := make(chan struct{})
		p := newEngine(t, answerPrefill)
		var d *engine
		d = newEngine(t, func(_ http.ResponseWriter, r *http.Request, _ seen) {
			close(arrived)
			d.hang(r)
		})
		times := quick()
		times.Drain = time.Millisecond
		px, err := New(Config{Mode: PrefillFirst, Prefill: []Engine{{URL: p.URL}},
			Decode: decoders(d.URL), Times: times})
		if err != nil {
			t.Fatal(err)
		}
		url, stop := serveOn(t, px)
		conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		const body = `{"prompt":"a"}`
		fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s%s",
			len(body), body, next)
		waitFor(t, arrived, "the decode engine gets no request")
		stop()
		if got, want := releases(p), begun(p); len(want) != 1 || !slices.Equal(got, want) {
			t.Errorf("before %q: released %v, want %v", next, got, want)
		}
	}
}
