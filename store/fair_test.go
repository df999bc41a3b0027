package store

import (
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store/page"
)

func request(sp *Space, put bool, pages int) *Batch {
	return &Batch{space: sp, put: put, keys: make([]page.Key, pages)}
}

func flooded(t *testing.T, s *stage, sp *Space, put bool, requests int) {
	t.Helper()
	for range requests {
		if err := s.beginRequest(request(sp, put, 1000)); err != nil {
			t.Fatal(err)
		}
	}
}

// requestsOf is the first stage of a store, without its workers.
func requestsOf(workers int) *stage {
	return newStage(requests, workers, (&Store{}).requestSize, nil)
}

// readsOf is a stage that reads 256 pages at once.
func readsOf(workers int) *stage {
	return newStage(objectReads, workers, func(_ *Batch, pages []int, _ bool) int {
		return min(len(pages), 256)
	}, nil)
}

func spaces() (loud, quiet *Space) {
	st := &Store{}
	return &Space{s: st, pageBytes: 4096}, &Space{s: st, pageBytes: 4096}
}

// However much one namespace asks for, another one's request begins with the next piece.
func TestTheNextPieceIsTheQuietOnes(t *testing.T) {
	for _, put := range []bool{false, true} {
		s := requestsOf(8)
		loud, quiet := spaces()
		flooded(t, s, loud, put, 500)
		for range 20 {
			b, _ := s.take()
			s.finishPiece(b)
		}
		for range 3 {
			if err := s.beginRequest(request(quiet, put, 4)); err != nil {
				t.Fatal(err)
			}
			b, pages := s.take()
			if b.space != quiet || pages[0] != 0 || len(pages) != 4 {
				t.Fatalf("put %v: the flood goes first", put)
			}
			s.finishPiece(b)
			for range 5 { // it does not save up for what it did not ask for
				if b, _ = s.take(); b.space != loud {
					t.Fatal("nothing of the flood")
				}
				s.finishPiece(b)
			}
		}
	}
}

// Two floods have half each, by bytes.
func TestNamespacesShareByBytes(t *testing.T) {
	s := requestsOf(8)
	large, small := spaces()
	large.pageBytes = 64 << 10
	flooded(t, s, large, false, 50)
	flooded(t, s, small, false, 50)
	served := map[*Space]int{}
	for range 400 {
		b, pages := s.take()
		served[b.space] += len(pages) * b.space.pageBytes
		s.finishPiece(b)
	}
	if a, b := served[large], served[small]; a < b*9/10 || b < a*9/10 {
		t.Errorf("%d and %d bytes", a, b)
	}
}

// A flood never has all workers while another namespace asks.
func TestWorkersAreInReserve(t *testing.T) {
	s := requestsOf(8)
	s.fair.copiers(4)
	loud, quiet := spaces()
	flooded(t, s, loud, false, 500)
	for range 8 {
		s.take() // no other one asks: it has all
	}
	for range 8 {
		s.finishPiece(&Batch{space: loud})
	}
	flooded(t, s, quiet, false, 1)
	b, _ := s.take()
	s.finishPiece(b)
	for s.nextOf(0) != nil {
		s.take()
	}
	if s.fair.busy != 3 {
		t.Errorf("%d workers copy on 4 processors, want 3", s.fair.busy)
	}
	s.fair.switched = time.Now().Add(-2 * atOnce)
	if s.nextOf(0) == nil {
		t.Error("workers are idle although no other namespace asks any more")
	}
}

// However many requests a namespace has under way, others find room.
func TestRoomForRequestsOfOthers(t *testing.T) {
	s := requestsOf(8)
	loud, quiet := spaces()
	var err error
	n := 0
	for ; err == nil; n++ {
		err = s.beginRequest(request(loud, false, 1))
	}
	if !errors.Is(err, ErrOverloaded) || n < MaxBatches/2 || n > MaxBatches*3/4 {
		t.Errorf("%d requests: %v", n, err)
	}
	flooded(t, s, quiet, false, 100)
	for range s.open {
		b, pages := s.take()
		s.finishPiece(b)
		if pages[0]+len(pages) == len(b.keys) {
			s.endRequest(b)
		}
	}
	if err := s.beginRequest(request(loud, false, 1)); err != nil {
		t.Error(err)
	}
}

// The same for what only other nodes or the object store have.
func TestFetchesAreShared(t *testing.T) {
	f := readsOf(16)
	loud, quiet := spaces()
	var pages []int
	for i := range 1000 {
		pages = append(pages, i)
	}
	for range 100 {
		f.add(request(loud, false, 1000), pages)
	}
	for range 20 {
		b, _ := f.take()
		f.finishPiece(b)
	}
	f.add(request(quiet, false, 4), pages[:4])
	if b, _ := f.take(); b.space != quiet {
		t.Fatal("the flood goes first")
	}
	running := 0
	for f.nextOf(0) != nil {
		f.take()
		running++
	}
	if running != 16-16/reserveShare-1 {
		t.Errorf("%d of 16", running)
	}
}

// Goroutines that slept while several namespaces asked go on when only one is left.
func TestTheReserveWakesUp(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		f := readsOf(8)
		loud, _ := spaces()
		f.fair.switched = time.Now()
		var mu sync.Mutex
		taken := 0
		more := make(chan struct{})
		for range 8 {
			go func() {
				for {
					b, _ := f.take()
					if b == nil {
						return
					}
					mu.Lock()
					taken++
					mu.Unlock()
					<-more
					f.finishPiece(b)
				}
			}()
		}
		for range 20 {
			f.add(request(loud, false, 1), []int{0})
		}
		synctest.Wait()
		if taken != 6 {
			t.Errorf("%d of 8 work while others may ask", taken)
		}
		time.Sleep(2 * atOnce)
		more <- struct{}{} // one comes back
		synctest.Wait()
		if taken != 9 {
			t.Errorf("%d were taken: all 8 are to work, and one has come back", taken)
		}
		close(more)
		f.close()
	})
}
