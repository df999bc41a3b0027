package store

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store/disk/disktest"
	"github.com/kvspray/kvspray/store/page"
)

// All puts wait for a disk that does not write: gets of pages in memory end all the same.
func TestGetsDoNotWaitForPuts(t *testing.T) {
	sim := disktest.New(simBytes, 1)
	s := onDisk(t, sim, false)
	defer shut(t, s)
	e := newEngine(t, s, "a", 4096)
	defer e.close()
	e.put(1, 2, 3)
	writes := make(chan struct{})
	sim.HoldWrites(func() { <-writes })
	var puts []*Batch
	for i := range 4 * s.stages[requests].fair.workers {
		keys := e.keys(upTo(100+10*i, 110+10*i))
		b, err := e.space.Put(keys, nil, e.pool, e.blocks(len(keys)))
		if err != nil {
			t.Fatal(err)
		}
		puts = append(puts, b)
	}
	for { // until as many are in the disk as ever will be
		st := s.stages[requests]
		st.mu.Lock()
		busy := st.puts
		st.mu.Unlock()
		if busy == st.putters {
			break
		}
		runtime.Gosched()
	}
	gets := newEngine(t, s, "a", 4096)
	defer gets.close()
	b, err := gets.space.Get(gets.keys([]int{1, 2, 3}), gets.pool, gets.blocks(3))
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-b.Done():
		if n := count(b.Results(), Hit); n != 3 {
			t.Errorf("%d of 3 pages", n)
		}
	case <-time.After(20 * time.Second):
		t.Error("a get waits for writes")
	}
	close(writes)
	for _, b := range puts {
		<-b.Done()
	}
}

// A store is closed while workers wait for a turn to put: all of them end after the last put.
func TestCloseEndsWaitingWorkers(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		s := requestsOf(3)
		sp := &Space{s: &Store{}, pageBytes: 4096}
		for range 2 {
			if err := s.beginRequest(&Batch{space: sp, put: true, keys: make([]page.Key, 1)}); err != nil {
				t.Fatal(err)
			}
		}
		first, _ := s.take()
		ended := 0
		for range 2 {
			go func() {
				for b, _ := s.take(); b != nil; b, _ = s.take() {
					t.Error("two workers put")
				}
				s.mu.Lock()
				ended++
				s.mu.Unlock()
			}()
		}
		s.close()
		synctest.Wait()
		s.waiting[1] = nil // the first worker takes the last piece, too
		s.finishPiece(first)
		synctest.Wait()
		if ended != 2 {
			t.Errorf("%d of 2 workers end", ended)
		}
	})
}

// A flush waits for what came before it, however much comes afterwards.
func TestFlushIsBounded(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		b := newWriteBack()
		first := b.begin(3)
		var ended = errors.New("it waits")
		go func() { ended = b.wait(context.Background()) }()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if err := b.wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the first piece is not on the disk: %v", err)
		}
		later := b.begin(5)
		synctest.Wait()
		if ended == nil {
			t.Error("a flush did not wait for what came before")
		}
		b.end(first)
		synctest.Wait()
		if ended != nil {
			t.Errorf("a flush waits for what came later: %v", ended)
		}
		b.end(later)
		if err := b.wait(context.Background()); err != nil {
			t.Error(err)
		}
	})
}

// Requests of all kinds meet Close: each ends, or is refused as closed.
func TestCloseMeetsRequests(t *testing.T) {
	for range 30 {
		s := onDisk(t, disktest.New(simBytes, 1), false)
		e := newEngine(t, s, "a", 4096)
		e.put(upTo(0, 20)...)
		keys := e.keys(upTo(0, 20))
		var wg sync.WaitGroup
		check := func(err error) bool {
			if err != nil && !errors.Is(err, ErrClosed) {
				t.Error(err)
			}
			return err == nil
		}
		for _, ask := range []func() bool{
			func() bool { _, err := e.space.Exists(keys); return check(err) },
			func() bool {
				p, err := e.space.Pin(keys)
				if err == nil {
					p.Release()
				}
				return check(err)
			},
			func() bool { return check(e.space.Remove()) },
			func() bool {
				_, err := s.Space(namespace("b", 4096), Shares{})
				return check(err)
			},
			func() bool { s.Stats(); return !s.isClosed() },
		} {
			wg.Go(func() {
				for ask() {
				}
			})
		}
		pins, err := e.space.Pin(keys)
		if err != nil {
			t.Fatal(err)
		}
		shut(t, s)
		pins.Release()
		wg.Wait()
		e.close()
	}
}

func (s *Store) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}
