package pages

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/store/disk"
	"github.com/kvspray/kvspray/store/memory"
)

const (
	besidePairs = 15
	besideIdle  = 30_000 // pages of a tenant that does nothing, on the disk
	besideGet   = 8      // pages of a get
)

// A tenant that removes its namespace in a loop slows another one's gets little: the 99th
// percentile of their times is at most 1.5 times as long, also where the removals come between
// puts. It is measured without and with removals in turns, and the median of the ratios counts.
// The store is on a real file.
func TestMeasureRemovalsInALoop(t *testing.T) {
	testutil.Measures(t)
	const d = 3 * time.Second
	r := startWith(t, store.Config{Memory: memory.Config{Bytes: 16 << 20,
		SlabBytes: 64 << 10}, Disk: &disk.Config{
		Devices: []disk.Device{{Path: t.TempDir(), Size: 512 << 20}}, MaxPages: 2 * besideIdle}})
	ended := map[*engines.Worker]chan engines.Completion{r.w: r.ended}
	r.o.Complete = func(w *engines.Worker, c engines.Completion) error {
		ended[w] <- c
		return nil
	}
	another := func(name string) (w *engines.Worker, move func(put bool, pages []int)) {
		w, p := r.another(name)
		ended[w] = make(chan engines.Completion, 1)
		var last uint64
		return w, func(put bool, pages []int) {
			last++
			q := connector.Pages{Put: put, Pool: p.ID, Hashes: hashes(pages...), Deadline: time.Minute}
			for i := range pages {
				q.Blocks = append(q.Blocks, uint32(i))
			}
			q.Lease.ID = last
			r.Start(w, q)
			if c := <-ended[w]; c.Status != engines.StatusOK {
				t.Errorf("%s: %+v", name, c)
			}
		}
	}
	_, idle := another("idle")
	for at := 0; at < besideIdle; at += blocks {
		idle(true, upTo(at, at+blocks))
	}
	loud, loudMove := another("loud")
	ns := testNamespace("loud")
	for _, c := range []struct {
		what  string
		pages int // that the gets have in turns: 64 are in memory, 8,192 are not
		puts  bool
	}{{"memory", 64, false}, {"memory, beside puts", 64, true}, {"disk", 8192, false},
		{"disk, beside puts", 8192, true}} {
		for at := 0; at < c.pages; at += blocks {
			r.put(upTo(at, at+blocks)...)
		}
		tiers, next := map[store.Tier]int{}, 0
		p99 := func() time.Duration {
			var took []time.Duration
			for end := time.Now().Add(d); time.Now().Before(end); next += besideGet {
				from := next % c.pages
				q := r.request(false, upTo(from, from+besideGet)...)
				began := time.Now()
				got := r.serve(q)
				took = append(took, time.Since(began))
				for _, x := range got.Pages {
					if outcome, tier := connector.SplitPageResult(x); store.Outcome(outcome) == store.Hit {
						tiers[store.Tier(tier)]++
					}
				}
			}
			slices.Sort(took)
			return took[len(took)*99/100]
		}
		removals, fresh := 0, 1<<20
		loop := func(puts, removes bool) (stop func()) {
			var over atomic.Bool
			var wg sync.WaitGroup
			wg.Go(func() {
				for !over.Load() {
					if puts {
						fresh += blocks
						loudMove(true, upTo(fresh, fresh+blocks))
					}
					if !removes { // as often as removals go
						<-time.After(100 * time.Millisecond)
						continue
					}
					if _, err := r.Remove(loud, ns.ID()); err != nil {
						t.Error(err)
					}
					removals++
				}
			})
			return func() { over.Store(true); wg.Wait() }
		}
		var ratios []float64
		var rows []string
		for range besidePairs {
			stop := loop(c.puts, false)
			without := p99()
			stop()
			stop = loop(c.puts, true)
			with := p99()
			stop()
			ratios = append(ratios, float64(with)/float64(without))
			rows = append(rows, fmt.Sprintf("%v and %v", without, with))
		}
		slices.Sort(ratios)
		t.Logf("%s: p99 %.2f times as long (%.2f to %.2f), beside %d removals; hits by tier %v; %s",
			c.what, ratios[besidePairs/2], ratios[0], ratios[besidePairs-1], removals, tiers,
			strings.Join(rows, ", "))
		if ratios[besidePairs/2] > 1.5 {
			t.Errorf("%s: more than 1.5 times as long", c.what)
		}
	}
}
