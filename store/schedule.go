// SPDX-License-Identifier: Apache-2.0

package store

import (
	"sync"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/offheap"
)

// MaxBatches bounds the requests that are under way.
const MaxBatches = 1024

// putTurns: one turn in so many is owed to puts while gets wait.
const putTurns = 8

// Of pieces of batches.
const (
	// copied in a tenth of a millisecond or so, before others have their turn.
	getPieceBytes = 1 << 20
	maxPiecePages = 64
)

// schedule hands pieces of batches to workers: gets before puts, batches of a class in turns. Puts
// wait for disks, so they have some of the workers only: a get finds one that does not write.
type schedule struct {
	putters int // workers that may be in a put at the same time

	mu     sync.Mutex // guards what follows
	wake   sync.Cond
	queues [2][]*Batch // gets, puts; with pages that no worker has taken
	turn   int
	open   int
	puts   int // workers that are in one
	closed bool
}

// newSchedule makes a schedule for so many workers. One worker alone does both.
func newSchedule(workers int) *schedule {
	s := &schedule{putters: max(1, workers/2)}
	s.wake.L = &s.mu
	return s
}

func (s *schedule) add(b *Batch) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return ErrClosed
	case s.open == MaxBatches:
		return ErrOverloaded
	}
	s.open++
	class := 0
	if b.put {
		class = 1
	}
	s.queues[class] = append(s.queues[class], b)
	s.wake.Broadcast()
	return nil
}

// take waits for work: pages [from, to) of a batch; nil when there is none and never will be. The
// worker calls gave after a piece of a put.
func (s *schedule) take() (b *Batch, from, to int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	mayPut := func() bool { return len(s.queues[1]) > 0 && s.puts < s.putters }
	for len(s.queues[0]) == 0 && !mayPut() {
		if s.closed && len(s.queues[1]) == 0 {
			return nil, 0, 0
		}
		s.wake.Wait()
	}
	s.turn++
	class := 0
	if mayPut() && (len(s.queues[0]) == 0 || s.turn%putTurns == 0) {
		class = 1
		s.puts++
	}
	q := s.queues[class]
	b = q[0]
	from = b.next
	to = min(len(b.keys), from+b.space.piece(b.put))
	b.next = to
	q[0] = nil
	q = q[1:]
	if to < len(b.keys) {
		q = append(q, b)
	}
	s.queues[class] = q
	return b, from, to
}

// gave ends a worker's piece of a put.
func (s *schedule) gave() {
	s.mu.Lock()
	s.puts--
	if s.closed {
		s.wake.Broadcast() // all end, if this was the last piece
	} else {
		s.wake.Signal()
	}
	s.mu.Unlock()
}

// ended counts a batch that is done.
func (s *schedule) ended() {
	s.mu.Lock()
	s.open--
	s.mu.Unlock()
}

// close lets workers end once the queues are empty.
func (s *schedule) close() {
	s.mu.Lock()
	s.closed = true
	s.wake.Broadcast()
	s.mu.Unlock()
}

// worker is one goroutine's memory.
type worker struct {
	buffer *offheap.Array[byte] // for pages that find no slot
	place  []mem.Block          // of the block that is copied
}

func (w *worker) room(n int) ([]byte, error) {
	if w.buffer == nil || len(w.buffer.Elems()) < n {
		w.buffer.Free()
		var err error
		if w.buffer, err = offheap.New[byte](n); err != nil {
			return nil, err
		}
	}
	return w.buffer.Elems()[:n], nil
}

// placeOf returns the memory of block i of a batch, until the next call.
func (w *worker) placeOf(b *Batch, i int) []mem.Block {
	w.place = b.pool.place(w.place[:0], b.blocks[i])
	return w.place
}

func (s *Store) work() {
	defer s.workers.Done()
	var w worker
	defer func() { w.buffer.Free() }()
	for {
		b, from, to := s.schedule.take()
		if b == nil {
			return
		}
		if b.put {
			s.putPages(b, from, to, &w)
			s.schedule.gave()
		} else {
			to -= s.getPages(b, from, to, &w)
		}
		s.done(b, to-from)
	}
}

// done counts pages of a batch that no goroutine works at any more.
func (s *Store) done(b *Batch, pages int) {
	if pages > 0 && b.working.Add(-int64(pages)) == 0 {
		b.space.users.Add(-1)
	}
}

// getPages gets pages [from, to) of a batch from memory and disk, and leaves the others to the
// fetchers. It returns how many these are.
func (s *Store) getPages(b *Batch, from, to int, w *worker) int {
	var left, remote []int
	for i := from; i < to; i++ {
		r := s.getPage(b, i, w)
		b.results[i] = r
		if r.Outcome == Miss || r.Outcome == Damaged || r.Outcome == Failed {
			if s.peers != nil {
				remote = append(remote, i)
				continue
			}
			if s.object != nil && b.space.object.Has(&b.keys[i]) {
				left = append(left, i)
				continue
			}
		}
		s.count(&r)
	}
	n := len(left) + len(remote)
	s.finish(b, to-from-n)
	if len(left) > 0 {
		s.fetches.add(b, left)
	}
	if len(remote) > 0 {
		s.peerFinds.add(b, remote)
	}
	return n
}

// finish counts pages of a batch that have their results. The last one ends the batch.
func (s *Store) finish(b *Batch, pages int) {
	if pages == 0 || b.left.Add(-int64(pages)) > 0 {
		return
	}
	s.schedule.ended()
	b.guard.Revoke() // no worker is in it any more, and none will be
	for _, r := range b.pool.regions {
		r.Release()
	}
	if b.stop != nil {
		b.stop()
	}
	close(b.done)
}
