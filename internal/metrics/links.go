package metrics

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
)

// LinkSample is the current state of a PCIe link over which host memory and a GPU exchange bytes:
// the GPU's own link, or that of a relay.
type LinkSample struct {
	GPU, Link int // by number of the GPU
	State     string
	Bytes     float64 // moved
	InFlight  float64 // bytes
	Rate      float64 // bytes per second
	Returned  float64 // chunks
}

// maxGPUs bounds the GPU numbers in labels: each pair is a series.
const maxGPUs = 16

type linkCollector struct {
	states []string
	read   func() []LinkSample
}

// Links registers a collector of read's results. states lists all states of a link.
func (s *Set) Links(reg prometheus.Registerer, states []string, read func() []LinkSample) error {
	return reg.Register(linkCollector{states, read})
}

func linkDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("kvspray_gpu_link_"+name, help, append([]string{"gpu", "link"},
		labels...), nil)
}

var (
	linkBytes = linkDesc("bytes_total", "Bytes between host memory and a GPU over a PCIe link, "+
		"its own or a relay's.")
	linkInFlight = linkDesc("in_flight_bytes", "Bytes that a link has accepted and not moved yet.")
	linkRate     = linkDesc("learned_bytes_per_second", "Learned bandwidth of a link.")
	linkReturned = linkDesc("chunks_returned_total", "Chunks that a failed link has returned.")
	linkState    = linkDesc("state", "1 for the current state of a link.", "state")
)

// Describe implements prometheus.Collector.
func (c linkCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{linkBytes, linkInFlight, linkRate, linkReturned, linkState} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c linkCollector) Collect(out chan<- prometheus.Metric) {
	for _, l := range c.read() {
		if l.GPU >= maxGPUs || l.Link >= maxGPUs {
			continue
		}
		put := func(d *prometheus.Desc, typ prometheus.ValueType, v float64, labels ...string) {
			out <- prometheus.MustNewConstMetric(d, typ, v, append([]string{strconv.Itoa(l.GPU),
				strconv.Itoa(l.Link)}, labels...)...)
		}
		put(linkBytes, prometheus.CounterValue, l.Bytes)
		put(linkInFlight, prometheus.GaugeValue, l.InFlight)
		put(linkRate, prometheus.GaugeValue, l.Rate)
		put(linkReturned, prometheus.CounterValue, l.Returned)
		for _, s := range c.states {
			v := 0.0
			if s == l.State {
				v = 1
			}
			put(linkState, prometheus.GaugeValue, v, s)
		}
	}
}
