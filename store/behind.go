package store

import (
	"context"
	"fmt"
	"sync"
)

// behind counts the pages of puts that go to the disk after their results. Each piece of a put has
// a number, in the order in which pieces begin, so that a flush waits for those before it only. At
// most one piece of each worker is open.
type behind struct {
	mu    sync.Mutex // guards what follows
	ended sync.Cond
	last  uint64         // the number of the piece that began last
	open  map[uint64]int // pages, by the piece's number
}

func newBehind() *behind {
	b := &behind{open: map[uint64]int{}}
	b.ended.L = &b.mu
	return b
}

func (b *behind) begin(pages int) (piece uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last++
	b.open[b.last] = pages
	return b.last
}

func (b *behind) end(piece uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.open, piece)
	b.ended.Broadcast()
}

// wait returns when all pieces have ended that have begun before.
func (b *behind) wait(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.ended.Broadcast()
	})
	defer stop()
	b.mu.Lock()
	defer b.mu.Unlock()
	last := b.last
	for {
		pages := 0
		for piece, n := range b.open {
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
		b.ended.Wait()
	}
}
