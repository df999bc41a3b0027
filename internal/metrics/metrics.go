// SPDX-License-Identifier: Apache-2.0

// Package metrics owns the names, labels and buckets of everything that a sidecar counts. Callers get typed methods; a label
// value that nobody declared ends up as "other", so that no peer can make the number of series grow.
//
// Invariants: all names begin with kvspray_, units are base units, no label carries a request, a lease or a peer's boot id;
// the set of series is bounded by the configured rails and the constants below. Safe for concurrent use. No goroutines.
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

// Side says on which side of a transfer this sidecar was.
type Side string

// The sides.
const (
	SideSource      Side = "source"
	SideDestination Side = "destination"
)

// Outcome is how a transfer or lease ended; the names of enum kvs_status.
type Outcome string

// The outcomes.
const (
	OK        Outcome = "ok"
	Failed    Outcome = "failed"
	Cancelled Outcome = "cancelled"
	Expired   Outcome = "expired"
	Refused   Outcome = "refused"
	Lost      Outcome = "lost"
)

// OutcomeOf maps a completion's status (enum kvs_status) to its label.
func OutcomeOf(status uint16) Outcome {
	all := [...]Outcome{OK, Failed, Cancelled, Expired, Refused, Lost}
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

// Set is the collectors of one sidecar. Tests that start hundreds of sidecars give each its own registry.
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
	draining    prometheus.Gauge

	mu    sync.Mutex
	rails map[string]bool // names that have series, at most maxRails
}

// secondsFast spans 50 us to 26 s.
func secondsFast() []float64 { return prometheus.ExponentialBuckets(50e-6, 2, 20) }

// New makes the collectors and registers them. It panics on a registry that already has them: a programming error.
func New(reg prometheus.Registerer) *Set {
	s := &Set{
		rails: map[string]bool{},
		transfers: counters("transfer", "transfers_total", "Transfers that ended.",
			"side", "outcome", "transport"),
		bytes: counters("transfer", "payload_bytes_total", "Payload bytes that landed (destination) or were confirmed (source), by how their transfer ended.",
			"side", "outcome", "transport"),
		duration: prometheus.NewHistogramVec(opts("transfer", "duration_seconds", "From the first word of a transfer to its end."),
			[]string{"side", "outcome"}),
		commit: prometheus.NewHistogram(opts("transfer", "flag_to_commit_seconds",
			"From the last layer flag that a transfer waited for to its commit. Seen where source and destination share a sidecar, else from the receipt of the commit at the source.")),
		railBytes:  counters("rail", "bytes_total", "Payload bytes over a rail.", "transport", "rail", "direction"),
		railErrors: counters("rail", "errors_total", "Lanes lost and slices failed on a rail.", "transport", "rail"),
		railLanes:  gauges("rail", "lanes", "Lanes that are up.", "transport", "rail"),
		slices:     counters("lane", "slices_total", "Attempts to move a slice, by how they ended.", "transport", "outcome", "reason"),
		refused:    counters("lane", "refused_frames_total", "Frames that were scrapped.", "transport", "reason"),
		leases:     gauges("lease", "open", "Leases that are open.", "side"),
		quarantine: prometheus.NewGauge(gaugeOpts("lease", "quarantined", "Parts of leases, at either end, whose fence has failed and is tried again: their blocks stay away from the engine.")),
		fences:     counters("lease", "fences_total", "Fences, by what started them.", "cause"),
		fenceTime:  prometheus.NewHistogram(opts("lease", "fence_duration_seconds", "From the revocation of a lease to its last fence acknowledgement.")),
		control:    counters("control", "messages_total", "Messages on control lanes.", "direction", "type"),
		expires: prometheus.NewGauge(gaugeOpts("control", "certificate_expires_seconds",
			"Unix time at which the certificate of this node, or its authority, ends; 0: never, or there is none.")),
		hellos: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "kvspray",
			Subsystem: "control", Name: "hellos_refused_total",
			Help: "Hellos of sidecars that are of no release that this one works with. " +
				"The log names which to upgrade."}),
		peers: prometheus.NewGauge(gaugeOpts("control", "peers",
			"Peers with an open control session.")),
		sessions: gauges("engine", "sessions", "Engine sessions.", "role"),
		records:  counters("engine", "records_total", "Records taken from engines.", "type"),
		copies: counters("copy", "copies_total",
			"Copies between two regions of an engine that ended.", "outcome", "path"),
		copyBytes: counters("copy", "bytes_total",
			"Bytes that copies moved, also those that failed.", "path"),
		copyTime: prometheus.NewHistogramVec(opts("copy", "duration_seconds", "From an engine's word to the end of its copy."),
			[]string{"path"}),
		registerErr: counters("engine", "refusals_total", "Connections, messages and records of engines that were refused.",
			"kind"),
		draining: prometheus.NewGauge(gaugeOpts("sidecar", "draining", "1 while no new leases are taken.")),
	}
	reg.MustRegister(s.transfers, s.bytes, s.duration, s.commit, s.railBytes, s.railErrors, s.railLanes, s.slices, s.refused, s.leases,
		s.quarantine, s.fences, s.fenceTime, s.control, s.hellos, s.peers, s.expires, s.sessions, s.records,
		s.copies, s.copyBytes, s.copyTime, s.registerErr, s.draining)
	// An alert on the growth of a series misses its first value, so those that should stay at zero begin there.
	for _, transport := range transports {
		for r := transfer.ReasonNone + 1; int(r) < transfer.NumReasons; r++ {
			s.refused.WithLabelValues(transport, r.String())
		}
	}
	for kind := range refusedKinds {
		s.registerErr.WithLabelValues(kind)
	}
	return s
}

var transports = [...]string{"tcp", "shm", "gdr"}

func counters(subsystem, name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "kvspray", Subsystem: subsystem, Name: name, Help: help}, labels)
}

func gauges(subsystem, name, help string, labels ...string) *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(gaugeOpts(subsystem, name, help), labels)
}

func gaugeOpts(subsystem, name, help string) prometheus.GaugeOpts {
	return prometheus.GaugeOpts{Namespace: "kvspray", Subsystem: subsystem, Name: name, Help: help}
}

func opts(subsystem, name, help string) prometheus.HistogramOpts {
	return prometheus.HistogramOpts{Namespace: "kvspray", Subsystem: subsystem, Name: name, Help: help, Buckets: secondsFast()}
}

// TransferEnded counts one transfer, and the bytes that it moved before it ended. transport is the one that moved most of it, empty where
// nothing moved.
func (s *Set) TransferEnded(side Side, outcome Outcome, transport string, bytes uint64, took time.Duration) {
	transport = transportLabel(transport)
	outcome = outcomeLabel(outcome)
	s.transfers.WithLabelValues(string(side), string(outcome), transport).Inc()
	s.bytes.WithLabelValues(string(side), string(outcome), transport).Add(float64(bytes))
	s.duration.WithLabelValues(string(side), string(outcome)).Observe(took.Seconds())
}

// FlagToCommit observes the time from the last awaited layer flag to the commit.
func (s *Set) FlagToCommit(d time.Duration) { s.commit.Observe(d.Seconds()) }

// Slice counts one attempt at the source, and its bytes where they landed.
func (s *Set) Slice(transport, rail string, outcome transfer.Outcome, reason transfer.Reason, bytes uint64) {
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
	s.railBytes.WithLabelValues(transportLabel(transport), s.railLabel(rail), string(In)).Add(float64(bytes))
}

// LaneUp and LaneDown count lanes; failed says that the lane was not closed on purpose.
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

// FrameRefused counts a scrapped frame.
func (s *Set) FrameRefused(transport string, reason transfer.Reason) {
	s.refused.WithLabelValues(transportLabel(transport), reason.String()).Inc()
}

// LeasesOpen moves the number of open leases by n, which may be negative.
func (s *Set) LeasesOpen(side Side, n int) { s.leases.WithLabelValues(string(side)).Add(float64(n)) }

// Quarantined moves the number of parts of leases whose fence has failed by n.
func (s *Set) Quarantined(n int) { s.quarantine.Add(float64(n)) }

// The causes of a fence.
const (
	CauseCommit     = "commit"
	CauseCancel     = "cancel"
	CauseDeadline   = "deadline"
	CauseRefused    = "refused"
	CauseSourceLost = "source_lost"
	CausePeerLost   = "peer_lost"
	CauseEngineGone = "engine_gone"
	CauseDrain      = "drain"
)

var causes = map[string]bool{CauseCommit: true, CauseCancel: true, CauseDeadline: true, CauseRefused: true, CauseSourceLost: true, CausePeerLost: true,
	CauseEngineGone: true, CauseDrain: true}

// Fenced counts one fence and the time that it took.
func (s *Set) Fenced(cause string, took time.Duration) {
	if !causes[cause] {
		cause = otherName
	}
	s.fences.WithLabelValues(cause).Inc()
	s.fenceTime.Observe(took.Seconds())
}

var controlTypes = map[string]bool{"await": true, "admitted": true, "grant": true, "grant_reply": true, "source_lost": true, "revoke": true,
	"commit": true, "credit": true, "rails": true, "ping": true, "pong": true}

// Control counts one control message; typ is the field's name in ControlFrame.
func (s *Set) Control(d Direction, typ string) {
	if !controlTypes[typ] {
		typ = otherName
	}
	s.control.WithLabelValues(string(d), typ).Inc()
}

// HelloRefused counts a hello of a release that this one does not work with.
func (s *Set) HelloRefused() { s.hellos.Inc() }

// Peers sets the number of peers with an open control session.
func (s *Set) Peers(n int) { s.peers.Set(float64(n)) }

// Expires sets when the certificate of this node ends; the zero time: never.
func (s *Set) Expires(at time.Time) {
	if !at.IsZero() {
		s.expires.Set(float64(at.Unix()))
	}
}

// Sessions moves the number of engine sessions of a role ("worker", "scheduler") by n.
func (s *Set) Sessions(role string, n int) {
	if role != "worker" && role != "scheduler" {
		role = otherName
	}
	s.sessions.WithLabelValues(role).Add(float64(n))
}

var recordTypes = map[string]bool{"step": true, "intent": true, "expect": true, "cancel": true, "preempt": true, "hold": true, "copy": true, "await": true}

// Record counts one record of an engine.
func (s *Set) Record(typ string) {
	if !recordTypes[typ] {
		typ = otherName
	}
	s.records.WithLabelValues(typ).Inc()
}

// refusedKinds are records, and what comes before them.
var refusedKinds = func() map[string]bool {
	kinds := map[string]bool{"peer": true, "packet": true, "register": true, "unknown": true}
	maps.Copy(kinds, recordTypes)
	return kinds
}()

// EngineRefused counts what was refused of an engine: its process ("peer"), a message, or a record, by type.
func (s *Set) EngineRefused(kind string) {
	if !refusedKinds[kind] {
		kind = otherName
	}
	s.registerErr.WithLabelValues(kind).Inc()
}

var copyPaths = [...]string{"host", "staged", "packed", "peer", "direct", "multipath"}

// CopyEnded counts one copy and what it moved; path is the way that took most of it, empty where nothing moved.
func (s *Set) CopyEnded(outcome Outcome, path string, bytes uint64, took time.Duration) {
	if path == "" {
		path = noTransport
	} else if !slices.Contains(copyPaths[:], path) {
		path = otherName
	}
	s.copies.WithLabelValues(string(outcomeLabel(outcome)), path).Inc()
	s.copyBytes.WithLabelValues(path).Add(float64(bytes))
	s.copyTime.WithLabelValues(path).Observe(took.Seconds())
}

// Draining says whether new leases are refused.
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
	case OK, Failed, Cancelled, Expired, Refused, Lost:
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

// railLabel lets the first maxRails names through.
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
