// SPDX-License-Identifier: Apache-2.0

// Package proxy is a small OpenAI-compatible router for prefill and decode engines.
//
// It sends each request to one prefill engine (P) and one decode engine (D), either to both at once
// or to P first, with the kv_transfer_params of kvspray connectors and NIXL-style connectors. It
// streams D's answer to the client byte by byte. If the router cannot split a request, or P fails,
// D serves it alone: the client sees a slower answer, never an error of the router.
//
// Invariants: a client's kv_transfer_params never reach an engine. Bodies, answers of P, requests
// in flight and retries are bounded. No byte of D's answer is sent twice. When the client
// disconnects, both engines' requests are canceled.
//
// Goroutines: Watch owns one health checker per back end, one asker of each sidecar, and one feed
// of KV events per engine that has them, and joins them; Serve owns the HTTP server. Each request
// owns at most one goroutine for P and one for D's first byte, and joins both before its handler
// returns.
package proxy

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

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
)

// Bounds and times. Bytes and durations.
const (
	DefaultBodyBytes = 32 << 20
	maxPrefillAnswer = 16 << 20
	maxInFlight      = 4096 // requests
	decodeTries      = 2    // back ends tried for one request
	healthEvery      = time.Second
	healthTimeout    = 2 * time.Second
	sidecarTimeout   = 2 * time.Second
	leavingFor       = 30 * time.Second // as the sidecar's mark lasts without a renewal
	downAfter        = 2                // health checks in a row
	dialTimeout      = 3 * time.Second
	headerTimeout    = 10 * time.Second // to read a client's header
	bodyTimeout      = 60 * time.Second // to read a client's body
	clientIdle       = 2 * time.Minute  // between two requests of a client's connection
	// below the 5 s of vLLM's server, because a POST on a connection that the server closes cannot
	// be repeated.
	backendIdle        = 4 * time.Second
	shutdownTimeout    = 30 * time.Second
	keptIdlePerBackend = 256
	maxFanout          = 16 // grants that one intent can serve, docs/protocol.md section 2
)

// Prefill names one prefill engine.
type Prefill struct {
	URL  string // of the engine's API server
	Peer string // host:port of its sidecar for peers; empty: ask Sidecar
	// URL of its sidecar's HTTP listener: the source of an empty Peer, and the check of a set one
	Sidecar string
}

// Config configures a Proxy.
type Config struct {
	Prefill   []Prefill
	Decode    []string // URLs
	Mode      Mode
	BodyBytes int64 // largest body of a client; 0: DefaultBodyBytes
	// Policy is one of Policies; empty: DefaultPolicy. The fields below it are for the others.
	Policy         string
	DecodeSidecars []string // URLs of their HTTP listeners, one for each decode engine, or none
	PrefillEvents  []Events // one for each prefill engine, or none
	DecodeEvents   []Events // one for each decode engine, or none
	TokenBytes     float64  // of KV cache; 0: 131072
	// Replicate is how many requests in flight at each engine that has a prefix make another engine
	// get it; 0: DefaultReplicate, negative: never.
	Replicate   int
	Calibration *placement.Calibration
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
	log     *slog.Logger
	prefill *pool
	decode  *pool
	client  *http.Client
	met     *metrics
	reg     *prometheus.Registry
	slots   chan struct{}   // bounds requests in flight
	placing *placing        // nil: the least loaded engines
	spans   *spans.Recorder // nil: off
	share   float64         // TraceShare

	reporters reporters // nil: no engine has KV events
	tokens    *tokenizer
}

// New checks the configuration. It starts nothing.
func New(cfg Config) (*Proxy, error) {
	if cfg.Mode == "" {
		cfg.Mode = Concurrent
	}
	if cfg.Mode != Concurrent && cfg.Mode != PrefillFirst {
		return nil, fmt.Errorf("proxy: mode %q is not one of %s, %s", cfg.Mode, Concurrent, PrefillFirst)
	}
	if len(cfg.Decode) == 0 {
		return nil, errors.New("proxy: no decode engine; pass --decode the URL of at least one")
	}
	p := &Proxy{mode: cfg.Mode, limit: cfg.BodyBytes, log: cfg.Log, reg: cfg.Registry,
		slots: make(chan struct{}, maxInFlight)}
	if p.limit <= 0 {
		p.limit = DefaultBodyBytes
	}
	if p.log == nil {
		p.log = slog.New(slog.DiscardHandler)
	}
	if p.reg == nil {
		p.reg = prometheus.NewRegistry()
	}
	p.met = newMetrics(p.reg)
	p.client = &http.Client{
		Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: dialTimeout}).DialContext,
			MaxIdleConnsPerHost: keptIdlePerBackend,
			IdleConnTimeout:     backendIdle,
			DisableCompression:  true, // bytes pass through unchanged
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	var pre []*backend
	for i, b := range cfg.Prefill {
		u, err := baseURL("--prefill", b.URL)
		if err != nil {
			return nil, err
		}
		be := &backend{role: rolePrefill, number: i, url: u, configured: b.Peer != "", peer: b.Peer}
		if b.Sidecar != "" {
			if be.sidecar, err = baseURL("--prefill-sidecar", b.Sidecar); err != nil {
				return nil, err
			}
		}
		if b.Peer != "" {
			if err := hostPort(b.Peer); err != nil {
				return nil, fmt.Errorf("proxy: --prefill-peer %q: %w; write host:port, the sidecar's "+
					"peer.listen", b.Peer, err)
			}
		}
		if cfg.Mode == Concurrent && b.Peer == "" && b.Sidecar == "" {
			return nil, fmt.Errorf("proxy: prefill %d (%s): concurrent dispatch needs the endpoint of P's "+
				"sidecar; "+
				"pass --prefill-peer host:port or --prefill-sidecar URL, or use --mode %s", i, b.URL,
				PrefillFirst)
		}
		pre = append(pre, be)
	}
	var dec []*backend
	if n := len(cfg.DecodeSidecars); n != 0 && n != len(cfg.Decode) {
		return nil, fmt.Errorf("proxy: --decode-sidecar names %d sidecars for %d decode engines; pass "+
			"one for each, in the same order", n, len(cfg.Decode))
	}
	for i, raw := range cfg.Decode {
		u, err := baseURL("--decode", raw)
		if err != nil {
			return nil, err
		}
		be := &backend{role: roleDecode, number: i, url: u}
		if len(cfg.DecodeSidecars) > 0 {
			if be.sidecar, err = baseURL("--decode-sidecar", cfg.DecodeSidecars[i]); err != nil {
				return nil, err
			}
		}
		dec = append(dec, be)
	}
	twins := same(pre, dec)
	rep, err := reports(&cfg)
	if err != nil {
		return nil, err
	}
	if p.placing, err = newPlacing(cfg, rep, twins, p.reg); err != nil {
		return nil, err
	}
	if err := p.trace(&cfg); err != nil {
		return nil, err
	}
	p.prefill, p.decode = newPool(pre), newPool(dec)
	if p.reporters = p.newReporters(&cfg); p.reporters != nil {
		p.tokens = newTokenizer(len(dec), p.reg)
		p.reg.MustRegister(collector{p})
	}
	return p, nil
}

// same finds the engines that are in both lists, and makes them twins; nil: none.
func same(pre, dec []*backend) []int {
	var list []int
	for i, d := range dec {
		for j, p := range pre {
			if p.url == d.url && !slices.Contains(list, j) {
				if list == nil {
					list = slices.Repeat([]int{-1}, len(dec))
				}
				list[i] = j
				p.twin, d.twin = d, p
				break
			}
		}
	}
	return list
}

// hostPort checks an address for dialing.
func hostPort(addr string) error {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return err
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("port %q is not a number of 1 to 65535", port)
	}
	if host == "" {
		return errors.New("the host is missing")
	}
	return nil
}

func baseURL(flag, raw string) (string, error) {
	u, err := url.Parse(raw)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.RawQuery != "" {
		return "", fmt.Errorf("proxy: %s %q is not a URL; write for instance http://127.0.0.1:8100", flag,
			raw)
	}
	return strings.TrimRight(u.String(), "/"), nil
}

// Routes that a decode engine serves unchanged.
var passed = []string{"GET /v1/models", "GET /version", "POST /tokenize", "POST /detokenize"}

// The other routes.
const (
	routeCompletions = "POST /v1/completions"
	routeChat        = "POST /v1/chat/completions"
	routeHealth      = "GET /health"
	routeMetrics     = "GET /metrics"
)

// served lists the routes for the error about an unknown one.
var served = append([]string{routeCompletions, routeChat, routeHealth, routeMetrics}, passed...)

//go:embed page.html
var pageHTML string

//go:embed page.js
var pageScript string

// Handler returns the routes, and a page at /. Health is only known while Serve or Watch runs.
func (p *Proxy) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc(routeCompletions, func(w http.ResponseWriter, r *http.Request) {
		p.generate(w, r,
			kindCompletion)
	})
	mux.HandleFunc(routeChat, func(w http.ResponseWriter, r *http.Request) {
		p.generate(w, r,
			kindChat)
	})
	for _, route := range passed {
		mux.HandleFunc(route, p.pass)
	}
	mux.HandleFunc(routeHealth, p.health)
	mux.Handle(routeMetrics, promhttp.HandlerFor(p.reg, promhttp.HandlerOpts{}))
	page.Handle(mux, pageHTML, pageScript)
	return p.orRefuse(mux)
}

// Watch checks the health of all back ends, and follows their KV events, until ctx ends.
func (p *Proxy) Watch(ctx context.Context) {
	p.spans.Start()
	defer func() { _ = p.spans.Close() }() // it returns no error
	var wg sync.WaitGroup
	for _, set := range []*pool{p.prefill, p.decode} {
		for _, b := range set.all {
			asked := make(chan struct{})
			if b.sidecar == "" {
				close(asked)
			} else {
				wg.Go(func() { p.watchSidecar(ctx, b, asked) })
			}
			wg.Go(func() { p.watch(ctx, b, asked) })
		}
	}
	for _, r := range p.reporters {
		if r != nil {
			wg.Go(func() { r.feed.Run(ctx) })
		}
	}
	wg.Wait()
	p.client.CloseIdleConnections()
}

// Serve runs the proxy on a listener until ctx ends, then lets requests in flight finish for a
// while.
func (p *Proxy) Serve(ctx context.Context, l net.Listener) error {
	watching, stopWatching := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { p.Watch(watching) })
	defer wg.Wait()
	defer stopWatching()

	srv := &http.Server{
		Handler:           p.Handler(),
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       clientIdle,
		ErrorLog:          slog.NewLogLogger(p.log.Handler(), slog.LevelWarn),
	}
	failed := make(chan error, 1)
	wg.Go(func() { failed <- srv.Serve(l) })
	select {
	case err := <-failed:
		return fmt.Errorf("proxy: serve on %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	err := srv.Shutdown(stop)
	if err != nil {
		err = errors.Join(err, srv.Close())
	}
	if serr := <-failed; !errors.Is(serr, http.ErrServerClosed) {
		err = errors.Join(err, serr)
	}
	return err
}
