package shm

import (
	"testing"

	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

func backend(tb testing.TB) transport.Backend { return New(Config{Dir: tb.TempDir(), Workers: 2}) }

func TestConformance(t *testing.T) { transporttest.Conformance(t, backend) }

func TestDevice(t *testing.T) {
	transporttest.ConformanceOnDevice(t, func(_ testing.TB, d *transporttest.Device) transporttest.Factory {
		return func(tb testing.TB) transport.Backend { return New(Config{Dir: tb.TempDir(), Workers: 2, Devices: d}) }
	})
}

func BenchmarkTransport(b *testing.B) { transporttest.Benchmark(b, backend) }
