package store

import (
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/offheap"
)

// MaxBatches bounds the requests that are under way. One namespace has so many only that twice as
// many as are left would be its own: others find room whatever it does.
const MaxBatches = 2048

// openShare: a namespace has at most openShare times as many requests under way as are left.
const openShare = 2

// putTurns: one turn in so many is owed to puts while gets wait.
const putTurns = 8

// Of pieces of batches.
const (
	// copied in a tenth of a millisecond or so, before others have their turn.
	getPieceBytes = 1 << 20
	maxPiecePages = 64
	// While several namespaces ask, a piece of a get is 1/shortPiece as long.
	shortPiece = 4
)

// schedule hands pieces of batches to workers: gets before puts, namespaces by what they were
// served (fair), batches of a namespace in turns. Puts wait for disks, so they have some of the
// workers only: a get finds one that does not write.
type schedule struct {
	putters int // workers that may be in a put at the same time

	mu      sync.Mutex // guards what follows
	wake    sync.Cond
	fair    fair
	waiting [2][]*Space // that have gets, puts with pages that no worker has taken
	turn    int
	open    int
	puts    int // workers that are in one
	closed  bool
}

// newSchedule makes a schedule for so many workers. One worker alone does both.
func newSchedule(workers int) *schedule {
	s := &schedule{putters: max(1, workers/2), fair: newFair(workers)}
	s.wake.L = &s.mu
	return s
}

func classOf(b *Batch) int {
	if b.put {
		return 1
	}
	return 0
}

func (s *schedule) add(b *Batch) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	sp, class := b.space, classOf(b)
	f := &sp.flows[byWorkers]
	switch {
	case s.closed:
		return ErrClosed
	case f.open >= openShare*(MaxBatches-s.open):
		return fmt.Errorf("store: %d requests are under way, %d of namespace %s: %w", s.open, f.open,
			sp.id, ErrOverloaded)
	}
	s.open++
	f.open++
	if sp.batches[class] = append(sp.batches[class], b); len(sp.batches[class]) == 1 {
		s.waiting[class] = append(s.waiting[class], sp)
	}
	if s.fair.may(f) { // otherwise a worker looks for it after its piece
		s.wake.Signal()
	}
	return nil
}

// next is the namespace of a class that goes next; nil: there is none that may.
func (s *schedule) next(class int) (best *Space) {
	for _, sp := range s.waiting[class] {
		f := &sp.flows[byWorkers]
		if (s.closed || s.fair.may(f)) && (best == nil ||
			s.fair.compare(f, &best.flows[byWorkers]) < 0) {
			best = sp
		}
	}
	return best
}

// take waits for work: pages [from, to) of a batch; nil when there is none and never will be. The
// worker calls gave after it.
func (s *schedule) take() (b *Batch, from, to int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var sp *Space
	var class int
	for {
		sp, class = s.next(0), 0
		if s.puts < s.putters && (sp == nil || (s.turn+1)%putTurns == 0) {
			if put := s.next(1); put != nil {
				sp, class = put, 1
			}
		}
		if sp != nil {
			break
		}
		if s.closed && len(s.waiting[1]) == 0 {
			return nil, 0, 0
		}
		s.wake.Wait()
	}
	s.turn++
	s.puts += class
	q := sp.batches[class]
	b = q[0]
	from = b.next
	most := sp.piece(b.put)
	if !b.put && s.fair.several() {
		most = max(1, most/shortPiece) // others wait for its end
	}
	to = min(len(b.keys), from+most)
	b.next = to
	q[0] = nil
	q = q[1:]
	if to < len(b.keys) {
		q = append(q, b)
	}
	if sp.batches[class] = q; len(q) == 0 {
		sp.batches[class] = nil
		s.waiting[class] = slices.DeleteFunc(s.waiting[class], func(x *Space) bool { return x == sp })
	}
	s.fair.begin(&sp.flows[byWorkers], uint64((to-from)*sp.pageBytes))
	if s.next(0) != nil || s.puts < s.putters && s.next(1) != nil {
		s.wake.Signal() // one worker wakes the next
	}
	return b, from, to
}

// gave ends a worker's piece of a batch, and reports whether several namespaces ask.
func (s *schedule) gave(b *Batch) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fair.end(&b.space.flows[byWorkers])
	s.puts -= classOf(b)
	if s.closed {
		s.wake.Broadcast() // all end, if this was the last piece
	} else if b.put {
		s.wake.Signal()
	}
	return s.fair.several()
}

// ended counts a batch that is done.
func (s *schedule) ended(b *Batch) {
	s.mu.Lock()
	s.open--
	b.space.flows[byWorkers].open--
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
		} else {
			to -= s.getPages(b, from, to, &w)
		}
		several := s.schedule.gave(b) // before the space's last user may be gone
		s.done(b, to-from)
		if several {
			runtime.Gosched() // the request that waits for this piece goes on before the next piece
		}
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
		s.count(b.space, &r)
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
	s.schedule.ended(b)
	b.guard.Revoke() // no worker is in it any more, and none will be
	for _, r := range b.pool.regions {
		r.Release()
	}
	if b.stop != nil {
		b.stop()
	}
	close(b.done)
}
