package connector_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/transfer"
)

// TestSourceValidNeverLate is the central property: once the engine has moved the epoch for a
// lease, no reader gets the answer that its bytes are valid, however engine, readers, completions
// and sessions interleave. A lease that lost no block is valid again once the ring names the
// affected lease.
func TestSourceValidNeverLate(t *testing.T) {
	r := start(t, nil)
	w := r.worker(t, func(c *connectortest.Config) { c.SubmissionBytes = board.RingMinBytes })
	up := r.lastUp(t)

	type source struct {
		id   transfer.LeaseID
		gone atomic.Bool // set once the epoch has moved
	}
	var (
		mu      sync.Mutex
		sources []*source
		byID    = map[uint64]*source{}
	)
	var valid, invalid atomic.Int64
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for n := range 4 {
		readers.Add(1)
		go func() {
			defer readers.Done()
			rnd := rand.New(rand.NewPCG(uint64(n), 7))
			for {
				select {
				case <-stop:
					return
				default:
				}
				mu.Lock()
				var s *source
				if len(sources) > 0 {
					s = sources[rnd.IntN(len(sources))]
				}
				mu.Unlock()
				if s == nil {
					continue
				}
				// "the bytes were read here": after the blocks were given away
				gone := s.gone.Load()
				if !up.SourceValid(s.id) {
					invalid.Add(1)
					continue
				}
				valid.Add(1)
				if gone {
					t.Errorf("lease %s is valid after its blocks were given away", s.id)
					return
				}
			}
		}()
	}

	rnd := rand.New(rand.NewPCG(1, 2))
	deadline := time.Now().Add(1500 * time.Millisecond)
	var live []uint64
	seen := 0
	push := func(f func() error) {
		for f() != nil { // the ring is full: the sidecar is behind
			if time.Now().After(deadline.Add(time.Minute)) {
				t.Fatal("the ring stays full")
			}
		}
	}
	for time.Now().Before(deadline) && !t.Failed() {
		switch k := rnd.IntN(10); {
		case k < 4 && len(live) < 64:
			id := w.NewLease()
			push(func() error { return w.IntentAs(id, intent(64, 1, 2, 3, 4)) })
			seen++
			r.rec.until(t, "intent", func() bool { return len(r.rec.intents) == seen })
			s := &source{id: r.rec.seen().intents[seen-1].Lease}
			mu.Lock()
			sources, byID[id] = append(sources, s), s
			mu.Unlock()
			live = append(live, id)
		case k < 8 && len(live) > 0: // give a lease's blocks away
			i := rnd.IntN(len(live))
			s := byID[live[i]]
			live = append(live[:i], live[i+1:]...)
			w.BumpEpoch()
			s.gone.Store(true)
			typ := uint16(board.RecPreempt)
			if rnd.IntN(2) == 0 {
				typ = board.RecCancel
			}
			push(func() error { return w.Push(typ, s.id.ID, (&msg.Empty{}).Append(nil), false) })
		// the control layer ends one; the engine may then reuse the blocks without a word
		case len(live) > 0:
			i := rnd.IntN(len(live))
			s := byID[live[i]]
			live = append(live[:i], live[i+1:]...)
			must(t, r.Complete(up, engines.Completion{Lease: s.id, Status: board.OK}))
			s.gone.Store(true)
			if _, _, err := w.Poll(); err != nil {
				t.Fatal(err)
			}
		}
	}
	// Nothing else moves now: what is live is valid.
	for _, id := range live {
		eventually(t, fmt.Sprintf("lease %d stays invalid although nothing touched it", id),
			func() bool { return up.SourceValid(byID[id].id) })
	}
	close(stop)
	readers.Wait()
	t.Logf("%d leases; readers found them valid %d times, invalid %d times", seen, valid.Load(),
		invalid.Load())
	if valid.Load() == 0 || invalid.Load() == 0 {
		t.Error("the test saw only one answer")
	}
}

// TestTakeoverUnderLoad reconnects again and again while leases are opened, completed and asked
// about.
func TestTakeoverUnderLoad(t *testing.T) {
	r := start(t, nil)
	r.rec.atIntent(func(w *engines.Worker, in engines.Intent) {
		w.SourceValid(in.Lease)
		if in.Lease.ID%2 == 0 {
			// may race with the takeover
			_ = r.Complete(w, engines.Completion{Lease: in.Lease, Status: board.OK})
		}
	})
	w := r.worker(t, nil)
	for range 30 {
		for range 20 {
			_, err := w.Intent(intent(64, 1, 2, 3, 4))
			must(t, err)
		}
		up := r.lastUp(t)
		asked := make(chan struct{})
		go func() {
			defer close(asked)
			for i := range 1000 {
				up.SourceValid(transfer.LeaseID{Boot: up.Boot, ID: uint64(i), Epoch: uint32(i)})
			}
		}()
		_, err := w.Connect(testContext(t))
		must(t, err)
		<-asked
	}
	r.rec.until(t, "every older session gone", func() bool { return len(r.rec.gone) == 30 })
	eventually(t, "no lease is open after the last takeover", func() bool { return r.Leases() == 0 })
}
