package object

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/catalog"
	"github.com/kvspray/kvspray/store/index"
	"github.com/kvspray/kvspray/store/offheap"
	"github.com/kvspray/kvspray/store/page"
)

// Pages that other tiers give up.
const (
	spillers  = 2
	maxSpills = 256 // pages that wait to be read from the tier that evicts them
)

// builder is the bytes of an object that is not uploaded yet. Its memory has room for the longest
// header, and then the pages: a header that is shorter begins later.
type builder struct {
	x       *object
	mem     *offheap.Array[byte]
	room    int // for the header
	pages   int // that it has room for
	entries []entry
	moves   []move // of the entries, where they come from; of a merge only
	filling int    // pages that are being copied in
	sealed  bool   // it takes no more pages
	queued  bool
	done    bool
	began   time.Time
	since   uint64 // the change of the ledger that its object's era needs
}

// page is where page i has its bytes.
func (b *builder) page(i uint32) []byte {
	size := b.x.owner.pageBytes
	off := b.room + int(i)*size
	return b.mem.Elems()[off : off+size : off+size]
}

// builderLocked makes a builder, unless all buffers are in use.
func (t *Tier) builderLocked(o *Owner) (*builder, error) {
	if t.buffers == t.c.Buffers {
		return nil, ErrNoRoom
	}
	e, ok := t.eraLocked(o)
	if !ok {
		return nil, ErrRemoved
	}
	n := t.perObject(o.pageBytes)
	b := &builder{room: (headerBytes(n) + 4095) / 4096 * 4096, pages: n, began: time.Now()}
	var err error
	if b.mem, err = offheap.New[byte](b.room + n*o.pageBytes); err != nil {
		return nil, err
	}
	if b.x, err = t.newObjectLocked(o, e.era, t.nextLifeLocked()); err != nil {
		b.mem.Free()
		return nil, err
	}
	b.x.b, b.since = b, e.since
	t.buffers++
	return b, nil
}

// takingLocked is the builder that takes an owner's next page. Where all buffers are in use, the
// fullest one of another owner that still takes pages is uploaded.
func (t *Tier) takingLocked(o *Owner) (*builder, error) {
	if o.builder != nil {
		return o.builder, nil
	}
	b, err := t.builderLocked(o)
	if errors.Is(err, ErrRemoved) {
		return nil, err
	}
	if err != nil {
		var fullest *builder
		for _, other := range t.numbers {
			if other != nil && other.builder != nil && (fullest == nil ||
				len(other.builder.entries) > len(fullest.entries)) {
				fullest = other.builder
			}
		}
		if fullest != nil {
			t.sealLocked(fullest)
		}
		return nil, err
	}
	o.builder = b
	return b, nil
}

// sealLocked ends a builder: it is uploaded as soon as its pages are copied in.
func (t *Tier) sealLocked(b *builder) {
	b.sealed = true
	if o := b.x.owner; o.builder == b {
		o.builder = nil
	}
	if b.filling == 0 && !b.queued {
		b.queued = true
		t.queue = append(t.queue, b)
		t.wake.Broadcast()
	}
}

// reserve makes room for a page. The caller copies it to b.page(i) and calls fill.
func (t *Tier) reserveLocked(o *Owner, k, after *page.Key) (b *builder, i uint32, n index.Node,
	err error) {
	switch {
	case t.closed:
		return nil, 0, 0, ErrClosed
	case t.state == opening:
		return nil, 0, 0, ErrAway
	case t.state == stopped:
		return nil, 0, 0, t.problem
	case t.pages.Readable(t.pages.Find(k), o.number):
		return nil, 0, 0, catalog.ErrExists
	}
	if b, err = t.takingLocked(o); err != nil {
		return nil, 0, 0, err
	}
	n, err = t.pages.Begin(o.number, k, after, func() (uint32, error) {
		if err := t.roomLocked(o); err != nil {
			return 0, err
		}
		i = uint32(len(b.entries))
		e := entry{key: *k}
		if after != nil {
			e.after = *after
		}
		b.entries = append(b.entries, e)
		loc := b.x.number<<placeBits | i
		t.countLocked(loc, 1)
		return loc, nil
	})
	if err == nil {
		b.filling++
	}
	if len(b.entries) == b.pages {
		t.sealLocked(b)
	}
	return b, i, n, err
}

// fill ends what reserve began. sum is that of the buffer's page. err: the page is not there.
func (t *Tier) fill(b *builder, i uint32, n index.Node, crc, sum uint32, err error) error {
	if err == nil && sum != crc { // a bit may have flipped in memory, too
		err = ErrDamaged
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err == nil {
		b.entries[i].crc, b.entries[i].whole = crc, true
		t.pages.Finish(n, crc)
		t.stats.Added++
	} else if !t.fallBackLocked(b, i, n) {
		t.pages.Doom(n)
	}
	t.pages.Drop(n)
	if b.filling--; b.sealed {
		t.sealLocked(b)
	}
	return err
}

// Add copies a page into a buffer. It does not wait for the object store. It returns
// catalog.ErrExists and ErrBusy if the page is here or on its way, and other errors if it is not
// taken. wanted is as for disk.Tier.Write; nil: no removal has begun.
func (o *Owner) Add(k, after *page.Key, data []byte, crc uint32, wanted func() bool) error {
	t := o.t
	t.mu.Lock()
	if wanted != nil && !wanted() {
		t.mu.Unlock()
		return ErrRemoved
	}
	b, i, n, err := t.reserveLocked(o, k, after)
	if err != nil {
		t.droppedLocked(err)
		t.mu.Unlock()
		return err
	}
	t.mu.Unlock()
	sum := mem.CopyCRC32C(0, b.page(i), data)
	if err := t.fill(b, i, n, crc, sum, nil); err != nil {
		return fmt.Errorf("store.object: page %s changed in memory: %w", k, err)
	}
	return nil
}

func (t *Tier) droppedLocked(err error) {
	if !isHere(err) {
		t.stats.Dropped++
	}
}

// spill is a page that another tier gives up, and that has its place here.
type spill struct {
	b    *builder
	i    uint32
	node index.Node
	crc  uint32
	read func(buf []byte) error
}

// Spill takes a page that another tier gives up. It returns whether it will call read, once, with
// a buffer that the page's bytes go to, or with nil. Spill does not wait.
func (o *Owner) Spill(k, after *page.Key, crc uint32, read func(buf []byte) error) bool {
	t := o.t
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.spills) == cap(t.spills) { // only this lock's holders add
		t.stats.Dropped++
		return false
	}
	b, i, n, err := t.reserveLocked(o, k, after)
	if err != nil {
		t.droppedLocked(err)
		return false
	}
	t.spills <- spill{b, i, n, crc, read}
	return true
}

// fetchSpills reads pages that other tiers evict.
func (t *Tier) fetchSpills() {
	for s := range t.spills {
		err := s.read(s.b.page(s.i))
		// An error loses the page, as without Spill.
		_ = t.fill(s.b, s.i, s.node, s.crc, mem.CRC32C(0, s.b.page(s.i)), err)
	}
}

// Flush uploads all buffers, and returns once all pages that were added before are durable, or
// could not be made so.
func (t *Tier) Flush(ctx context.Context) error {
	var waiting []*builder
	t.mu.Lock()
	for _, x := range t.objects {
		if x != nil && x.b != nil && !x.b.done && x.b.moves == nil {
			if !x.b.sealed {
				t.sealLocked(x.b)
			}
			waiting = append(waiting, x.b)
		}
	}
	t.mu.Unlock()
	return t.until(ctx, func() (bool, error) {
		for _, b := range waiting {
			if !b.done {
				return false, nil
			}
		}
		return true, nil
	})
}
