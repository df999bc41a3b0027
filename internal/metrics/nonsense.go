// SPDX-License-Identifier: Apache-2.0

package metrics

import "github.com/prometheus/client_golang/prometheus"

// byReason reads counts when it is asked. The reasons are those of package exec: no peer adds one.
type byReason struct {
	desc *prometheus.Desc
	read func() map[string]uint64
}

var (
	nonsense = prometheus.NewDesc("kvspray_control_nonsense_total",
		"What peers said on control lanes that no honest one says, by the field that was wrong. The log has the first of each peer.", []string{"reason"}, nil)
	refusals = prometheus.NewDesc("kvspray_control_grants_refused_total",
		"Grants of peers that this sidecar refused, by reason. The log has each with its values.",
		[]string{"reason"}, nil)
)

// Nonsense makes reg show what read returns, each time it is gathered.
func (*Set) Nonsense(reg prometheus.Registerer, read func() map[string]uint64) error {
	return reg.Register(byReason{nonsense, read})
}

// Refusals makes reg show what read returns, each time it is gathered.
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
