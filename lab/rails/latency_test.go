package rails

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/lab/railsbench"
	"github.com/kvspray/kvspray/lab/railsbench/netrig"
	"github.com/kvspray/kvspray/lab/timeline"
)

// received is what has come over all rails.
func received(t *testing.T, f *railsbench.Field) (sum uint64) {
	t.Helper()
	c, err := f.Rig.Counters(netrig.Receiver)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	v := make([]uint64, f.Rig.Rails())
	if err := c.Read(v); err != nil {
		t.Fatal(err)
	}
	for _, n := range v {
		sum += n
	}
	return sum
}

// A decode that waits for one small block is not kept waiting by the background: its p99 grows by
// no more than two slices of the fastest rail, one that is on the wire and one that is in the
// socket.
func TestUrgentBesideBackground(t *testing.T) {
	only(t, long)
	sliceTime := 1050 * time.Microsecond // 256 KiB at 2 Gbit/s
	if tenth {
		sliceTime = 2620 * time.Microsecond // 64 KiB, the least slice, at 200 Mbit/s
	}
	const n = 4000
	f := open(t, railsbench.Setup{Rates: goal(t)})
	bulk := engines(t, f, 16*kib, total(), 3)
	small := engines(t, f, 4*kib, 4*kib, 4)
	transfer(t, bulk, railsbench.Order{}) // the rails are known
	measure := func() (out []time.Duration) {
		for range n {
			x := transfer(t, small, railsbench.Order{Priority: msg.PrioDecodeWaits})
			out = append(out, x.Ended.Sub(x.Began))
		}
		return out
	}
	plain := together(t, f)
	alone := measure()

	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			var all []*railsbench.Transfer
			for ctx.Err() == nil {
				x, err := bulk.Begin(ctx, railsbench.Order{Priority: msg.PrioBackground})
				if err != nil {
					return // ctx ended
				}
				all = append(all, x.Landed())
			}
			for _, x := range all {
				if x.Wait(); x.Err != nil {
					t.Error(x.Err)
				}
			}
		})
	}
	after(t, 500*time.Millisecond)
	from, begun := received(t, f), time.Now()
	loaded := measure()
	carried := timeline.RateOf(received(t, f)-from, time.Since(begun))
	stop()
	wg.Wait()
	// Beside a background that has pauses there is no wait.
	if carried < plain*8/10 {
		t.Errorf("the background carried %s, plain streams carry %s: this tests nothing", carried, plain)
	}
	a, l := quantile(alone, 0.99), quantile(loaded, 0.99)
	t.Logf("%d transfers of 4 KiB: alone p50 %v, p99 %v; beside a background of %s p50 %v, p99 %v", n,
		median(alone), a, carried, median(loaded), l)
	if limit := a + 2*sliceTime; l > limit {
		t.Errorf("p99 beside background %v, alone %v: want %v at most", l, a, limit)
	}
}
