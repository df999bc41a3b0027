// SPDX-License-Identifier: Apache-2.0

package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/transport"
)

// MaxPieces bounds the blocks of one placement.
const MaxPieces = 4096

// Outcome is how one page of a batch ended.
type Outcome uint8

// The outcomes.
const (
	Pending  Outcome = iota
	Hit              // the placement has the page
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
)

// Result is the end of one page of a batch.
type Result struct {
	Outcome Outcome
	Tier    Tier  // of a Hit: where it was found
	Durable bool  // of a put: it survives a loss of power
	Err     error // of Failed, and of a put that is not durable and should be
}

// Placement is where a page is in the caller's memory: blocks whose lengths add up to the page's
// bytes.
type Placement []mem.Block

// Batch is a Get or a Put under way. Its methods can be called from any goroutine.
type Batch struct {
	space   *Space
	put     bool
	keys    []page.Key
	after   *page.Key
	places  []Placement
	results []Result
	regions []*mem.Region // each once, held until the end

	guard transport.Guard
	next  int          // the first page that no worker has taken; guarded by the scheduler
	left  atomic.Int64 // pages without a result
	// pages that a worker has not finished with: behind the results of a put, it writes them
	working atomic.Int64
	done    chan struct{}
	ctx     context.Context // of reads of the object tier, if there is one
	stop    context.CancelFunc
}

// Done is closed when every page has its Result and the placements are not touched any more.
func (b *Batch) Done() <-chan struct{} { return b.done }

// Results are in the order of the keys. They may be read when Done is closed.
func (b *Batch) Results() []Result { return b.results }

// Cancel ends the batch early. Pages that are done stay so, the others end as Canceled. It does
// not wait.
func (b *Batch) Cancel() {
	b.guard.Revoke()
	if b.stop != nil {
		b.stop()
	}
}

// Fence returns once nothing is written to, or read from, the placements of a batch that was
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

// span is what one block takes of a region.
type span struct {
	region   int
	from, to uint64
	place    int
}

// check refuses placements that are not a page's, lie outside their regions or, where they are
// written, overlap; and takes hold of the regions.
func (b *Batch) check() error {
	if err := checkKeys(len(b.keys)); err != nil {
		return err
	}
	if len(b.places) != len(b.keys) {
		return &RequestError{"placements", fmt.Sprintf("%d for %d keys", len(b.places),
			len(b.keys)), "send one for each key"}
	}
	var spans []span
	at := map[*mem.Region]int{}
	for i, p := range b.places {
		field := fmt.Sprintf("placements[%d]", i)
		if len(p) > MaxPieces {
			return &RequestError{field, fmt.Sprintf("%d blocks", len(p)),
				fmt.Sprintf("send at most %d", MaxPieces)}
		}
		total := uint64(0)
		for _, m := range p {
			if m.Region == nil || m.Len == 0 {
				return &RequestError{field, "a block without a region or without bytes",
					"leave it out"}
			}
			if err := m.Region.Check(m.Off, m.Len); err != nil {
				return &RequestError{field, err.Error(), "send blocks inside registered regions"}
			}
			if !b.put && m.Region.ReadOnly() {
				return &RequestError{field,
					"region " + m.Region.ID().String() + " may only be read",
					"get into memory of your own"}
			}
			total += m.Len
			if _, ok := at[m.Region]; !ok {
				at[m.Region] = len(b.regions)
				b.regions = append(b.regions, m.Region)
			}
			if !b.put {
				spans = append(spans, span{at[m.Region], m.Off, m.Off + m.Len, i})
			}
		}
		if total != uint64(b.space.pageBytes) {
			return &RequestError{field, fmt.Sprintf("%d bytes", total),
				fmt.Sprintf("pages of this namespace have %d", b.space.pageBytes)}
		}
	}
	if err := overlap(spans); err != nil {
		return err
	}
	return b.hold()
}

func overlap(spans []span) error {
	order := func(x, y span) int {
		return cmp.Or(cmp.Compare(x.region, y.region),
			cmp.Compare(x.from, y.from))
	}
	if !slices.IsSortedFunc(spans, order) { // most lists are
		slices.SortFunc(spans, order)
	}
	for i := 1; i < len(spans); i++ {
		if x, y := spans[i-1], spans[i]; x.region == y.region && y.from < x.to {
			return &RequestError{fmt.Sprintf("placements[%d]", max(x.place, y.place)),
				fmt.Sprintf("overlaps placements[%d]", min(x.place, y.place)),
				"get each page to a place of its own"}
		}
	}
	return nil
}

func (b *Batch) hold() error {
	for i, r := range b.regions {
		if !r.Acquire() {
			for _, held := range b.regions[:i] {
				held.Release()
			}
			return fmt.Errorf("store: region %s: %w", r.ID(), mem.ErrFreed)
		}
	}
	return nil
}

// ErrClosed is returned after Close.
var ErrClosed = errors.New("store: closed")

// ErrOverloaded is returned when MaxBatches requests are under way.
var ErrOverloaded = fmt.Errorf("store: %d requests are under way; wait for one to end", MaxBatches)
