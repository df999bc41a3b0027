package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/transport"
)

// Outcome is how one page of a batch ended.
type Outcome uint8

// The outcomes.
const (
	Pending  Outcome = iota
	Hit              // the block has the page
	Miss             // no tier has it
	Stored           // it was put
	Existed          // it was here
	Busy             // another put of it is under way
	Full             // no page can be given up for it
	Damaged          // it was here, and was not what had been put; it is dropped
	Canceled         // the batch was canceled before
	Failed           // Err is the reason
)

// Tier is where a page was found or is.
type Tier uint8

// The tiers.
const (
	NoTier Tier = iota
	Memory
	Disk
	Object
	Peer // another node
)

func (t Tier) String() string {
	return [...]string{"none", "memory", "disk", "object", "peer"}[t]
}

// Result is the end of one page of a batch.
type Result struct {
	Outcome Outcome
	Tier    Tier  // of a Hit: where it was found
	Durable bool  // of a put: it survives a loss of power
	Err     error // of Failed, and of a put that is not durable and should be
	// Of a Hit: a copy in a nearer tier was damaged, and is dropped.
	Replaced bool
}

// Batch is a Get or a Put under way. Its methods can be called from any goroutine.
type Batch struct {
	space   *Space
	put     bool
	keys    []page.Key
	after   *page.Key
	pool    *Pool // its regions are held until the end
	blocks  []uint32
	results []Result

	guard      transport.Guard
	unresolved atomic.Int64 // pages without a result
	// pages that a worker has not finished with: after the results of a put, it may write them
	inUse atomic.Int64
	done  chan struct{}
	then  atomic.Pointer[func()] // called at the end; &ended: it has come
	ctx   context.Context        // of reads of the object tier and of other nodes, if there are any
	stop  context.CancelFunc
}

// Done is closed when every page has its Result and the blocks are not touched any more.
func (b *Batch) Done() <-chan struct{} { return b.done }

var ended func()

// Then has f called once when the batch is done: by the goroutine that ends it, which must not wait
// for long, or at once. Then is called once.
func (b *Batch) Then(f func()) {
	if !b.then.CompareAndSwap(nil, &f) {
		f()
	}
}

// Results are in the order of the keys. They may be read when Done is closed.
func (b *Batch) Results() []Result { return b.results }

// PageBytes is the size of each page.
func (b *Batch) PageBytes() int { return b.space.pageBytes }

// Cancel ends the batch early. Pages that are done stay so, the others end as Canceled. It does
// not wait.
func (b *Batch) Cancel() {
	b.guard.Revoke()
	if b.stop != nil {
		b.stop()
	}
}

// Fence returns once nothing is written to, or read from, the blocks of a batch that was
// canceled or is done. It waits for copies that are under way, and for no disk.
func (b *Batch) Fence(ctx context.Context) error {
	if err := b.guard.Wait(ctx); err != nil {
		return fmt.Errorf("store: fence: %w", err)
	}
	return nil
}

// RequestError is a request that cannot be right.
type RequestError struct{ Field, Problem, Remedy string }

func (e *RequestError) Error() string {
	return fmt.Sprintf("store: request field %s: %s; %s", e.Field, e.Problem, e.Remedy)
}

func checkKeys(n int) error {
	if n < 1 || n > page.MaxBatch {
		return &RequestError{"keys", fmt.Sprintf("%d keys", n), fmt.Sprintf("send 1 to %d",
			page.MaxBatch)}
	}
	return nil
}

// check refuses blocks that are not of the pool or, where they are written, come twice; and takes
// hold of the regions.
func (b *Batch) check() error {
	if err := checkKeys(len(b.keys)); err != nil {
		return err
	}
	if b.pool.pageBytes != b.space.pageBytes {
		return &RequestError{"pool", fmt.Sprintf("its blocks have %d bytes", b.pool.pageBytes),
			fmt.Sprintf("pages of this namespace have %d", b.space.pageBytes)}
	}
	if len(b.blocks) != len(b.keys) {
		return &RequestError{"blocks", fmt.Sprintf("%d for %d keys", len(b.blocks), len(b.keys)),
			"send one for each key"}
	}
	if r := b.pool.readOnly; r != nil && !b.put {
		return &RequestError{"pool", "region " + r.ID().String() + " may only be read",
			"get into memory of your own"}
	}
	for i, n := range b.blocks {
		if uint64(n) >= uint64(b.pool.blocks) {
			return &RequestError{fmt.Sprintf("blocks[%d]", i), fmt.Sprint(n),
				fmt.Sprintf("the pool has blocks 0 to %d", b.pool.blocks-1)}
		}
	}
	if !b.put {
		if err := b.once(); err != nil {
			return err
		}
	}
	return b.hold()
}

// once refuses a block that comes twice.
func (b *Batch) once() error {
	order := make([]uint64, len(b.blocks)) // block and index, of 32 bits each
	for i, n := range b.blocks {
		order[i] = uint64(n)<<32 | uint64(i)
	}
	slices.Sort(order)
	for i := 1; i < len(order); i++ {
		if order[i-1]>>32 == order[i]>>32 {
			return &RequestError{fmt.Sprintf("blocks[%d]", uint32(order[i])),
				fmt.Sprintf("is block %d, as blocks[%d] is", order[i]>>32, uint32(order[i-1])),
				"get each page to a block of its own"}
		}
	}
	return nil
}

func (b *Batch) hold() error {
	for i, r := range b.pool.regions {
		if !r.Acquire() {
			for _, held := range b.pool.regions[:i] {
				held.Release()
			}
			return fmt.Errorf("store: region %s: %w", r.ID(), mem.ErrFreed)
		}
	}
	return nil
}

// ErrClosed is returned after Close.
var ErrClosed = errors.New("store: closed")

// ErrOverloaded is returned when too many requests are under way, in all or of one namespace.
var ErrOverloaded = errors.New("store: no room for another request; wait for one to end")

// unuse counts pages that no goroutine works at any more.
func (b *Batch) unuse(pages int) {
	if pages > 0 && b.inUse.Add(-int64(pages)) == 0 {
		b.space.users.Add(-1)
	}
}

// finish counts pages of a batch that have their results. The last one ends the batch.
func (s *Store) finish(b *Batch, pages int) {
	if pages == 0 || b.unresolved.Add(-int64(pages)) > 0 {
		return
	}
	s.stages[requests].endRequest(b)
	b.guard.Revoke() // no worker is in it any more, and none will be
	for _, r := range b.pool.regions {
		r.Release()
	}
	if b.stop != nil {
		b.stop()
	}
	close(b.done)
	if f := b.then.Swap(&ended); f != nil {
		(*f)()
	}
}
