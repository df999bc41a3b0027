package store

import (
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/memory"
	"github.com/kvspray/kvspray/store/offheap"
	"github.com/kvspray/kvspray/store/page"
)

// The stages of a store.
const (
	requests = iota // gets and puts in memory and on the disk
	peerFinds
	peerReads
	objectReads
	stages
)

// MaxBatches bounds the requests that are under way.
const MaxBatches = 2048

// openShare: a namespace has at most openShare times as many requests under way as there is room
// for, so that others find room whatever it does.
const openShare = 2

// putTurns: while gets wait, one turn in putTurns is owed to puts.
const putTurns = 8

// stage is goroutines of one kind, and the pages that wait for them. It hands out pieces of
// batches: gets before puts, namespaces by what they were served (fair), batches of a namespace in
// turns. Puts wait for disks, so they have some of the workers only: a get finds one that does not
// write.
type stage struct {
	kind    int
	putters int // workers that may be in a put at the same time
	// size is how many of the pages one piece takes; several: namespaces ask. It is called with the
	// lock held.
	size func(b *Batch, pages []int, several bool) int
	// run works at a piece, and returns how many of its pages go to no other stage.
	run    func(b *Batch, pages []int, w *worker) int
	joined sync.WaitGroup

	mu      sync.Mutex // guards what follows
	wake    sync.Cond
	fair    fair
	waiting [2][]*flow // that have gets, puts with pages that no worker has taken
	turn    int
	open    int // requests under way
	puts    int // workers that are in one
	closed  bool
}

// piece is pages of one batch, in their order.
type piece struct {
	b     *Batch
	pages []int
}

// allPages are the pages of the largest batch.
var allPages = func() (out [page.MaxBatch]int) {
	for i := range out {
		out[i] = i
	}
	return out
}()

func newStage(kind, workers int, size func(*Batch, []int, bool) int,
	run func(*Batch, []int, *worker) int) *stage {
	s := &stage{kind: kind, putters: max(1, workers/2), fair: newFair(workers), size: size, run: run}
	s.wake.L = &s.mu
	return s
}

// start starts the workers of a stage; nil: there is none.
func (s *stage) start() {
	if s == nil {
		return
	}
	for range s.fair.workers {
		s.joined.Go(s.work)
	}
}

func classOf(b *Batch) int {
	if b.put {
		return 1
	}
	return 0
}

// beginRequest queues all pages of a request. endRequest follows.
func (s *stage) beginRequest(b *Batch) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := &b.space.flows[s.kind]
	switch {
	case s.closed:
		return ErrClosed
	case f.open >= openShare*(MaxBatches-s.open):
		return fmt.Errorf("store: %d requests are under way, %d of namespace %s: %w", s.open, f.open,
			b.space.id, ErrOverloaded)
	}
	s.open++
	f.open++
	s.addLocked(f, piece{b, allPages[:len(b.keys):len(b.keys)]})
	return nil
}

// endRequest counts a request that is done.
func (s *stage) endRequest(b *Batch) {
	s.mu.Lock()
	s.open--
	b.space.flows[s.kind].open--
	s.mu.Unlock()
}

// add queues pages behind those of the same batch.
func (s *stage) add(b *Batch, pages []int) {
	if len(pages) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f := &b.space.flows[s.kind]
	for i := range f.queues[classOf(b)] {
		if q := &f.queues[classOf(b)][i]; q.b == b {
			q.pages = append(q.pages, pages...)
			return
		}
	}
	s.addLocked(f, piece{b, pages})
}

func (s *stage) addLocked(f *flow, p piece) {
	class := classOf(p.b)
	if f.queues[class] = append(f.queues[class], p); len(f.queues[class]) == 1 {
		s.waiting[class] = append(s.waiting[class], f)
	}
	if s.fair.may(f) { // otherwise a worker looks for it after its piece
		s.wake.Signal()
	}
}

// nextOf is the namespace of a class that goes next; nil: there is none that may.
func (s *stage) nextOf(class int) (best *flow) {
	for _, f := range s.waiting[class] {
		if (s.closed || s.fair.may(f)) && (best == nil || s.fair.compare(f, best) < 0) {
			best = f
		}
	}
	return best
}

func (s *stage) next() (f *flow, class int) {
	f = s.nextOf(0)
	if s.puts < s.putters && (f == nil || (s.turn+1)%putTurns == 0) {
		if put := s.nextOf(1); put != nil {
			return put, 1
		}
	}
	return f, 0
}

// take waits for a piece; one without a batch: there is none and never will be. The worker calls
// finishPiece after it.
func (s *stage) take() (b *Batch, pages []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, class := s.next()
	for f == nil {
		if s.closed && len(s.waiting[1]) == 0 {
			return nil, nil
		}
		s.wake.Wait()
		f, class = s.next()
	}
	s.turn++
	s.puts += class
	q := f.queues[class]
	b, pages = q[0].b, q[0].pages
	n := s.size(b, pages, s.fair.several())
	rest := pages[n:]
	pages = pages[:n:n]
	q[0] = piece{}
	if q = q[1:]; len(rest) > 0 {
		q = append(q, piece{b, rest})
	}
	if f.queues[class] = q; len(q) == 0 {
		f.queues[class] = nil
		s.waiting[class] = slices.DeleteFunc(s.waiting[class], func(x *flow) bool { return x == f })
	}
	s.fair.begin(f, uint64(n*b.space.pageBytes))
	if f, _ := s.next(); f != nil {
		s.wake.Signal() // one worker wakes the next
	}
	return b, pages
}

// finishPiece ends a worker's piece of a batch, and reports whether several namespaces ask.
func (s *stage) finishPiece(b *Batch) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fair.end(&b.space.flows[s.kind])
	s.puts -= classOf(b)
	if s.closed {
		s.wake.Broadcast() // all end, if this was the last piece
	} else if b.put {
		s.wake.Signal()
	}
	return s.fair.several()
}

// close returns once the queues are empty and all workers have ended. nil: there is none.
func (s *stage) close() {
	if s == nil {
		return
	}
	s.mu.Lock()
	s.closed = true
	s.wake.Broadcast()
	s.mu.Unlock()
	s.joined.Wait()
}

func (s *stage) work() {
	var w worker
	defer func() { w.buffer.Free() }()
	for {
		b, pages := s.take()
		if b == nil {
			return
		}
		n := s.run(b, pages, &w)
		several := s.finishPiece(b) // before the space's last user may be gone
		b.unuse(n)
		if several {
			runtime.Gosched() // the request that waits for this piece goes on before the next piece
		}
	}
}

// worker is one goroutine's memory.
type worker struct {
	buffer *offheap.Array[byte] // for pages that find no slot
	place  []mem.Block          // of the block that is copied
	lists  lists                // of pages that are copied together
	pages  []memory.Page        // the same
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
