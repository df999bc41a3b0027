package metrics

import "github.com/prometheus/client_golang/prometheus"

// RailSample is the current state of one local rail.
type RailSample struct {
	Transport, Rail string
	Pairs           map[string]float64 // rail pairs to peers, by state
	InFlight        float64            // bytes
	Window          float64            // bytes
	Rate            float64            // bytes per second
	Error           float64            // |predicted - actual| / actual, mean
	Retries         map[string]float64
	Up              float64            // 1, or 0 if its link is down
	Slices          map[string]float64 // ended, by outcome
	Suspicions      float64            // of lanes
	Hedges          float64
	Exclusions      float64
	Readmissions    float64
	Probes          map[string]float64 // by outcome
}

// railCollector reads samples when it is collected. railLabel bounds its series.
type railCollector struct {
	set  *Set
	read func() []RailSample
}

// Rails registers a collector of read's results.
func (s *Set) Rails(reg prometheus.Registerer, read func() []RailSample) error {
	return reg.Register(railCollector{s, read})
}

func railDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("kvspray_rail_"+name, help, append([]string{"transport", "rail"},
		labels...), nil)
}

var (
	railPairs    = railDesc("pairs", "Rail pairs with a lane, by state.", "state")
	railInFlight = railDesc("in_flight_bytes", "Bytes in flight, over all peers.")
	railWindow   = railDesc("window_bytes", "In-flight windows in bytes, over all peers.")
	railRate     = railDesc("learned_bytes_per_second", "Learned bandwidth of the best rail pair.")
	railError    = railDesc("prediction_error_ratio", "Mean of |predicted - actual| / actual, from "+
		"post to confirmation.")
	railUp       = railDesc("link_up", "1 while the link of a rail has a carrier, as far as is known.")
	railSlices   = railDesc("slices_total", "Slices given to a rail and ended, by outcome.", "outcome")
	railSuspects = railDesc("suspicions_total", "Lanes without progress for so long that their "+
		"chunks went to other lanes.")
	railRetries  = railDesc("retransmissions_total", "Slices sent again, by reason.", "reason")
	railHedges   = railDesc("hedges_total", "Second copies of late slices near the end of a transfer.")
	railExcluded = railDesc("exclusions_total", "Exclusions of a rail pair.")
	railAgain    = railDesc("readmissions_total",
		"Rail pairs that were readmitted after an exclusion.")
	railProbes = railDesc("probes_total", "Probes of excluded rail pairs.", "outcome")
)

// Describe implements prometheus.Collector.
func (c railCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{railPairs, railInFlight, railWindow, railRate, railError,
		railRetries, railHedges, railExcluded, railAgain,
		railProbes, railUp, railSlices, railSuspects} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c railCollector) Collect(out chan<- prometheus.Metric) {
	seen := map[[2]string]bool{}
	for _, r := range c.read() {
		transport, rail := transportLabel(r.Transport), c.set.railLabel(r.Rail)
		if seen[[2]string{transport, rail}] {
			// one series each: rails beyond the bound share a name, and the first stands for them
			continue
		}
		seen[[2]string{transport, rail}] = true
		put := func(d *prometheus.Desc, typ prometheus.ValueType, v float64, labels ...string) {
			out <- prometheus.MustNewConstMetric(d, typ, v, append([]string{transport, rail}, labels...)...)
		}
		put(railInFlight, prometheus.GaugeValue, r.InFlight)
		put(railWindow, prometheus.GaugeValue, r.Window)
		put(railRate, prometheus.GaugeValue, r.Rate)
		put(railError, prometheus.GaugeValue, r.Error)
		put(railUp, prometheus.GaugeValue, r.Up)
		put(railSuspects, prometheus.CounterValue, r.Suspicions)
		for outcome, n := range r.Slices {
			put(railSlices, prometheus.CounterValue, n, outcome)
		}
		put(railHedges, prometheus.CounterValue, r.Hedges)
		put(railExcluded, prometheus.CounterValue, r.Exclusions)
		put(railAgain, prometheus.CounterValue, r.Readmissions)
		for state, n := range r.Pairs {
			put(railPairs, prometheus.GaugeValue, n, state)
		}
		for reason, n := range r.Retries {
			put(railRetries, prometheus.CounterValue, n, reason)
		}
		for outcome, n := range r.Probes {
			put(railProbes, prometheus.CounterValue, n, outcome)
		}
	}
}
