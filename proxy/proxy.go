// Package proxy is a small OpenAI-compatible router for prefill and decode engines.
//
// It sends each request to one prefill engine (P) and one decode engine (D), either to both at once
// or to P first, with the kv_transfer_params of kvspray connectors and NIXL-style connectors. It
// streams D's answer to the client byte by byte. If the router cannot split a request, or P fails,
// D serves it alone: the client sees a slower answer, never an error of the router. An engine that
// fails, is slow or silent before the client has a byte is replaced by a better one. With
// Config.Continue, another engine continues a stream that breaks, from its token ids.
//
// Invariants: a client's kv_transfer_params never reach an engine. Bodies, answers of P, requests
// in flight, connections and retries are bounded. The client gets each byte of D's answer once, and
// an answer that breaks never looks complete. When the client disconnects, the router cancels the
// requests of both engines. What P keeps for a D that fails is released.
//
// Goroutines: Watch owns one health checker per back end, one asker of each sidecar, one feed of KV
// events per engine that has them, and the senders of releases to each prefill engine, and joins
// them; Serve owns the HTTP server and joins its requests. Each request owns at most one
// goroutine for P and one guard for each of its engines, and joins them before its handler returns.
package proxy

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/page"
	"github.com/kvspray/kvspray/internal/spans"
	"github.com/kvspray/kvspray/placement"
)

// Mode is the order in which P and D receive a request.
type Mode string

// The modes.
const (
	// Concurrent dispatches P and D at once: the transfer overlaps the prefill. Needs the endpoint
	// of P's sidecar.
	Concurrent Mode = "concurrent"
	// PrefillFirst sends a request to P, waits for its answer, and passes P's kv_transfer_params to
	// D, like NIXL-style routers.
	PrefillFirst Mode = "prefill-first"
	modePassed   Mode = "passed" // of requests without a prompt, in metrics
)

// Bounds and times. Bytes and durations.
const (
	maxPrefillAnswer = 16 << 20
	maxInFlight      = 4096 // requests
	checkEvery       = time.Second
	sidecarTimeout   = 2 * time.Second
	dialTimeout      = 3 * time.Second
	headerTimeout    = 10 * time.Second // to read a client's header
	maxHeader        = 64 << 10         // bytes
	writeTimeout     = 2 * time.Minute  // for a part of an answer, to a client that does not read
	bodyTimeout      = 60 * time.Second // to read a client's body
	bodyIdle         = 10 * time.Second // between two parts of it
	clientIdle       = 2 * time.Minute  // between two requests of a client's connection
	// below the 5 s of vLLM's server, because a POST on a connection that the server closes cannot
	// be repeated.
	backendIdle        = 4 * time.Second
	keptIdlePerBackend = 256
	maxFanout          = 16 // grants that one intent can serve, docs/protocol.md section 2
)

// Times are those of a router, as config.Router describes them; 0: its default.
type Times struct {
	Check                                   time.Duration // between two health checks; 0: 1 s
	Slow, Silent, Prefill, FirstByte, Drain time.Duration
}

func (t Times) orDefaults() Times {
	d := config.DefaultRouter()
	return Times{cmp.Or(t.Check, checkEvery), cmp.Or(t.Slow, d.SlowAfter.D()),
		cmp.Or(t.Silent, d.SilentAfter.D()), cmp.Or(t.Prefill, d.PrefillTimeout.D()),
		cmp.Or(t.FirstByte, d.FirstByteTimeout.D()), cmp.Or(t.Drain, d.DrainTimeout.D())}
}

// Engine names one engine in one role.
type Engine struct {
	URL string // of the engine's API server
	// URL of its sidecar's HTTP listener: the source of an empty Peer, and the check of a set one
	Sidecar string
	Peer    string // of a prefill engine: host:port of its sidecar for peers; empty: ask Sidecar
	Events  string // endpoint of its KV events, tcp://host:port; empty: none
	Replay  string // of its replay of KV events; empty: none
	found   bool   // by discovery: it gets no request before its models are known
}

// Config configures a Proxy.
type Config struct {
	Prefill []Engine
	Decode  []Engine // an engine in both lists is one engine to a policy
	Fleet   Fleet    // engines besides these; nil: none
	// Allow has the hosts that members of Fleet may name besides their own: networks, addresses, and
	// names, of which "*.x" stands for all below x.
	Allow     []string
	Mode      Mode
	BodyBytes int64 // largest body of a client; 0: the default of config.Router, as below
	// BodiesBytes bounds the bodies of all requests in flight together, with their copies.
	BodiesBytes int64
	Times       Times
	// Policy is one of Policies; empty: DefaultPolicy. The fields below it are for the others.
	Policy     string
	TokenBytes float64 // of KV cache; 0: 131072
	// Replicate is how many requests in flight at each engine that has a prefix make another engine
	// get it; 0: the default, negative: never.
	Replicate   int
	Calibration *placement.Calibration
	// MaxPin bounds the time for which a client's hint keeps pages in the store; 0: none does.
	MaxPin time.Duration
	// Continue lets another engine continue a streamed answer whose engine fails.
	Continue bool
	// OTLP is the URL of a collector of spans; empty: off. They are sent while Watch or Serve runs.
	OTLP string
	// TraceShare of the requests without a traceparent of their own are traced; 0: all.
	TraceShare float64
	Version    string // of the router, for spans
	Log        *slog.Logger
	Registry   *prometheus.Registry // nil: its own
}

// Proxy routes requests. Use Handler in another server, or Serve.
type Proxy struct {
	mode    Mode
	limit   int64
	bodies  budget
	times   Times
	log     *slog.Logger
	unsent  admit.Log // releases: there can be one for each request
	prefill pool
	decode  pool
	client  *http.Client
	met     *metrics
	reg     *prometheus.Registry
	slots   chan struct{}   // bounds requests in flight
	placing *placing        // nil: the least loaded engines
	spans   *spans.Recorder // nil: off
	share   float64         // TraceShare
	maxPin  time.Duration
	follows bool // Config.Continue

	tokens *tokenizer // nil: no policy
	routed routed

	changed chan struct{} // has a value after a change of members

	discovery *discovery // nil: none

	mu      sync.Mutex // guards all below
	members []*member
}

// New checks the configuration. It starts nothing.
func New(cfg Config) (*Proxy, error) {
	if cfg.Mode = cmp.Or(cfg.Mode, Concurrent); cfg.Mode != Concurrent && cfg.Mode != PrefillFirst {
		return nil, fmt.Errorf("proxy: mode %q is not one of %s, %s", cfg.Mode, Concurrent, PrefillFirst)
	}
	defaults := config.DefaultRouter()
	p := &Proxy{mode: cfg.Mode, limit: cmp.Or(max(cfg.BodyBytes, 0), int64(defaults.MaxBody)),
		log: cmp.Or(cfg.Log, slog.New(slog.DiscardHandler)),
		reg: cmp.Or(cfg.Registry, prometheus.NewRegistry()), times: cfg.Times.orDefaults(),
		maxPin: cfg.MaxPin, follows: cfg.Continue,
		slots: make(chan struct{}, maxInFlight), changed: make(chan struct{}, 1)}
	p.unsent.Logger = p.log
	p.bodies.give(cmp.Or(cfg.BodiesBytes, int64(defaults.MaxBodies)))
	p.met = newMetrics(p.reg)
	p.client = &http.Client{
		Transport: &http.Transport{
			DialContext:         p.dial,
			MaxIdleConnsPerHost: keptIdlePerBackend,
			IdleConnTimeout:     backendIdle,
			DisableCompression:  true, // bytes pass through unchanged
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	var err error
	if p.placing, err = newPlacing(cfg, p.reg); err != nil {
		return nil, err
	}
	if err := p.trace(&cfg); err != nil {
		return nil, err
	}
	if p.placing != nil {
		p.tokens = newTokenizer(p.reg)
		p.reg.MustRegister(collector{p})
	}
	if cfg.Fleet != nil {
		p.discovery = &discovery{p: p, fleet: cfg.Fleet, wake: make(chan struct{}, 1)}
		if p.discovery.allow, err = parseHosts(cfg.Allow); err != nil {
			return nil, err
		}
	}
	return p, p.SetEngines(cfg.Prefill, cfg.Decode)
}

// Routes that a decode engine serves unchanged.
var passed = []string{"GET /version", "POST /tokenize", "POST /detokenize",
	"POST /v1/messages/count_tokens"}

// The other routes.
const (
	routeCompletions = "POST /v1/completions"
	routeChat        = "POST /v1/chat/completions"
	routeResponses   = "POST /v1/responses"
	routeMessages    = "POST /v1/messages"
	routeHealth      = "GET /health"
	routeMetrics     = "GET /metrics"
	routeRequests    = "GET /v1/requests"
	routeModels      = "GET /v1/models"
)

// served lists the routes for the error about an unknown one.
var served = append([]string{routeCompletions, routeChat, routeResponses, routeMessages,
	routeModels, routeHealth, routeMetrics, routeRequests}, passed...)

//go:embed page.html
var pageHTML string

//go:embed page.js
var pageScript string

// Handler returns the routes, and a page at /. Health is only known while Serve or Watch runs.
func (p *Proxy) Handler() http.Handler {
	mux := http.NewServeMux()
	serve := func(route string, k kind) {
		mux.HandleFunc(route, func(w http.ResponseWriter, r *http.Request) { p.serve(w, r, k) })
	}
	serve(routeCompletions, kindCompletion)
	serve(routeChat, kindChat)
	serve(routeResponses, kindResponses)
	serve(routeMessages, kindMessages)
	for _, route := range passed {
		serve(route, kindPassed)
	}
	mux.HandleFunc(routeModels, p.models)
	mux.HandleFunc(routeHealth, p.health)
	mux.Handle(routeMetrics, promhttp.HandlerFor(p.reg, promhttp.HandlerOpts{}))
	mux.HandleFunc(routeRequests, p.requests)
	page.Handle(mux, pageHTML, pageScript)
	return p.orRefuse(mux)
}

// Serve runs the proxy on a listener until ctx ends, then lets requests in flight finish for a
// while and cuts the others. Afterwards the proxy serves nothing.
func (p *Proxy) Serve(ctx context.Context, l net.Listener) error {
	watching, stopWatching := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { p.Watch(watching) })
	defer wg.Wait()
	defer stopWatching()
	defer p.full() // requests that were cut leave releases to the senders
	serving, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()

	limited := newLimitedListener(l, connLimit(max(len(p.backends()), expectedEngines)))
	srv := &http.Server{
		Handler:           p.Handler(),
		BaseContext:       func(net.Listener) context.Context { return serving },
		ConnState:         limited.state,
		ReadHeaderTimeout: headerTimeout,
		MaxHeaderBytes:    maxHeader,
		IdleTimeout:       clientIdle,
		ErrorLog:          slog.NewLogLogger(p.log.Handler(), slog.LevelWarn),
	}
	failed := make(chan error, 1)
	wg.Go(func() { failed <- srv.Serve(limited) })
	select {
	case err := <-failed:
		_ = srv.Close() // the error of the listener is the one that counts
		return fmt.Errorf("proxy: serve on %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	p.log.Info("proxy ends once its requests have ended", "requests", len(p.slots), "within",
		p.times.Drain)
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.times.Drain)
	defer cancel()
	err := srv.Shutdown(stop)
	if errors.Is(err, context.DeadlineExceeded) {
		p.log.Warn("requests were cut because they did not end in time", "requests", len(p.slots),
			"within", p.times.Drain, "remedy", "set a longer drain_timeout")
		err = srv.Close()
	}
	if serr := <-failed; !errors.Is(serr, http.ErrServerClosed) {
		err = errors.Join(err, serr)
	}
	return err
}
