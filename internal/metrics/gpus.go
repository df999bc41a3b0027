// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
)

// MemorySample is what a sidecar holds of one GPU when metrics are read. Free is what the whole GPU has left; 0: not known.
type MemorySample struct {
	GPU         int
	Held        map[string]float64 // bytes, by what they are for
	Limit, Free float64
}

type memoryCollector struct{ read func() []MemorySample }

// Memory makes reg show what read returns, each time it is gathered.
func (s *Set) Memory(reg prometheus.Registerer, read func() []MemorySample) error {
	return reg.Register(memoryCollector{read})
}

var (
	gpuHeld = prometheus.NewDesc("kvspray_gpu_memory_bytes",
		"Memory that this sidecar holds for a GPU, without the driver's context: staging and pipelines on the GPU, pinned_host beside it.",
		[]string{"gpu", "kind"}, nil)
	gpuLimit = prometheus.NewDesc("kvspray_gpu_memory_limit_bytes", "What this sidecar allocates on a GPU at most (transports.gpu.memory).",
		[]string{"gpu"}, nil)
	gpuFree = prometheus.NewDesc("kvspray_gpu_free_bytes", "What a GPU has left, for all processes.", []string{"gpu"}, nil)
)

// Describe implements prometheus.Collector.
func (c memoryCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{gpuHeld, gpuLimit, gpuFree} {
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
			out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, append([]string{strconv.Itoa(m.GPU)}, labels...)...)
		}
		for kind, v := range m.Held {
			put(gpuHeld, v, kind)
		}
		put(gpuLimit, m.Limit)
		if m.Free > 0 {
			put(gpuFree, m.Free)
		}
	}
}
