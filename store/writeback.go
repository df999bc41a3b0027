package store

import (
	"context"
	"fmt"
	"sync"
)

// writeBack counts the pages of puts that go to the disk after their results. Each piece of a put
// has a number, in the order in which pieces begin, so that a flush waits for those before it only.
// At most one piece of each worker is open.
type writeBack struct {
	mu    sync.Mutex // guards what follows
	ended sync.Cond
	last  uint64         // the number of the piece that began last
	open  map[uint64]int // pages, by the piece's number
}

func newWriteBack() *writeBack {
	w := &writeBack{open: map[uint64]int{}}
	w.ended.L = &w.mu
	return w
}

func (w *writeBack) begin(pages int) (piece uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.last++
	w.open[w.last] = pages
	return w.last
}

func (w *writeBack) end(piece uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.open, piece)
	w.ended.Broadcast()
}

// wait returns when all pieces have ended that have begun before.
func (w *writeBack) wait(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.ended.Broadcast()
	})
	defer stop()
	w.mu.Lock()
	defer w.mu.Unlock()
	last := w.last
	for {
		pages := 0
		for piece, n := range w.open {
			if piece <= last {
				pages += n
			}
		}
		if pages == 0 {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("store: %d pages are not on the disk yet: %w", pages, err)
		}
		w.ended.Wait()
	}
}
