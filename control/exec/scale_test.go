//go:build !race

package exec

import (
	"runtime"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// crowd is an executor with n transfers open, all of which have everything to send; step confirms a slice.
func crowd(t *testing.T, n int) (step func()) {
	const tokens, receivers = 1024, 4 // 4 MiB each
	s := newSim(t, 1, 0)
	cfg := Config{Transports: []string{"shm", "tcp"}}
	p := s.node("p:1", cfg)
	pw := p.worker()
	var open []*simLease
	for r := range receivers {
		d := s.node("d:"+string(rune('1'+r)), cfg)
		dw := d.worker()
		for i := range n / receivers {
			id := uint64(r*n + i + 1)
			k := testKey(byte(id), byte(id>>8))
			k.Xfer[5], k.Xfer[6] = byte(r), byte(id>>16)
			open = append(open, p.intent(pw, id, k, tokens, 1, time.Minute))
			d.expect(dw, id, k, "p:1", tokens, 0, time.Minute)
		}
	}
	s.run(s.now+time.Second, func() bool { return false })
	if got := p.ex.Load(); got.Sources != n || got.Inbound != n {
		t.Fatalf("%+v, want %d open and bound", got, n)
	}
	// From here on the lanes are the test's.
	var b Batch
	var flying []transport.Result
	head := 0
	collect := func() {
		for p.ex.Drain(&b) {
			for _, a := range b.Actions {
				for _, sl := range a.Slices {
					flying = append(flying, transport.Result{Slice: sl, Outcome: transfer.Landed})
				}
			}
		}
	}
	for _, l := range open {
		for layer := range simLayers {
			p.ex.Progress(s.now, pw, []connector.Progress{{Lease: l.id, Layer: layer, Tokens: tokens, Final: true}})
			collect()
		}
	}
	done := make([]transport.Result, 1)
	return func() {
		if head == len(flying) {
			t.Fatal("ran out of slices")
		}
		done[0] = flying[head]
		if head++; head > 1<<12 {
			flying = append(flying[:0], flying[head:]...)
			head = 0
		}
		s.now += 20 * time.Microsecond
		p.ex.Results(s.now, done)
		collect()
	}
}

// sliceGoal is what a slice may cost, from its confirmation to the one that takes its place.
const sliceGoal = 2 * time.Microsecond

// TestTenThousandOpen: a slice costs the same whether a hundred transfers are open or ten thousand, and moving allocates nothing that stays.
// Left out under the race detector, as all that measures; make test-sim runs it.
func TestTenThousandOpen(t *testing.T) {
	const batch = 200
	cost := func(n int) (best time.Duration, grew int64) {
		step := crowd(t, n)
		for range batch {
			step()
		}
		var before, after runtime.MemStats
		runtime.GC()
		runtime.GC() // what the first one found unused
		runtime.ReadMemStats(&before)
		best = time.Hour
		for range 10 { // the best of them is what nobody else disturbed
			began := time.Now()
			for range batch {
				step()
			}
			best = min(best, time.Since(began)/batch)
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		runtime.KeepAlive(step) // and all that it moves: else this would be measured without
		return best, int64(after.HeapAlloc) - int64(before.HeapAlloc)
	}
	few, _ := cost(100)
	many, grew := cost(10000)
	t.Logf("a slice: %s with 100 open, %s with 10,000; the heap grew by %d KiB in %d slices", few, many, grew>>10, 10*batch)
	if many > 3*few+time.Microsecond || many > sliceGoal {
		t.Errorf("a slice costs %s with 10,000 open and %s with 100: want no more, and %s at most", many, few, sliceGoal)
	}
	if grew > 1<<20 {
		t.Errorf("the heap grew by %d bytes", grew)
	}
}
