// SPDX-License-Identifier: Apache-2.0

// Package web serves a sidecar's HTTP port: health, metrics, state, and a page that shows it. It
// reads the parts of a node. A process of the same host may change two things: it may have the
// store drained, and mark the node as one that leaves. No goroutines.
package web

import (
	"bufio"
	"encoding/json"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/route"
	"github.com/kvspray/kvspray/gpu"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/page"
	"github.com/kvspray/kvspray/sidecar/internal/trace"
	"github.com/kvspray/kvspray/transfer"
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

// Options are what a server reads. All fields are required.
type Options struct {
	Node, Version string
	Boot          transfer.Boot
	Gather        prometheus.Gatherer
	Driver        *driver.Driver
	Life          Life
	Peers         Peers
	Rails         func() []Rail
	Stats         func() connector.Stats
	Links         func() []gpu.PathState
	Executors     func() []policy.RouteState
	Workers       func() []*engines.Worker
	Transports    func() []string
	Store         func() *Store     // nil: the node has none
	StoreCalls    func() StoreCalls // likewise
	Problems      func() []string   // what an operator has to mend
	Recent        func() []trace.Ended
}

// Life is how far the node has come between its start and its end.
type Life interface {
	Ready() bool
	Draining() bool
	Leaving() time.Duration // how long routers still choose other engines
	Leave(on bool)
	SourceLeases() int
	Endpoint() string
}

// Peers are the peers of the node. Each method reads the current state.
type Peers interface {
	Peers() []Peer
	// Routes are the paths to a peer, best first.
	Routes(boot transfer.Boot) []route.Candidate
	// Trouble is the reason for a missing lane, from the last try to open it.
	Trouble(boot transfer.Boot, c route.Candidate) string
	// ControlLanes are the control lanes to a peer, each as its two addresses.
	ControlLanes(boot transfer.Boot) []string
}

// Peer describes a peer.
type Peer struct {
	Boot     transfer.Boot
	Node     string // its own name
	Release  string
	Endpoint string // address at which this node reached it; empty if it connected to this node
	Claimed  string // endpoint that it announced
	Wanted   bool   // requests need lanes to it
}

// Server serves the HTTP port.
type Server struct {
	o       Options
	streams chan struct{} // a token for each open stream of the page
}

// New makes a server.
func New(o Options) *Server { return &Server{o, make(chan struct{}, maxStreams)} }

// Server makes the HTTP server.
func (w *Server) Server() *http.Server {
	return &http.Server{Handler: w.handler(), ReadHeaderTimeout: headerTimeout,
		ReadTimeout:  requestTimeout,
		WriteTimeout: replyTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes}
}

// handler serves health, metrics and the node's state.
func (w *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(rw http.ResponseWriter, r *http.Request) {
		if why := w.o.Driver.Wedged(r.Context()); why != "" {
			reply(rw, http.StatusServiceUnavailable, why+"\n")
			return
		}
		reply(rw, http.StatusOK, "ok\n")
	})
	mux.HandleFunc("GET /readyz", func(rw http.ResponseWriter, _ *http.Request) {
		switch {
		case w.o.Life.Ready():
			reply(rw, http.StatusOK, "ready\n")
		case w.o.Life.Draining():
			reply(rw, http.StatusServiceUnavailable, "draining\n")
		case len(w.problems()) > 0:
			reply(rw, http.StatusServiceUnavailable, "not ready: "+strings.Join(w.problems(), "; ")+"\n")
		default:
			reply(rw, http.StatusServiceUnavailable, "starting\n")
		}
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(w.o.Gather,
		promhttp.HandlerOpts{MaxRequestsInFlight: maxScrapes, Timeout: scrapeTimeout}))
	mux.HandleFunc("GET /v1/node", func(rw http.ResponseWriter, _ *http.Request) {
		replyJSON(rw,
			w.describe())
	})
	mux.HandleFunc("GET /v1/reach", func(rw http.ResponseWriter, _ *http.Request) {
		replyJSON(rw,
			w.Reach())
	})
	mux.HandleFunc("GET /v1/links", func(rw http.ResponseWriter, _ *http.Request) {
		replyJSON(rw,
			w.links())
	})
	mux.HandleFunc("GET /v1/layouts", func(rw http.ResponseWriter, _ *http.Request) {
		replyJSON(rw,
			w.layouts())
	})
	mux.HandleFunc("POST /v1/leave", ofThisHost(w.leave(true)))
	mux.HandleFunc("DELETE /v1/leave", ofThisHost(w.leave(false)))
	w.storeHandlers(mux)
	mux.HandleFunc("GET /v1/live", w.stream)
	page.Handle(mux, pageHTML, pageScript)
	mux.HandleFunc("GET /debug/state", func(rw http.ResponseWriter, _ *http.Request) {
		replyJSON(rw,
			w.State())
	})
	return mux
}

// leave sets whether routers choose other engines, and answers with the node's description.
func (w *Server) leave(on bool) http.HandlerFunc {
	return func(rw http.ResponseWriter, _ *http.Request) {
		w.o.Life.Leave(on)
		replyJSON(rw, w.describe())
	}
}

// ofThisHost refuses requests of other hosts and of web pages: unlike the others these requests
// change the node, take its time, or name its pages, and the port has no authentication. A
// connection from the address that it leads to is of this host, or of this pod. One that a proxy of
// this host makes is of whoever asked the proxy.
func ofThisHost(serve http.HandlerFunc) http.HandlerFunc {
	return func(rw http.ResponseWriter, r *http.Request) {
		host, _, err := net.SplitHostPort(r.RemoteAddr)
		named, _, err2 := net.SplitHostPort(r.Host)
		own := ""
		if local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
			own, _, _ = net.SplitHostPort(local.String()) // empty: only loopback is of this host
		}
		here := func(h string) bool { return loopback(h) || own != "" && h == own }
		if err != nil || err2 != nil || !here(host) || named != "localhost" && !here(named) ||
			foreign(r.Header) {
			reply(rw, http.StatusForbidden, "this request is served to processes of this host only: run "+
				"kvspray on the sidecar's host, with --http and the address of its http.listen\n")
			return
		}
		serve(rw, r)
	}
}

// foreign reports whether a browser sent the request for a web page, or a proxy for somebody else.
func foreign(h http.Header) bool {
	for _, name := range []string{"Origin", "X-Forwarded-For", "Forwarded"} {
		if len(h.Values(name)) > 0 {
			return true
		}
	}
	return slices.ContainsFunc(h.Values("Sec-Fetch-Site"), func(site string) bool {
		return site != "none" // the user's own: an address that was typed
	})
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
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
