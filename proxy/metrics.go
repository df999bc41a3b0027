package proxy

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	requests *prometheus.CounterVec
	alone    *prometheus.CounterVec
	up       *prometheus.GaugeVec
	inFlight prometheus.Gauge
	first    *prometheus.HistogramVec
	retries  prometheus.Counter
	releases *prometheus.CounterVec
	spans    *prometheus.CounterVec
	hints    *prometheus.CounterVec

	continued  prometheus.Counter
	recomputed prometheus.Counter
	unfollowed *prometheus.CounterVec
	pauses     prometheus.Histogram
}

// Reasons for a local prefill: the values of the label.
const (
	aloneNoPrefill = "no_prefill"     // none is up
	aloneFailed    = "prefill_failed" // P answered with an error, or not at all
	aloneRefused   = "refused"        // P answered 4xx: the request is wrong
	aloneParams    = "prefill_params" // P's answer has no usable parameters
	aloneRequest   = "not_splittable" // prompt logprobs, beam search ...
	aloneChosen    = "policy"         // the policy expects that to be fastest
)

// Outcomes of releases.
const (
	releaseSent    = "sent"
	releaseFailed  = "failed"  // the engine has not answered, or with an error
	releaseDropped = "dropped" // too many wait for the engine
)

// opts names a metric of the router.
func opts(name, help string) prometheus.Opts {
	return prometheus.Opts{Namespace: "kvspray", Subsystem: "proxy", Name: name, Help: help}
}

func counterVec(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts(opts(name, help)), labels)
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		requests: counterVec("requests_total", "Requests by mode and class of the answer's status; "+
			"none: the client disconnected before it.", "mode", "code"),
		alone: counterVec("local_prefills_total",
			"Requests whose prompt the decode engine computed (local prefill).", "reason"),
		up: prometheus.NewGaugeVec(prometheus.GaugeOpts(opts("engine_up",
			"1 while the engine answers its health checks.")), []string{"role", "url"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts(opts("requests_in_flight",
			"Requests in flight."))),
		first: prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: "kvspray",
			Subsystem: "proxy", Name: "first_byte_seconds",
			Help:    "Time from the request to the first byte of its answer.",
			Buckets: prometheus.ExponentialBuckets(0.005, 2, 14)}, []string{"mode"}),
		retries: prometheus.NewCounter(prometheus.CounterOpts(opts("decode_retries_total",
			"Requests sent to another decode engine because one failed before its first byte."))),
		releases: counterVec("prefill_releases_total", "Requests to prefill engines that end what they "+
			"keep for no decode engine, by outcome. Without one the cache stays for "+heldWithout+".",
			"outcome"),
		spans: counterVec("spans_total", "Spans of requests, by whether the collector of --otlp took "+
			"them (exported) or not (dropped).", "outcome"),
		hints: counterVec("hints_total", "Hints of agents in requests (agent_hint), by what the router "+
			"did.", "result"),
		continued: prometheus.NewCounter(prometheus.CounterOpts(opts("continuations_total",
			"Times that another engine has continued an answer whose engine had failed."))),
		recomputed: prometheus.NewCounter(prometheus.CounterOpts(opts("continuation_tokens_total",
			"Tokens of prompts and answers that engines got to continue an answer. They compute those "+
				"that no cache has."))),
		unfollowed: counterVec("continuations_refused_total", "Answers that have broken off because no "+
			"other engine could continue them, by reason.", "reason"),
		pauses: prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "kvspray",
			Subsystem: "proxy", Name: "continuation_pause_seconds",
			Help:    "Time between the last bytes of an engine that has failed and the first of the next.",
			Buckets: prometheus.ExponentialBuckets(0.005, 2, 14)}),
	}
	for _, reason := range unfollowedReasons {
		m.unfollowed.WithLabelValues(reason)
	}
	for _, outcome := range []string{releaseSent, releaseFailed, releaseDropped} {
		m.releases.WithLabelValues(outcome)
	}
	for _, outcome := range []string{"exported", "dropped"} {
		m.spans.WithLabelValues(outcome)
	}
	reg.MustRegister(m.requests, m.alone, m.up, m.inFlight, m.first, m.retries, m.releases, m.spans,
		m.hints, m.continued, m.recomputed, m.unfollowed, m.pauses)
	return m
}

func statusClass(code int) string {
	if code == 0 {
		return "none" // the client disconnected before an answer
	}
	return strconv.Itoa(code/100) + "xx"
}
