package metrics

import "github.com/prometheus/client_golang/prometheus"

// FaultSample is a fault of a device when metrics are read.
type FaultSample struct{ Device, Kind string }

// FaultSamples are the faults of all devices, by PCI address and by interface, and the Xid errors
// since the start, by class.
type FaultSamples struct {
	GPUs, Links []FaultSample
	Xids        map[string]uint64
}

// faultCollector reads samples when it is collected. maxFaults bounds its series.
type faultCollector struct{ read func() FaultSamples }

const maxFaults = 64 // of each kind of device

// Faults registers a collector of read's results.
func (*Set) Faults(reg prometheus.Registerer, read func() FaultSamples) error {
	return reg.Register(faultCollector{read})
}

var (
	gpuFault = prometheus.NewDesc("kvspray_gpu_fault",
		"1 while a GPU has a fault (docs/health.md).", []string{"pci", "kind"}, nil)
	gpuXids = prometheus.NewDesc("kvspray_gpu_xids_total",
		"Xid errors of all GPUs, by what ends their consequences.", []string{"class"}, nil)
	railFault = prometheus.NewDesc("kvspray_rail_fault",
		"1 while an interface of a rail flaps or its counters show many errors (docs/health.md).",
		[]string{"interface", "kind"}, nil)
)

// Describe implements prometheus.Collector.
func (c faultCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{gpuFault, gpuXids, railFault} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c faultCollector) Collect(out chan<- prometheus.Metric) {
	s := c.read()
	put := func(d *prometheus.Desc, all []FaultSample) {
		for _, f := range all[:min(len(all), maxFaults)] {
			out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, 1, f.Device, f.Kind)
		}
	}
	put(gpuFault, s.GPUs)
	put(railFault, s.Links)
	for class, n := range s.Xids {
		out <- prometheus.MustNewConstMetric(gpuXids, prometheus.CounterValue, float64(n), class)
	}
}
