package sidecar

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/route"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/gpu"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// publishEvery is the interval of STATS to engines.
const publishEvery = time.Second

// Bounds for HTTP clients.
const (
	maxScrapes     = 8 // of /metrics at a time
	scrapeTimeout  = 20 * time.Second
	healthTimeout  = 800 * time.Millisecond // for the executor; a kubelet waits a second
	healthInterval = 5 * time.Millisecond   // between checks for it
	headerTimeout  = 5 * time.Second
	requestTimeout = 10 * time.Second
	replyTimeout   = 30 * time.Second // above scrapeTimeout
	idleTimeout    = time.Minute
	maxHeaderBytes = 64 << 10
)

// totals is the content of STATS and /debug/state.
type totals struct {
	bytes     [maxBackends]atomic.Uint64 // landed here, by index of the backend
	mu        sync.Mutex
	transfers map[string]uint64 // protected by mu
}

// landed counts the bytes of an arrived frame. Called by lanes, concurrently.
func (n *Node) landed(l transport.Lane, s *sink, bytes uint64, fresh bool) {
	if e := n.laneOf(l.ID()); e != nil && e.inflow != nil {
		n.came(e.inflow, bytes)
	}
	if !fresh {
		return
	}
	i, _ := n.backendOf(l.Backend())
	s.bytes[i].Add(bytes)
	n.totals.bytes[i].Add(bytes)
	n.metrics.Landed(l.Backend(), l.Local(), bytes)
}

// route names the transport that moved most bytes of a grant's parts, and all transports, and
// counts the bytes.
func (n *Node) route(lands []*exec.ReceivePart) (most, all string, bytes uint64) {
	var moved [maxBackends]uint64
	for _, l := range lands {
		if s, ok := l.Sink.(*sink); ok {
			for i := range moved {
				moved[i] += s.bytes[i].Load()
			}
		}
	}
	var names []string
	for _, b := range n.backends {
		names = append(names, b.Name())
	}
	return routeOf(names, moved[:])
}

// named is route for the executor's counts.
func (n *Node) named(moved []uint64) (most, all string, bytes uint64) {
	return routeOf(n.cfg.Transports.Order, moved)
}

func routeOf(names []string, moved []uint64) (most, all string, bytes uint64) {
	var top uint64
	for i, name := range names {
		if i >= len(moved) || moved[i] == 0 {
			continue
		}
		bytes += moved[i]
		if moved[i] > top {
			most, top = name, moved[i]
		}
		if all != "" {
			all += "+"
		}
		all += name
	}
	return most, all, bytes
}

var causes = map[exec.Cause]string{exec.ByCommit: metrics.CauseCommit, exec.ByCancel: metrics.CauseCancel, exec.ByDeadline: metrics.CauseDeadline,
	exec.ByRefusal: metrics.CauseRefused, exec.BySourceLost: metrics.CauseSourceLost, exec.ByPeerLost: metrics.CausePeerLost,
	exec.ByEngineGone: metrics.CauseEngineGone, exec.ByDrain: metrics.CauseDrain}

// quarantine counts parts whose blocks are withheld from an engine: from the first failure of the
// fence to its acknowledgement.
func (n *Node) quarantine(in *atomic.Bool, err error) {
	if was := in.Swap(err != nil); was != (err != nil) {
		n.metrics.Quarantined(map[bool]int{true: -1, false: 1}[was])
	}
}

func (n *Node) fenceEnded(l *exec.ReceivePart, cause exec.Cause, took time.Duration, err error) {
	if err != nil {
		if n.d.ctx.Err() == nil {
			n.log.Error("fence failed and will be retried; the blocks stay in quarantine", "lease", l.Lease().String(), "err", err)
		}
		return
	}
	n.metrics.Fenced(causes[cause], took)
}

// traceEnd writes a transfer's line. moved counts its bytes, also after a failure.
func (n *Node) traceEnd(a *exec.Action, c *connector.Completion, route string, moved uint64) {
	side := metrics.SideSource
	if c.Received {
		side = metrics.SideDestination
	}
	outcome := metrics.OutcomeOf(c.Status)
	if c.Status == exec.StatusOK {
		moved = c.Bytes
	}
	n.metrics.TransferEnded(side, outcome, c.Transport, moved, c.Took)
	n.totals.mu.Lock()
	if n.totals.transfers == nil {
		n.totals.transfers = map[string]uint64{}
	}
	n.totals.transfers[string(side)+"_"+string(outcome)]++
	n.totals.mu.Unlock()
	t := a.Trace
	if t == nil {
		n.log.Info("lease refused", "side", side, "lease", c.Lease.String(), "reason", c.Reason)
		return
	}
	if !c.Received && c.Status == exec.StatusOK && t.Flag > 0 {
		n.metrics.FlagToCommit(t.Flag)
	}
	r := record{Side: string(side), Outcome: string(outcome), Xfer: t.Key.Xfer.String(), Hash: hex.EncodeToString(t.Key.Hash[:8]), Req: t.Req,
		Source: t.Source.String(), Dest: t.Dest.String(), Peer: t.Peer.String(), Slot: uint32(t.Slot), Gen: uint32(t.Gen), Route: route, Bytes: c.Bytes,
		Grants: t.Grants, QueueUS: t.Queue.Microseconds(), WireUS: t.Wire.Microseconds(), CommitUS: t.Commit.Microseconds(),
		TookUS: c.Took.Microseconds(), Reason: c.Reason}
	if !c.Received {
		r.FlagUS, r.Early = t.Flag.Microseconds(), t.BytesBefore
	}
	level := slog.LevelInfo
	if c.Status != exec.StatusOK && c.Status != exec.StatusCancelled {
		level = slog.LevelWarn
	}
	if n.log.Enabled(context.Background(), level) {
		n.log.Log(context.Background(), level, "transfer", "side", r.Side, "outcome", r.Outcome, "xfer", r.Xfer, "hash", r.Hash, "req", r.Req,
			"source", r.Source, "dest", r.Dest, "peer", r.Peer, "slot", r.Slot, "gen", r.Gen, "route", r.Route, "bytes", r.Bytes, "grants", r.Grants,
			"queue_us", r.QueueUS, "wire_us", r.WireUS, "commit_us", r.CommitUS, "flag_us", r.FlagUS, "took_us", r.TookUS,
			"early_bytes", r.Early, "reason", r.Reason)
	}
	n.records.write(r)
}

// record is one line of trace.transfers.
type record struct {
	Side     string `json:"side"`
	Outcome  string `json:"outcome"`
	Xfer     string `json:"xfer"`
	Hash     string `json:"hash"`
	Req      string `json:"req,omitempty"`
	Source   string `json:"source"`
	Dest     string `json:"dest"`
	Peer     string `json:"peer"`
	Slot     uint32 `json:"slot"`
	Gen      uint32 `json:"gen"`
	Route    string `json:"route,omitempty"`
	Bytes    uint64 `json:"bytes"`
	Early    uint64 `json:"early_bytes,omitempty"` // source: bytes confirmed before the last step's flag
	Grants   int    `json:"grants"`
	QueueUS  int64  `json:"queue_us"`
	WireUS   int64  `json:"wire_us"`
	CommitUS int64  `json:"commit_us"`
	FlagUS   int64  `json:"flag_us,omitempty"` // source: time from the last flag to the commit
	TookUS   int64  `json:"took_us"`
	Reason   string `json:"reason,omitempty"`
}

// lines appends JSON lines to a file. A nil or empty one writes nothing.
type lines struct {
	mu  sync.Mutex // protects all below
	f   *os.File
	log *slog.Logger
	bad bool
}

func newLines(what, path string, log *slog.Logger) (*lines, error) {
	if path == "" {
		return &lines{}, nil
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("sidecar: %s: %w: let this user write there, or name another path", what, err)
	}
	return &lines{f: f, log: log}, nil
}

func (l *lines) on() bool { return l.f != nil }

// put writes whole lines in one call, so that readers never see half a batch between lines of
// others.
func (l *lines) put(all ...any) {
	if !l.on() {
		return
	}
	var b []byte
	for _, v := range all {
		j, err := json.Marshal(v)
		if err != nil {
			continue
		}
		b = append(append(b, j...), '\n')
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, err := l.f.Write(b); err != nil && !l.bad {
		l.bad = true
		l.log.Error("trace file", "path", l.f.Name(), "err", err)
	}
}

// Close closes the file.
func (l *lines) Close() error {
	if !l.on() {
		return nil
	}
	return l.f.Close()
}

type records struct{ *lines }

func newRecords(path string, log *slog.Logger) (*records, error) {
	l, err := newLines("trace.transfers", path, log)
	return &records{l}, err
}

func (r *records) write(v record) {
	if r != nil && r.lines != nil {
		r.put(v)
	}
}

// hashes writes the SHA-256 of every page that a transfer moved, each side from its own memory: the
// receiver at the commit, before its engine receives the result; the sender after the commit of a
// grant, while it still holds the source.
type hashes struct{ *lines }

func newHashes(path string, log *slog.Logger) (*hashes, error) {
	l, err := newLines("trace.block_hashes", path, log)
	return &hashes{l}, err
}

// pageHash is one line of trace.block_hashes. Both sides write the same line, except for Side.
type pageHash struct {
	Side  string `json:"side"`
	Xfer  string `json:"xfer"`
	Hash  string `json:"hash"`
	Dest  string `json:"dest"`  // the destination lease: one source may serve several
	Rank  string `json:"rank"`  // of the source's engine: several may send parts of one page
	Group int    `json:"group"` // cache group; like the following fields, of the receiver
	Layer int    `json:"layer"` // of the group
	Block uint32 `json:"block"` // ordinal in the prompt
	Bytes uint64 `json:"bytes"`
	Sum   string `json:"sha256"`
}

func (h *hashes) received(l *exec.ReceivePart) {
	s, ok := l.Sink.(*sink)
	if h == nil || !h.on() || !ok {
		return
	}
	h.pages(pageHash{Side: string(metrics.SideDestination), Xfer: l.Expect.Key.Xfer.String(), Hash: hex.EncodeToString(l.Expect.Key.Hash[:8]),
		Dest: l.Lease().String(), Rank: l.Part.Rank}, l.Plan.(received).Plan, s.Resolve)
}

func (h *hashes) sent(s *exec.SendPart) {
	if h == nil || !h.on() {
		return
	}
	src, ok := s.Source.(*source)
	if !ok {
		return
	}
	h.pages(pageHash{Side: string(metrics.SideSource), Xfer: s.Key.Xfer.String(), Hash: hex.EncodeToString(s.Key.Hash[:8]),
		Dest: s.Dest.String(), Rank: s.Worker.Place.Rank()}, s.Plan.(*parseblock.Plan), src.Resolve)
}

// pages cuts each layer's segment into its pages, which are in token order.
func (h *hashes) pages(line pageHash, plan *parseblock.Plan, resolve func([]mem.Block, transfer.Range) ([]mem.Block, error)) {
	var out []any
	flat := 0
	sp := plan.Space()
	groups := plan.Receiver().Groups
	for gi := range groups {
		for li := range groups[gi].Layers {
			r, bytes := sp.Segment(flat)
			segment := flat
			flat++
			if bytes == 0 {
				continue
			}
			blocks, err := resolve(nil, r)
			if err != nil {
				return
			}
			rd := &blockReader{blocks: blocks}
			for off := uint64(0); off < bytes; {
				block, n := plan.Page(segment, off)
				sum, err := rd.sum(n)
				if err != nil {
					return
				}
				line.Group, line.Layer, line.Block, line.Bytes, line.Sum = gi, li, block, n, hex.EncodeToString(sum)
				out = append(out, line)
				off += n
			}
		}
	}
	h.put(out...)
}

// blockReader reads memory in order.
type blockReader struct {
	blocks []mem.Block
	buf    [64 << 10]byte
}

func (r *blockReader) sum(n uint64) ([]byte, error) {
	h := sha256.New()
	for n > 0 {
		if len(r.blocks) == 0 {
			return nil, fmt.Errorf("page: %d bytes missing", n)
		}
		b := &r.blocks[0]
		k := min(n, b.Len, uint64(len(r.buf)))
		if err := b.Region.ReadAt(r.buf[:k], b.Off); err != nil {
			return nil, err
		}
		_, _ = h.Write(r.buf[:k]) // a hash never fails
		b.Off, b.Len, n = b.Off+k, b.Len-k, n-k
		if b.Len == 0 {
			r.blocks = r.blocks[1:]
		}
	}
	return h.Sum(nil), nil
}

// publish sends the totals to engines.
func (n *Node) publish(ctx context.Context) {
	t := time.NewTicker(publishEvery)
	defer t.Stop()
	var last string
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if len(n.engine.Workers()) == 0 {
			continue
		}
		st := n.stats()
		if s := fmt.Sprint(st); s != last {
			last = s
			n.engine.Publish(st)
		}
	}
}

func (n *Node) stats() connector.Stats {
	st := connector.Stats{Transfers: map[string]uint64{}, Bytes: map[string]uint64{}}
	n.totals.mu.Lock()
	for k, v := range n.totals.transfers {
		st.Transfers[k] = v
	}
	n.totals.mu.Unlock()
	for i, b := range n.backends {
		st.Bytes[b.Name()] = n.totals.bytes[min(i, maxBackends-1)].Load()
	}
	return st
}

func (n *Node) hooks() connector.Hooks {
	m := n.metrics
	side := func(source bool) metrics.Side {
		if source {
			return metrics.SideSource
		}
		return metrics.SideDestination
	}
	return connector.Hooks{
		Session:   m.Sessions,
		Leases:    func(source bool, d int) { m.LeasesOpen(side(source), d) },
		Record:    m.Record,
		Malformed: m.EngineRefused,
	}
}

// handler serves health, metrics and the node's state.
func (n *Node) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {
		if why := n.wedged(r.Context()); why != "" {
			reply(w, http.StatusServiceUnavailable, why+"\n")
			return
		}
		reply(w, http.StatusOK, "ok\n")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		switch {
		case n.Ready():
			reply(w, http.StatusOK, "ready\n")
		case n.draining.Load():
			reply(w, http.StatusServiceUnavailable, "draining\n")
		default:
			reply(w, http.StatusServiceUnavailable, "starting\n")
		}
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(n.gather, promhttp.HandlerOpts{MaxRequestsInFlight: maxScrapes, Timeout: scrapeTimeout}))
	mux.HandleFunc("GET /v1/node", func(w http.ResponseWriter, _ *http.Request) { replyJSON(w, n.describe()) })
	mux.HandleFunc("GET /v1/reach", func(w http.ResponseWriter, _ *http.Request) { replyJSON(w, n.reach()) })
	mux.HandleFunc("GET /v1/links", func(w http.ResponseWriter, _ *http.Request) {
		replyJSON(w,
			n.links())
	})
	mux.HandleFunc("GET /v1/layouts", func(w http.ResponseWriter, _ *http.Request) { replyJSON(w, n.layouts()) })
	mux.HandleFunc("GET /debug/state", func(w http.ResponseWriter, _ *http.Request) { replyJSON(w, n.state()) })
	return mux
}

// wedged returns what blocks the executor, or nothing: within healthTimeout its lock becomes free,
// and the goroutine that performs its actions finishes a batch.
func (n *Node) wedged(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	t := time.NewTicker(healthInterval)
	defer t.Stop()
	var first uint64
	why := "the executor's lock is held"
	for seen := false; ; {
		if d := &n.d; d.mu.TryLock() {
			performing, rounds := d.performing, d.rounds
			d.mu.Unlock()
			if !performing || seen && rounds != first {
				return ""
			}
			first, seen, why = rounds, true, "an action of the executor has not ended"
		}
		select {
		case <-ctx.Done():
			return fmt.Sprintf("wedged: %s, for %v", why, healthTimeout)
		case <-t.C:
		}
	}
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

// nodeView is the description for routers.
type nodeView struct {
	Node       string   `json:"node"`
	Boot       string   `json:"boot"`
	Version    string   `json:"version"`
	Endpoint   string   `json:"endpoint"`
	Transports []string `json:"transports"`
	Sessions   []string `json:"sessions"` // registered engine workers
	Ready      bool     `json:"ready"`
	Draining   bool     `json:"draining"`
}

func (n *Node) describe() nodeView {
	v := nodeView{Node: n.cfg.Node, Boot: n.boot.String(), Version: n.version, Endpoint: n.Endpoint(), Transports: n.names(), Sessions: []string{},
		Ready: n.Ready(), Draining: n.draining.Load()}
	for _, w := range n.engine.Workers() {
		v.Sessions = append(v.Sessions, w.Name)
	}
	return v
}

type laneView struct {
	Lane      uint64 `json:"lane"`
	Peer      string `json:"peer"`
	Transport string `json:"transport"`
	Local     string `json:"local"`
	Remote    string `json:"remote"`
}

// nonsense returns counts of protocol violations by peers, for metrics.
func (n *Node) nonsense() map[string]uint64 {
	n.d.mu.Lock()
	defer n.d.mu.Unlock()
	if n.d.ex == nil {
		return nil
	}
	return n.d.ex.Violations()
}

// refusals counts the refused grants of peers, by reason, for metrics.
func (n *Node) refusals() map[string]uint64 {
	n.d.mu.Lock()
	defer n.d.mu.Unlock()
	if n.d.ex == nil {
		return nil
	}
	return n.d.ex.Refusals()
}

// railSamples returns the scheduler's state of each rail, for metrics.
func (n *Node) railSamples() (out []metrics.RailSample) {
	n.d.mu.Lock()
	var rails []spray.RailView
	if n.d.ex != nil {
		rails = n.d.ex.Rails(n.now())
	}
	n.d.mu.Unlock()
	for _, r := range rails {
		c := &r.Counters
		pairs := map[string]float64{}
		for state, k := range r.States {
			pairs[state] = float64(k)
		}
		out = append(out, metrics.RailSample{Transport: r.Transport, Rail: r.Local, Pairs: pairs, InFlight: float64(r.InFlight),
			Window: float64(r.Window), Suspicions: float64(c.Suspicions), Up: n.linkUp(r.Transport, r.Local),
			Slices: map[string]float64{"confirmed": float64(c.Confirmed), "superseded": float64(c.Superseded), "failed": float64(c.Failed),
				"refused": float64(c.Refused), "lost": float64(c.Lost), "dropped": float64(c.Dropped)},
			Rate: r.Rate, Error: r.Error, Hedges: float64(c.Hedges), Exclusions: float64(c.Exclusions), Readmissions: float64(c.Readmissions),
			Retries: map[string]float64{"failed": float64(c.Failed), "refused": float64(c.Refused), "lost": float64(c.Lost),
				"silence": float64(c.Doubled), "timeout": float64(c.TimedOut)},
			Probes: map[string]float64{"ok": float64(c.ProbesPassed), "failed": float64(c.ProbesFailed)}})
	}
	return out
}

// linkSamples returns the state of each link between host memory and a GPU, for metrics.
func (n *Node) linkSamples() (out []metrics.LinkSample) {
	for _, p := range n.gpus.linkStates() {
		for _, l := range p.Links {
			out = append(out, metrics.LinkSample{GPU: p.GPU, Link: l.GPU, State: l.State, Bytes: float64(l.Bytes), InFlight: float64(l.InFlight),
				Rate: l.Rate, Returned: float64(l.Returned)})
		}
	}
	return out
}

// memorySamples is what this sidecar holds of each GPU, for metrics.
func (n *Node) memorySamples() (out []metrics.MemorySample) {
	for _, m := range n.gpus.memory() {
		out = append(out, metrics.MemorySample{GPU: m.GPU, Limit: float64(m.Limit), Free: float64(m.Free),
			Held: map[string]float64{"staging": float64(m.Staging), "pipelines": float64(m.Pipelines), "pinned_host": float64(m.PinnedBytes)}})
	}
	return out
}

// linkUp is 1, or 0 where the link of a rail of ours is known to be down, or the rail is gone.
func (n *Node) linkUp(backend, name string) float64 {
	if r, ok := n.rails.find(backend, name); !ok || r.down {
		return 0
	}
	return 1
}

// stateView is /debug/state.
type stateView struct {
	nodeView
	Leases exec.View         `json:"leases"`
	Lanes  []laneView        `json:"lanes"`
	Totals connector.Stats   `json:"totals"`
	Peers  map[string]string `json:"peers"` // boot to the address at which this node reached it; empty if it connected to this node
	// Claimed is the endpoint that each of the latter announced. By boot.
	Claimed map[string]string `json:"claimed"`
	// Releases are the versions of peers. By boot.
	Releases map[string]string `json:"releases"`
	Rails    []railView        `json:"our_rails"`
	// Links are the paths of large copies between host memory and each GPU.
	Links []gpu.PathState `json:"gpu_links"`
	// Executors are the copy methods for scattered blocks of a GPU, with their bytes.
	Executors []gpu.WayState `json:"gpu_executors"`
	// Control lanes to each peer, each as its two addresses. By boot.
	Control map[string][]string `json:"control"`
	// Routes are the paths to each peer, best first, with the reason for each unused one. By boot.
	Routes map[string][]route.Candidate `json:"routes"`
}

func (n *Node) state() stateView {
	v := stateView{nodeView: n.describe(), Links: n.gpus.linkStates(),
		Executors: n.gpus.executorStates(), Totals: n.stats(), Peers: map[string]string{},
		Claimed: map[string]string{}, Releases: map[string]string{}, Rails: n.railViews(),
		Routes:  map[string][]route.Candidate{},
		Control: map[string][]string{}}
	now := n.enter()
	v.Leases = n.d.ex.View(now)
	n.leave()
	n.d.bindMu.RLock()
	for id, e := range n.d.lanes {
		v.Lanes = append(v.Lanes, laneView{id, e.lane.Peer().String(), e.lane.Backend(), e.lane.Local(), e.lane.Remote()})
	}
	n.d.bindMu.RUnlock()
	n.dial.mu.Lock()
	for b, r := range n.dial.peers {
		v.Peers[b.String()] = r.endpoint
		v.Releases[b.String()] = r.release
		if r.endpoint == "" {
			v.Claimed[b.String()] = r.claimed
		}
		v.Routes[b.String()] = n.routes(r)
		v.Control[b.String()] = n.peers.Lanes(b)
	}
	n.dial.mu.Unlock()
	return v
}
