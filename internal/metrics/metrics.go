// Package metrics owns the names, labels and buckets of a sidecar's metrics. Callers get typed
// methods. An undeclared label value becomes "other", so that no peer can add series.
//
// Invariants: all names begin with kvspray_, units are base units, no label carries a request, a
// lease or a peer's boot id. The configured rails and the constants below bound the set of series.
// Safe for concurrent use. No goroutines.
//
//go:generate go run ./gen -out ../../deploy/monitoring
package metrics

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvspray/kvspray/transfer"
)

// Bounds of labels whose values come from configuration or from peers.
const (
	maxRails  = 128
	otherName = "other"

	noTransport = "none"
)

// Side is the side of a transfer that this sidecar had.
type Side string

// The sides.
const (
	SideSource      Side = "source"
	SideDestination Side = "destination"
)

// Outcome is the end of a transfer or lease; the names of enum kvs_status.
type Outcome string

// The outcomes.
const (
	OK       Outcome = "ok"
	Failed   Outcome = "failed"
	Canceled Outcome = "cancelled"
	Expired  Outcome = "expired"
	Refused  Outcome = "refused"
	Lost     Outcome = "lost"
)

// OutcomeOf maps a completion's status (enum kvs_status) to its label.
func OutcomeOf(status uint16) Outcome {
	all := [...]Outcome{OK, Failed, Canceled, Expired, Refused, Lost}
	if int(status) < len(all) {
		return all[status]
	}
	return otherName
}

// Direction of bytes and control messages.
type Direction string

// The directions.
const (
	In  Direction = "in"
	Out Direction = "out"
)

// Set holds the collectors of one sidecar. Tests that start hundreds of sidecars give each its own
// registry.
type Set struct {
	transfers   *prometheus.CounterVec
	bytes       *prometheus.CounterVec
	duration    *prometheus.HistogramVec
	commit      prometheus.Histogram
	railBytes   *prometheus.CounterVec
	railErrors  *prometheus.CounterVec
	railLanes   *prometheus.GaugeVec
	slices      *prometheus.CounterVec
	refused     *prometheus.CounterVec
	leases      *prometheus.GaugeVec
	quarantine  prometheus.Gauge
	fences      *prometheus.CounterVec
	fenceTime   prometheus.Histogram
	control     *prometheus.CounterVec
	hellos      prometheus.Counter
	peers       prometheus.Gauge
	expires     prometheus.Gauge
	sessions    *prometheus.GaugeVec
	records     *prometheus.CounterVec
	copies      *prometheus.CounterVec
	copyBytes   *prometheus.CounterVec
	copyTime    *prometheus.HistogramVec
	registerErr *prometheus.CounterVec
	spans       *prometheus.CounterVec
	draining    prometheus.Gauge

	mu    sync.Mutex
	rails map[string]bool // names with series, at most maxRails
}

// secondsFast spans 50 us to 26 s.
func secondsFast() []float64 { return prometheus.ExponentialBuckets(50e-6, 2, 20) }

// New makes and registers the collectors. It panics if the registry already has them: a programming
// error.
func New(reg prometheus.Registerer) *Set {
	s := &Set{
		rails: map[string]bool{},
		transfers: counters("", "transfers_total", "Transfers that ended.",
			"side", "outcome", "transport"),
		bytes: counters("transfer", "payload_bytes_total", "Payload bytes that landed (destination) or "+
			"were confirmed (source), by how their transfer ended.",
			"side", "outcome", "transport"),
		duration: prometheus.NewHistogramVec(opts("transfer", "duration_seconds", "Time from the start "+
			"of a transfer to its end."),
			[]string{"side", "outcome"}),
		commit: prometheus.NewHistogram(opts("transfer", "flag_to_commit_seconds",
			"Time from the last awaited layer flag of a transfer to its commit, or, if the destination "+
				"has another sidecar, to the commit's receipt at the source.")),
		railBytes: counters("rail", "bytes_total", "Payload bytes over a rail.", "transport", "rail",
			"direction"),
		railErrors: counters("rail", "errors_total", "Lanes lost and slices failed on a rail.",
			"transport", "rail"),
		railLanes: gauges("rail", "lanes", "Lanes that are up.", "transport", "rail"),
		slices: counters("lane", "attempts_total", "Attempts to move a slice, by what their lane "+
			"reports.", "transport", "outcome", "reason"),
		refused: counters("lane", "frames_refused_total", "Discarded frames.", "transport", "reason"),
		leases:  gauges("lease", "open", "Open leases.", "side"),
		quarantine: prometheus.NewGauge(gaugeOpts("lease", "quarantined", "Parts of leases, at either "+
			"end, whose fence has failed and is retried: their blocks are withheld from the engine.")),
		fences: counters("lease", "fences_total", "Fences, by cause.", "cause"),
		fenceTime: prometheus.NewHistogram(opts("lease", "fence_duration_seconds",
			"Time from the revocation of a lease to its last fence acknowledgement.")),
		control: counters("control", "messages_total", "Messages on control lanes.", "direction", "type"),
		expires: prometheus.NewGauge(gaugeOpts("control", "certificate_expiry_timestamp_seconds",
			"Unix time at which the certificate of this node, or its authority, ends; 0: never, or no "+
				"certificate.")),
		hellos: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "kvspray",
			Subsystem: "control", Name: "hellos_refused_total",
			Help: "Refused hellos of sidecars with an incompatible release. " +
				"The log names the sidecar to upgrade."}),
		peers: prometheus.NewGauge(gaugeOpts("control", "peers",
			"Peers with an open control session.")),
		sessions: gauges("engine", "sessions", "Engine sessions.", "role"),
		records:  counters("engine", "records_total", "Records taken from engines.", "type"),
		copies: counters("", "copies_total",
			"Ended copies between two regions of an engine.", "outcome", "method"),
		copyBytes: counters("copy", "bytes_total",
			"Bytes that copies moved, including failed ones.", "method"),
		copyTime: prometheus.NewHistogramVec(opts("copy", "duration_seconds", "Time from an engine's "+
			"request to the end of its copy."),
			[]string{"method"}),
		registerErr: counters("engine", "refusals_total", "Refused connections, messages and records "+
			"of engines.",
			"kind"),
		spans: counters("sidecar", "spans_total", "Spans of transfers, by whether the collector of "+
			"trace.otlp took them (exported) or not (dropped).", "outcome"),
		draining: prometheus.NewGauge(gaugeOpts("sidecar", "draining",
			"1 while new leases are refused.")),
	}
	reg.MustRegister(s.transfers, s.bytes, s.duration, s.commit, s.railBytes, s.railErrors,
		s.railLanes, s.slices, s.refused, s.leases,
		s.quarantine, s.fences, s.fenceTime, s.control, s.hellos, s.peers, s.expires,
		s.sessions, s.records,
		s.copies, s.copyBytes, s.copyTime, s.registerErr, s.spans, s.draining)
	// An alert on the growth of a series misses its first value, so series that should stay at zero
	// start there.
	for _, transport := range transports {
		for r := transfer.ReasonNone + 1; int(r) < transfer.NumReasons; r++ {
			s.refused.WithLabelValues(transport, r.String())
		}
	}
	for kind := range refusedKinds {
		s.registerErr.WithLabelValues(kind)
	}
	s.Spans(true, 0)
	s.Spans(false, 0)
	return s
}

// Build is the version of a program, a sidecar or a router, as the label of a constant.
func Build(version string) prometheus.Collector {
	g := gauges("build", "info", "Version of the program, as its label; the value is 1.", "version")
	g.WithLabelValues(version).Set(1)
	return g
}

var transports = [...]string{"tcp", "shm", "gdr"}

func counters(subsystem, name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "kvspray", Subsystem: subsystem,
		Name: name, Help: help}, labels)
}

func gauges(subsystem, name, help string, labels ...string) *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(gaugeOpts(subsystem, name, help), labels)
}

func gaugeOpts(subsystem, name, help string) prometheus.GaugeOpts {
	return prometheus.GaugeOpts{Namespace: "kvspray", Subsystem: subsystem, Name: name, Help: help}
}

func opts(subsystem, name, help string) prometheus.HistogramOpts {
	return prometheus.HistogramOpts{Namespace: "kvspray", Subsystem: subsystem, Name: name, Help: help,
		Buckets: secondsFast()}
}

// TransferEnded counts one transfer, and the bytes that it moved. transport is the one that moved
// most, empty if nothing moved.
func (s *Set) TransferEnded(side Side, outcome Outcome, transport string, bytes uint64,
	took time.Duration) {
	transport = transportLabel(transport)
	outcome = outcomeLabel(outcome)
	s.transfers.WithLabelValues(string(side), string(outcome), transport).Inc()
	s.bytes.WithLabelValues(string(side), string(outcome), transport).Add(float64(bytes))
	s.duration.WithLabelValues(string(side), string(outcome)).Observe(took.Seconds())
}

// Spans counts spans that the collector of traces took, or did not.
func (s *Set) Spans(exported bool, n int) {
	outcome := "dropped"
	if exported {
		outcome = "exported"
	}
	s.spans.WithLabelValues(outcome).Add(float64(n))
}

// FlagToCommit observes the time from the last awaited layer flag to the commit.
func (s *Set) FlagToCommit(d time.Duration) { s.commit.Observe(d.Seconds()) }

// Slice counts one attempt at the source, and its bytes if they landed.
func (s *Set) Slice(transport, rail string, outcome transfer.Outcome, reason transfer.Reason,
	bytes uint64) {
	transport = transportLabel(transport)
	s.slices.WithLabelValues(transport, sliceOutcome(outcome), reason.String()).Inc()
	rail = s.railLabel(rail)
	if outcome == transfer.Landed {
		s.railBytes.WithLabelValues(transport, rail, string(Out)).Add(float64(bytes))
		return
	}
	s.railErrors.WithLabelValues(transport, rail).Inc()
}

// Landed counts bytes that arrived over a rail.
func (s *Set) Landed(transport, rail string, bytes uint64) {
	s.railBytes.WithLabelValues(transportLabel(transport), s.railLabel(rail),
		string(In)).Add(float64(bytes))
}

// LaneUp and LaneDown count lanes; failed: the lane was not closed on purpose.
func (s *Set) LaneUp(transport, rail string) {
	s.railLanes.WithLabelValues(transportLabel(transport), s.railLabel(rail)).Inc()
}

// LaneDown undoes LaneUp.
func (s *Set) LaneDown(transport, rail string, failed bool) {
	transport, rail = transportLabel(transport), s.railLabel(rail)
	s.railLanes.WithLabelValues(transport, rail).Dec()
	if failed {
		s.railErrors.WithLabelValues(transport, rail).Inc()
	}
}

// FrameRefused counts a discarded frame.
func (s *Set) FrameRefused(transport string, reason transfer.Reason) {
	s.refused.WithLabelValues(transportLabel(transport), reason.String()).Inc()
}

// LeasesOpen changes the number of open leases by n, which may be negative.
func (s *Set) LeasesOpen(side Side, n int) {
	s.leases.WithLabelValues(string(side)).Add(
		float64(n))
}

// Quarantined changes the number of lease parts with a failed fence by n.
func (s *Set) Quarantined(n int) { s.quarantine.Add(float64(n)) }

// Causes of a fence.
const (
	CauseCommit     = "commit"
	CauseCancel     = "cancel"
	CauseDeadline   = "deadline"
	CauseRefused    = "refused"
	CauseSourceLost = "source_lost"
	CausePeerLost   = "peer_lost"
	CauseEngineGone = "engine_gone"
	CauseDrain      = "drain"
	// No byte came for as long as the engine would compute. The name is the silent part.
	CausePeerSilent   = "peer_silent"
	CauseSourceSilent = "source_silent"
	CauseLanesSilent  = "lanes_silent"
)

var causes = map[string]bool{CauseCommit: true, CauseCancel: true, CauseDeadline: true,
	CauseRefused: true, CauseSourceLost: true, CausePeerLost: true,
	CauseEngineGone: true, CauseDrain: true, CausePeerSilent: true, CauseSourceSilent: true,
	CauseLanesSilent: true}

// Fenced counts one fence and the time that it took.
func (s *Set) Fenced(cause string, took time.Duration) {
	if !causes[cause] {
		cause = otherName
	}
	s.fences.WithLabelValues(cause).Inc()
	s.fenceTime.Observe(took.Seconds())
}

var controlTypes = map[string]bool{"await": true, "admitted": true, "grant": true,
	"grant_reply": true, "source_lost": true, "revoke": true,
	"session_over": true, "check": true, "checked": true,
	"commit": true, "credit": true, "rails": true, "ping": true, "pong": true,
	"page_hints": true, "page_lookup": true, "page_holders": true, "page_request": true,
	"page_offer": true, "page_removals": true, "page_removed": true,
	"segment_locate": true, "segment_located": true, "segment_batch": true, "segment_cancel": true,
	"segment_done": true}

// Control counts one control message; typ is the field's name in ControlFrame.
func (s *Set) Control(d Direction, typ string) {
	if !controlTypes[typ] {
		typ = otherName
	}
	s.control.WithLabelValues(string(d), typ).Inc()
}

// HelloRefused counts a hello of an incompatible release.
func (s *Set) HelloRefused() { s.hellos.Inc() }

// Peers sets the number of peers with an open control session.
func (s *Set) Peers(n int) { s.peers.Set(float64(n)) }

// Expires sets when the certificate of this node ends; the zero time: never.
func (s *Set) Expires(at time.Time) {
	if !at.IsZero() {
		s.expires.Set(float64(at.Unix()))
	}
}

// Sessions changes the number of engine sessions of a role ("worker", "scheduler") by n.
func (s *Set) Sessions(role string, n int) {
	if role != "worker" && role != "scheduler" {
		role = otherName
	}
	s.sessions.WithLabelValues(role).Add(float64(n))
}

var recordTypes = map[string]bool{"step": true, "intent": true, "expect": true, "cancel": true,
	"preempt": true, "hold": true, "yield": true, "copy": true, "load": true, "get": true,
	"put": true, "await": true}

// Record counts one record of an engine.
func (s *Set) Record(typ string) {
	if !recordTypes[typ] {
		typ = otherName
	}
	s.records.WithLabelValues(typ).Inc()
}

// refusedKinds are records, and the kinds of earlier refusals.
var refusedKinds = func() map[string]bool {
	kinds := map[string]bool{"peer": true, "packet": true, "register": true, "unknown": true}
	maps.Copy(kinds, recordTypes)
	return kinds
}()

// EngineRefused counts a refusal of an engine: its process ("peer"), a message, or a record, by
// type.
func (s *Set) EngineRefused(kind string) {
	if !refusedKinds[kind] {
		kind = otherName
	}
	s.registerErr.WithLabelValues(kind).Inc()
}

var copyMethods = [...]string{"host", "staged", "packed", "peer", "direct", "multipath"}

// CopyEnded counts one copy and its bytes; method is the one that moved most bytes, empty if
// nothing moved.
func (s *Set) CopyEnded(outcome Outcome, method string, bytes uint64, took time.Duration) {
	if method == "" {
		method = noTransport
	} else if !slices.Contains(copyMethods[:], method) {
		method = otherName
	}
	s.copies.WithLabelValues(string(outcomeLabel(outcome)), method).Inc()
	s.copyBytes.WithLabelValues(method).Add(float64(bytes))
	s.copyTime.WithLabelValues(method).Observe(took.Seconds())
}

// Draining sets whether new leases are refused.
func (s *Set) Draining(on bool) {
	s.draining.Set(map[bool]float64{true: 1}[on])
}

func transportLabel(name string) string {
	switch {
	case slices.Contains(transports[:], name):
		return name
	case name == "", name == noTransport:
		return noTransport
	}
	return otherName
}

func outcomeLabel(o Outcome) Outcome {
	switch o {
	case OK, Failed, Canceled, Expired, Refused, Lost:
		return o
	}
	return otherName
}

func sliceOutcome(o transfer.Outcome) string {
	if o < transfer.Landed || o > transfer.InDoubt {
		return otherName
	}
	return o.String()
}

// railLabel passes the first maxRails names.
func (s *Set) railLabel(name string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rails[name] {
		return name
	}
	if name == "" || len(s.rails) >= maxRails {
		return otherName
	}
	s.rails[name] = true
	return name
}
