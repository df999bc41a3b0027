// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"fmt"
	"net/http"
	"slices"
	"sync/atomic"
	"testing"
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
	refuses := func(status int) func(http.ResponseWriter, *http.Request, seen) {
		return func(w http.ResponseWriter, _ *http.Request, _ seen) {
			http.Error(w, "no", status)
		}
	}
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
				cfg := Config{Mode: mode, Prefill: []Prefill{{URL: p.URL, Peer: "p:1"}},
					Decode: []string{d.URL}}
				if c.second {
					cfg.Decode = append(cfg.Decode, newEngine(t, answerDecode).URL)
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

// The client has its answer before the release is answered.
func TestReleaseDelaysNoClient(t *testing.T) {
	answered := make(chan struct{})
	p := newEngine(t, func(w http.ResponseWriter, r *http.Request, s seen) {
		if own(s)["release"] == true {
			select {
			case <-answered:
			case <-r.Context().Done():
				t.Error("the release ended before the client had its answer")
			}
			return
		}
		answerPrefill(w, r, s)
	})
	d := newEngine(t, func(w http.ResponseWriter, _ *http.Request, _ seen) {
		http.Error(w, `{"error":"no"}`, http.StatusBadRequest)
	})
	_, url := start(t, Config{Mode: PrefillFirst, Prefill: []Prefill{{URL: p.URL}},
		Decode: []string{d.URL}})
	if status, body, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); status != 400 {
		t.Error(status, body)
	}
	close(answered)
	until(t, "nothing is released", func() bool { return len(releases(p)) == 1 })
}

// Connectors without our key have no release.
func TestOtherConnectorsGetNoRelease(t *testing.T) {
	p := newEngine(t, func(w http.ResponseWriter, _ *http.Request, _ seen) {
		fmt.Fprint(w, `{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1]]}}`)
	})
	d := newEngine(t, func(w http.ResponseWriter, _ *http.Request, _ seen) {
		http.Error(w, "no", http.StatusBadRequest)
	})
	px, url := start(t, Config{Mode: PrefillFirst, Prefill: []Prefill{{URL: p.URL}},
		Decode: []string{d.URL}})
	if status, body, _ := post(t, url, "/v1/completions", `{"prompt":"a"}`); status != 400 {
		t.Error(status, body)
	}
	until(t, "the request does not end", func() bool { return len(px.slots) == 0 })
	if n := len(p.requests()); n != 1 {
		t.Errorf("P got %d requests", n)
	}
}
