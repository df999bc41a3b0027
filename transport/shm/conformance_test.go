package shm

import (
	"context"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

func backend(tb testing.TB) transport.Backend {
	return New(Config{Dir: testutil.ShortDir(tb), Workers: 2})
}

func TestConformance(t *testing.T) { transporttest.Conformance(t, backend) }

// With as many workers as a large host has: slices of device memory are asked for by askers, where
// they are large or follow each other.
func TestDevice(t *testing.T) {
	transporttest.ConformanceOnDevice(t, func(_ testing.TB,
		d *transporttest.Device) transporttest.Factory {
		return func(tb testing.TB) transport.Backend {
			return New(Config{Dir: testutil.ShortDir(tb), Workers: 8, Devices: d})
		}
	})
}

// A reader that polls after a hint passes the suite like a sleeping one.
func TestConformanceAfterHints(t *testing.T) {
	transporttest.Conformance(t, func(tb testing.TB) transport.Backend {
		return hinter{New(Config{Dir: testutil.ShortDir(tb), Workers: 2, pollers: 1, hinted: time.Hour,
			stay: 10 * time.Millisecond})}
	})
}

// hinter sends a hint on each lane as soon as it is up.
type hinter struct{ transport.Backend }

func (r hinter) Dial(ctx context.Context, peer transport.Peer, local, remote transport.Rail) (
	transport.Lane, error) {
	l, err := r.Backend.Dial(ctx, peer, local, remote)
	if err == nil {
		l.(transport.WakeHinter).WakeHint()
	}
	return l, err
}

// Pulls copy many megabytes at a time.
func TestMeasureCollectorDelayOfPulls(t *testing.T) {
	testutil.Measures(t)
	transporttest.NewMover(t, backend, transporttest.Shape{Chunks: 64, BlockBytes: 1 << 20,
		Shuffle: true}).LetsCollectorIn(16)
}

func BenchmarkTransport(b *testing.B) { transporttest.Benchmark(b, backend) }
