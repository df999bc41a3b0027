package metrics

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvspray/kvspray/transfer"
)

// BenchmarkSlice is what counting a slice costs: it happens for every one.
func BenchmarkSlice(b *testing.B) {
	s := New(prometheus.NewRegistry())
	b.ReportAllocs()
	for b.Loop() {
		s.Slice("tcp", "eth0", transfer.Landed, transfer.ReasonNone, 1<<20)
	}
}
