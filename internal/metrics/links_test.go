package metrics

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// Each link of each GPU has its series, as many as are bounded, and one of its states.
func TestLinks(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	read := func() (out []LinkSample) {
		for gpu := range maxGPUs + 2 {
			for link := range maxGPUs + 2 {
				out = append(out, LinkSample{GPU: gpu, Link: link, State: "idle", Bytes: 1, InFlight: 2,
					Rate: 3, Returned: 4})
			}
		}
		return out
	}
	if err := New(reg).Links(reg, []string{"idle", "dead"}, read); err != nil {
		t.Fatal(err)
	}
	const series = maxGPUs * maxGPUs
	for name, want := range map[string]int{"bytes_total": series, "in_flight_bytes": series,
		"learned_bytes_per_second": series, "chunks_returned_total": series, "state": 2 * series} {
		n, err := testutil.GatherAndCount(reg, "kvspray_gpu_link_"+name)
		if err != nil || n != want {
			t.Errorf("%s: %d series, want %d: %v", name, n, want, err)
		}
	}
}
