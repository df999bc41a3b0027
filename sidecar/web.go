// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"bufio"
	"encoding/json"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Bounds for HTTP clients.
const (
	maxScrapes     = 8 // of /metrics at a time
	scrapeTimeout  = 20 * time.Second
	headerTimeout  = 5 * time.Second
	requestTimeout = 10 * time.Second
	replyTimeout   = 30 * time.Second // above scrapeTimeout
	idleTimeout    = time.Minute
	maxHeaderBytes = 64 << 10
)

// web serves health, metrics and the state of a node. It reads the parts, and changes none.
type web struct {
	cfg      *config.Config
	boot     transfer.Boot
	version  string
	life     *life
	gather   prometheus.Gatherer
	driver   *driver.Driver
	observer *observer
	conv     *conversation
	dial     *dialer
	rails    *railSet
	gpus     *gpus
	workers  func() []*connector.Worker

	// Set before the first request.
	backends transport.Registry
}

// server makes the HTTP server.
func (w *web) server() *http.Server {
	return &http.Server{Handler: w.handler(), ReadHeaderTimeout: headerTimeout, ReadTimeout: requestTimeout,
		WriteTimeout: replyTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes}
}

// handler serves health, metrics and the node's state.
func (w *web) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(rw http.ResponseWriter, r *http.Request) {
		if why := w.driver.Wedged(r.Context()); why != "" {
			reply(rw, http.StatusServiceUnavailable, why+"\n")
			return
		}
		reply(rw, http.StatusOK, "ok\n")
	})
	mux.HandleFunc("GET /readyz", func(rw http.ResponseWriter, _ *http.Request) {
		switch {
		case w.life.Ready():
			reply(rw, http.StatusOK, "ready\n")
		case w.life.draining.Load():
			reply(rw, http.StatusServiceUnavailable, "draining\n")
		default:
			reply(rw, http.StatusServiceUnavailable, "starting\n")
		}
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(w.gather, promhttp.HandlerOpts{MaxRequestsInFlight: maxScrapes, Timeout: scrapeTimeout}))
	mux.HandleFunc("GET /v1/node", func(rw http.ResponseWriter, _ *http.Request) { replyJSON(rw, w.describe()) })
	mux.HandleFunc("GET /v1/reach", func(rw http.ResponseWriter, _ *http.Request) { replyJSON(rw, w.reach()) })
	mux.HandleFunc("GET /v1/links", func(rw http.ResponseWriter, _ *http.Request) {
		replyJSON(rw,
			w.links())
	})
	mux.HandleFunc("GET /v1/layouts", func(rw http.ResponseWriter, _ *http.Request) { replyJSON(rw, w.layouts()) })
	mux.HandleFunc("GET /debug/state", func(rw http.ResponseWriter, _ *http.Request) { replyJSON(rw, w.state()) })
	return mux
}

func reply(w http.ResponseWriter, code int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(code)
	_, _ = w.Write([]byte(text)) // the client may be gone
}

func replyJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	b := bufio.NewWriter(w)
	e := json.NewEncoder(b)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return
	}
	_ = b.Flush() // the client may be gone
}
