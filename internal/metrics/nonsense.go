// SPDX-License-Identifier: Apache-2.0

package metrics

import "github.com/prometheus/client_golang/prometheus"

// nonsenseCollector reads counts when it is asked.
type nonsenseCollector struct{ read func() map[string]uint64 }

var nonsense = prometheus.NewDesc("kvspray_control_nonsense_total",
	"What peers said on control lanes that no honest one says, by the field that was wrong. The log has the first of each peer.", []string{"reason"}, nil)

// Nonsense makes reg show what read returns, each time it is gathered. The reasons are those of package exec: no peer adds one.
func (*Set) Nonsense(reg prometheus.Registerer, read func() map[string]uint64) error {
	return reg.Register(nonsenseCollector{read})
}

// Describe implements prometheus.Collector.
func (nonsenseCollector) Describe(out chan<- *prometheus.Desc) { out <- nonsense }

// Collect implements prometheus.Collector.
func (c nonsenseCollector) Collect(out chan<- prometheus.Metric) {
	for reason, n := range c.read() {
		out <- prometheus.MustNewConstMetric(nonsense, prometheus.CounterValue, float64(n), reason)
	}
}
