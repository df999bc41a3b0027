package store

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store/memory"
	"github.com/kvspray/kvspray/store/page"
)

// Of the flood: pages as large as those of 16 tokens of a small model on one rank.
const (
	floodPage     = 64 << 10
	floodBatch    = 64 // pages of a request of the flood
	floodRequests = 64 // of the flood, under way at the same time
	quietBatch    = 8  // pages of a get of the other tenant
	quietPages    = 256
)

// tenant is a namespace with blocks for pages.
type tenant struct {
	t     testing.TB
	space *Space
	ns    page.Namespace
	pool  *Pool
	lent  *mem.Region
}

func newTenant(t testing.TB, s *Store, name string, blocks int, inMemory Share) *tenant {
	t.Helper()
	ns := namespace(name, floodPage)
	sp, err := s.Space(ns, Shares{Memory: inMemory})
	if err != nil {
		t.Fatal(err)
	}
	n := &tenant{t: t, space: sp, ns: ns}
	if n.lent, err = mem.NewAnonymous(name, uint64(blocks*floodPage)); err != nil {
		t.Fatal(err)
	}
	if n.pool, err = NewPool([]Piece{{n.lent, 0, floodPage, floodPage}}, blocks); err != nil {
		t.Fatal(err)
	}
	return n
}

func (n *tenant) close() {
	n.space.Close()
	n.lent.Release()
}

func (n *tenant) keys(from, count int) []page.Key {
	e := engine{t: n.t, keyer: n.ns.Keyer()} // a Keyer belongs to one goroutine
	return e.keys(upTo(from, from+count))
}

// move gets or puts pages in the blocks from at on, and waits.
func (n *tenant) move(put bool, keys []page.Key, at int) []Result {
	blocks := make([]uint32, len(keys))
	for i := range blocks {
		blocks[i] = uint32(at + i)
	}
	var b *Batch
	var err error
	if put {
		b, err = n.space.Put(keys, nil, n.pool, blocks)
	} else {
		b, err = n.space.Get(keys, n.pool, blocks)
	}
	if err != nil {
		n.t.Error(err)
		return nil
	}
	<-b.Done()
	return b.Results()
}

// quiet gets pages one request after the other, for a time, and returns how long they took, in
// order, and how many pages were no hits.
func (n *tenant) quiet(d time.Duration) (took []time.Duration, missed int) {
	all := n.keys(0, quietPages)
	for end, i := time.Now().Add(d), 0; time.Now().Before(end); i++ {
		keys := all[i*quietBatch%quietPages:][:quietBatch]
		began := time.Now()
		rs := n.move(false, keys, 0)
		took = append(took, time.Since(began))
		missed += quietBatch - count(rs, Hit)
		<-time.After(time.Millisecond) // it does not ask all the time
	}
	slices.Sort(took)
	return took, missed
}

// flood gets and puts all the time, until the returned function is called, which returns how many
// requests there were.
func (n *tenant) flood() (stop func() uint64) {
	var wg sync.WaitGroup
	var over atomic.Bool
	var requests atomic.Uint64
	old := n.keys(0, 1024)
	fresh := n.keys(1<<20, 8*floodRequests*floodBatch) // more than its share holds: they go and come
	for r := range floodRequests {
		get := old[r*floodBatch%len(old):][:floodBatch]
		puts := slices.Collect(slices.Chunk(fresh[8*r*floodBatch:][:8*floodBatch], floodBatch))
		wg.Go(func() {
			for i := 0; !over.Load(); i++ {
				if r%2 == 0 {
					n.move(true, puts[i%len(puts)], r*floodBatch)
				} else {
					n.move(false, get, r*floodBatch)
				}
				requests.Add(1)
			}
		})
	}
	return func() uint64 {
		over.Store(true)
		wg.Wait()
		return requests.Load()
	}
}

// burn keeps all processors but one busy with copies that have nothing to do with the store.
func burn() (stop func()) {
	var wg sync.WaitGroup
	var over atomic.Bool
	for range max(1, runtime.GOMAXPROCS(0)-1) {
		wg.Go(func() {
			from, to := make([]byte, 8<<20), make([]byte, 8<<20)
			for !over.Load() {
				copy(to, from)
			}
		})
	}
	return func() { over.Store(true); wg.Wait() }
}

func at(took []time.Duration, perMille int) time.Duration { return took[len(took)*perMille/1000] }

func shown(took []time.Duration) string {
	return fmt.Sprintf("%d gets: p50 %v, p90 %v, p99 %v", len(took), at(took, 500), at(took, 900),
		at(took, 990))
}

// A tenant that floods the store slows another one's gets little: the 99th percentile of their
// times is at most 1.5 times as long. The same beside copies outside of the store shows what of it
// is the processors'.
func TestMeasureFlood(t *testing.T) {
	testutil.Measures(t)
	const d = 4 * time.Second
	s, err := Open(Config{Memory: memory.Config{Bytes: 256 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	quiet := newTenant(t, s, "quiet", quietPages, Share{})
	defer quiet.close()
	loud := newTenant(t, s, "loud", floodRequests*floodBatch, Share{Quota: 128 << 20})
	defer loud.close()
	quiet.move(true, quiet.keys(0, quietPages), 0)
	loud.move(true, loud.keys(0, 1024), 0)
	alone, missed := quiet.quiet(d)
	end := burn()
	burned, m := quiet.quiet(d)
	end()
	stop := loud.flood()
	beside, n := quiet.quiet(d)
	requests := stop()
	t.Logf("alone: %s", shown(alone))
	t.Logf("beside copies outside of the store: %s", shown(burned))
	t.Logf("beside %d requests of %d pages: %s", requests, floodBatch, shown(beside))
	if missed+m+n > 0 {
		t.Errorf("%d pages of the quiet tenant are gone, within its share", missed+m+n)
	}
	if limit := max(at(alone, 990), at(burned, 990)) * 3 / 2; at(beside, 990) > limit {
		t.Errorf("p99 %v, more than %v", at(beside, 990), limit)
	}
}
