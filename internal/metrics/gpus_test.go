package metrics

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// Held memory is shown for as many GPUs as make series, and what the driver does not report is left
// out.
func TestMemory(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	read := func() (out []MemorySample) {
		for gpu := range maxGPUs + 2 {
			m := MemorySample{GPU: gpu, Held: map[string]float64{"staging": 1, "pipelines": 2},
				Pinned: 5, Limit: 3}
			if gpu == 0 {
				m.Free = 4
			}
			out = append(out, m)
		}
		return out
	}
	if err := New(reg).Memory(reg, read); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]int{"memory_bytes": 2 * maxGPUs, "pinned_host_bytes": maxGPUs,
		"memory_limit_bytes": maxGPUs, "memory_free_bytes": 1} {
		if n, err := testutil.GatherAndCount(reg, "kvspray_gpu_"+name); err != nil || n != want {
			t.Errorf("%s: %d series, want %d: %v", name, n, want, err)
		}
	}
}
