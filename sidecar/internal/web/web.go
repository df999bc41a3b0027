// Package web serves a sidecar's HTTP port: health, metrics, state, and a page that shows it. It
// reads the parts of a node. It also serves the admin socket, where processes of permitted users
// drain the store, remove namespaces and mark the node as one that leaves. No goroutines.
package web

import (
	"bufio"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/route"
	"github.com/kvspray/kvspray/gpu"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/httpgate"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/page"
	"github.com/kvspray/kvspray/transfer"
)

// Bounds for HTTP clients.
const (
	maxScrapes    = 8 // of /metrics at a time
	scrapeTimeout = 20 * time.Second
	replyTimeout  = 30 * time.Second // above scrapeTimeout, and those of calls
)

// Options are what a server reads. All fields are required.
type Options struct {
	Node, Version string
	Hosts         []string // names of this host in requests, besides localhost; *.PARENT: all below it
	AdminUIDs     []uint32 // users besides root and this process's own that may change the node
	Log           *slog.Logger
	Boot          transfer.Boot
	Gather        prometheus.Gatherer
	Driver        *driver.Driver
	Life          Life
	Peers         Peers
	Rails         func() []nodeapi.Rail
	Totals        func() nodeapi.Totals
	Links         func() []gpu.PathState
	Executors     func() []policy.RouteState
	Workers       func() []*engines.Worker
	Transports    func() []string
	Store         func() *nodeapi.Store // nil: the node has none
	StoreCalls    func() StoreCalls     // likewise
	Problems      func() []string       // for Node.Problems
	Health        func() nodeapi.Health // for Node.Health
	SetRole       func(engine, role string) error
	Recent        func() []nodeapi.Record
	Order         []string // transports.order
	// Find lists the records that fit, newest first, and the time since which all are kept.
	Find func(fits func(*nodeapi.Record) bool) ([]nodeapi.Record, time.Time)
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

// Server serves the HTTP port and the admin socket.
type Server struct {
	o       Options
	self    uint32        // this process's user
	hosts   []string      // names of this host, in lower case; *.PARENT: all below it
	streams chan struct{} // a token for each open stream of the page
	refused admit.Log     // of events that strangers can cause
}

// New makes a server.
func New(o Options) *Server {
	w := &Server{o: o, self: uint32(os.Getuid()), streams: make(chan struct{}, maxStreams),
		refused: admit.Log{Logger: o.Log}, hosts: []string{"localhost"}}
	for _, h := range o.Hosts {
		w.hosts = append(w.hosts, strings.ToLower(strings.TrimSuffix(h, ".")))
	}
	return w
}

func (w *Server) failed(err error) { w.refused.Note(slog.LevelWarn, "http: accept", "err", err) }

// Port makes the server of the HTTP port, where every request only reads.
func (w *Server) Port() *httpgate.Server {
	return httpgate.New(httpgate.Options{Handler: readsOnly(w.forHost(w.handler())),
		ReplyTimeout: replyTimeout, Failed: w.failed})
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
		replyJSON(rw, w.describe())
	})
	mux.HandleFunc("GET /v1/reach", func(rw http.ResponseWriter, _ *http.Request) {
		replyJSON(rw, w.Reach())
	})
	mux.HandleFunc("GET /v1/links", func(rw http.ResponseWriter, _ *http.Request) {
		replyJSON(rw, w.links())
	})
	mux.HandleFunc("GET /v1/layouts", func(rw http.ResponseWriter, _ *http.Request) {
		replyJSON(rw, w.layouts())
	})
	mux.HandleFunc("GET /v1/store", func(rw http.ResponseWriter, _ *http.Request) {
		st := w.o.Store()
		if st == nil {
			reply(rw, http.StatusNotFound, noStore)
			return
		}
		replyJSON(rw, st)
	})
	mux.HandleFunc("GET /v1/requests", w.requests)
	mux.HandleFunc("GET /v1/live", w.stream)
	page.Handle(mux, pageHTML, pageScript)
	mux.HandleFunc("GET /debug/state", func(rw http.ResponseWriter, _ *http.Request) {
		replyJSON(rw, w.State())
	})
	return mux
}

// readsOnly refuses requests that change something: the port has no authentication, and no header
// or address proves the sender, because proxies on this host forward requests of others.
func readsOnly(serve http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			rw.Header().Set("Allow", "GET, HEAD")
			reply(rw, http.StatusMethodNotAllowed, "the port only reads: 'kvspray drain' and 'kvspray "+
				"store' change the sidecar through a socket beside that of its engines\n")
			return
		}
		serve.ServeHTTP(rw, r)
	})
}

// forHost refuses requests that do not name this host. Otherwise a web page whose name resolves to
// this host (DNS rebinding) could read the port through a browser. A page cannot do this with an IP
// address, and every browser sends a host.
func (w *Server) forHost(serve http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if !w.named(r.Host) {
			reply(rw, http.StatusForbidden, fmt.Sprintf("%.100q is not a name of this sidecar: use its "+
				"address, or add the name to http.hosts of its configuration\n", r.Host))
			return
		}
		serve.ServeHTTP(rw, r)
	})
}

// named reports whether host, with or without a port, is this sidecar.
func (w *Server) named(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	}
	if _, err := netip.ParseAddr(name); err == nil || name == "" {
		return true
	}
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	return slices.Contains(w.hosts, name) || slices.ContainsFunc(w.hosts, func(h string) bool {
		parent, all := strings.CutPrefix(h, "*")
		return all && strings.HasSuffix(name, parent)
	})
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
