package tcp

import (
	"testing"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func factory(cfg Config) transporttest.Factory {
	return func(tb testing.TB) transport.Backend {
		tb.Helper()
		b, err := New(cfg)
		if err != nil {
			tb.Fatal(err)
		}
		return b
	}
}

func TestConformance(t *testing.T) { transporttest.Conformance(t, factory(Config{})) }

func TestConformanceCRC32C(t *testing.T) {
	transporttest.Conformance(t, factory(Config{CRC32C: true}))
}

func TestConformanceAEAD(t *testing.T) { transporttest.Conformance(t, factory(Config{AEAD: true})) }

func TestConformanceOnDeviceAEAD(t *testing.T) {
	transporttest.ConformanceOnDevice(t, func(testing.TB,
		*transporttest.Device) transporttest.Factory {
		return factory(Config{AEAD: true})
	})
}

func TestConformanceOnDevice(t *testing.T) {
	transporttest.ConformanceOnDevice(t, func(testing.TB,
		*transporttest.Device) transporttest.Factory {
		return factory(Config{})
	})
}

func TestConformanceOnDeviceCRC32C(t *testing.T) {
	transporttest.ConformanceOnDevice(t, func(testing.TB,
		*transporttest.Device) transporttest.Factory {
		return factory(Config{CRC32C: true})
	})
}

func BenchmarkTCPSealed(b *testing.B) { transporttest.Benchmark(b, factory(Config{AEAD: true})) }

func BenchmarkTCP(b *testing.B) { transporttest.Benchmark(b, factory(Config{})) }
