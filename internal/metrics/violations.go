package metrics

import "github.com/prometheus/client_golang/prometheus"

// byReason reads counts when it is collected. The reasons are those of package exec: no peer adds
// one.
type byReason struct {
	desc *prometheus.Desc
	read func() map[string]uint64
}

var (
	violations = prometheus.NewDesc("kvspray_control_violations_total",
		"Protocol violations of peers on control lanes, by the invalid field. The log has the first of "+
			"each peer.", []string{"reason"}, nil)
	refusals = prometheus.NewDesc("kvspray_control_grants_refused_total",
		"Refused grants of peers, by reason. The log has each with its values.",
		[]string{"reason"}, nil)
)

// Violations registers a collector of read's results.
func (*Set) Violations(reg prometheus.Registerer, read func() map[string]uint64) error {
	return reg.Register(byReason{violations, read})
}

// Refusals registers a collector of read's results.
func (*Set) Refusals(reg prometheus.Registerer, read func() map[string]uint64) error {
	return reg.Register(byReason{refusals, read})
}

// Describe implements prometheus.Collector.
func (c byReason) Describe(out chan<- *prometheus.Desc) { out <- c.desc }

// Collect implements prometheus.Collector.
func (c byReason) Collect(out chan<- prometheus.Metric) {
	for reason, n := range c.read() {
		out <- prometheus.MustNewConstMetric(c.desc, prometheus.CounterValue, float64(n), reason)
	}
}
