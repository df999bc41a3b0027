package connector_test

import (
	"slices"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// BenchmarkIntent is from INTENT on the ring to SENT seen by the shim, both asleep in between.
func BenchmarkIntent(b *testing.B) {
	var s *connector.Server
	// Completing every intent at once leaves the path into the connector and back.
	r := start(b, func(o *connector.Options) {
		o.Events = func(batch []engines.Event) {
			for _, ev := range batch {
				switch ev.Kind {
				case engines.SourceOpened:
					_ = s.Complete(ev.Worker, engines.Completion{Lease: ev.Intent.Lease, Status: board.OK})
				case engines.WorkerGone:
					ev.Fenced()
				}
			}
		}
	})
	s = r.Server
	reg := region(b, shape)
	w, err := connectortest.DialWorker(testContext(b), connectortest.Config{Socket: r.socket,
		Layout: shape.Layout(), Regions: []*mem.Region{reg}})
	must(b, err)
	defer w.Close()
	in := intent(16, 1)
	ctx := b.Context()
	var took []time.Duration
	b.ReportAllocs()
	for b.Loop() {
		at := time.Now()
		if _, err := w.Intent(in); err != nil {
			b.Fatal(err)
		}
		if _, err := w.Wait(ctx); err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(at))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "p50-us")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1e3, "p99-us")
}

// BenchmarkSourceValid is what a lane pays after each read of source bytes.
func BenchmarkSourceValid(b *testing.B) {
	r := start(b, nil)
	w := r.worker(b, nil)
	_, err := w.Intent(intent(16, 1))
	must(b, err)
	r.rec.until(b, "intent", func() bool { return len(r.rec.intents) == 1 })
	up, lease := r.lastUp(b), r.rec.seen().intents[0].Lease
	b.ReportAllocs()
	for b.Loop() {
		if !up.SourceValid(lease) {
			b.Fatal("not valid")
		}
	}
}
