package metrics

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
)

// MemorySample is what a sidecar holds of one GPU when metrics are read. Free is what the whole GPU
// has left; 0: not known.
type MemorySample struct {
	GPU         int
	Held        map[string]float64 // bytes of the GPU, by what they are for
	Pinned      float64            // bytes of host memory
	Limit, Free float64
}

type memoryCollector struct{ read func() []MemorySample }

// Memory makes reg show what read returns, each time it is gathered.
func (s *Set) Memory(reg prometheus.Registerer, read func() []MemorySample) error {
	return reg.Register(memoryCollector{read})
}

var (
	gpuHeld = prometheus.NewDesc("kvspray_gpu_memory_bytes",
		"Memory of a GPU that this sidecar has allocated, without the driver's context.",
		[]string{"gpu", "kind"}, nil)
	gpuPinned = prometheus.NewDesc("kvspray_gpu_pinned_host_bytes",
		"Pinned host memory that this sidecar has allocated for copies to and from a GPU.",
		[]string{"gpu"}, nil)
	gpuLimit = prometheus.NewDesc("kvspray_gpu_memory_limit_bytes", "What this sidecar allocates on "+
		"a GPU at most (transports.gpu.memory).",
		[]string{"gpu"}, nil)
	gpuFree = prometheus.NewDesc("kvspray_gpu_memory_free_bytes",
		"What a GPU has left, for all processes.",
		[]string{"gpu"}, nil)
)

// Describe implements prometheus.Collector.
func (c memoryCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{gpuHeld, gpuPinned, gpuLimit, gpuFree} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c memoryCollector) Collect(out chan<- prometheus.Metric) {
	for _, m := range c.read() {
		if m.GPU >= maxGPUs {
			continue
		}
		put := func(d *prometheus.Desc, v float64, labels ...string) {
			out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v,
				append([]string{strconv.Itoa(m.GPU)}, labels...)...)
		}
		for kind, v := range m.Held {
			put(gpuHeld, v, kind)
		}
		put(gpuPinned, m.Pinned)
		put(gpuLimit, m.Limit)
		if m.Free > 0 {
			put(gpuFree, m.Free)
		}
	}
}
