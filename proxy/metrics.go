// SPDX-License-Identifier: Apache-2.0

package proxy

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	requests *prometheus.CounterVec
	alone    *prometheus.CounterVec
	up       *prometheus.GaugeVec
	inFlight prometheus.Gauge
	first    *prometheus.HistogramVec
	retries  prometheus.Counter
}

// Why D had to prefill by itself: the values of the label.
const (
	aloneNoPrefill = "no_prefill"     // none is up
	aloneFailed    = "prefill_failed" // it answered with an error, or not at all
	aloneRefused   = "refused"        // it answered that the client is wrong (4xx)
	aloneParams    = "prefill_params" // its answer has nothing that D could use
	aloneRequest   = "not_splittable" // prompt logprobs, beam search ...
)

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "kvspray", Subsystem: "proxy", Name: "requests_total",
			Help: "Requests by mode and class of the answer's status; none: the client went away before."}, []string{"mode", "code"}),
		alone: prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "kvspray", Subsystem: "proxy", Name: "local_prefills_total",
			Help: "Requests that the decode engine had to prefill by itself."}, []string{"reason"}),
		up: prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: "kvspray", Subsystem: "proxy", Name: "backend_up",
			Help: "1 while the back end answers its health checks."}, []string{"role", "url"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{Namespace: "kvspray", Subsystem: "proxy", Name: "requests_in_flight",
			Help: "Requests that are being served."}),
		first: prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: "kvspray", Subsystem: "proxy", Name: "first_byte_seconds",
			Help: "From the request to the first byte of its answer.", Buckets: prometheus.ExponentialBuckets(0.005, 2, 14)}, []string{"mode"}),
		retries: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "kvspray", Subsystem: "proxy", Name: "decode_retries_total",
			Help: "Requests sent to another decode engine because the first could not be reached."}),
	}
	reg.MustRegister(m.requests, m.alone, m.up, m.inFlight, m.first, m.retries)
	return m
}

func statusClass(code int) string {
	switch {
	case code == 0:
		return "none" // the client went away before there was one
	case code >= 200 && code < 300:
		return "2xx"
	case code >= 300 && code < 400:
		return "3xx"
	case code >= 400 && code < 500:
		return "4xx"
	}
	return "5xx"
}
