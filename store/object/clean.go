package object

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/index"
)

// Bounds of cleaning.
const (
	cleanEvery  = time.Second // at least, where there is something to clean
	maxDeletes  = 64          // in one round
	manySmall   = 16          // objects of one namespace that are merged though they have little
	mostlyDead  = 2           // less than 1/mostlyDead of an object's pages are here
	hardlyWorth = 10          // an object with less dead than 1/hardlyWorth is not cleaned
)

// waitForWork returns when there is something to do; false: the tier was closed.
func (t *Tier) waitForWork() bool {
	ctx, cancel := context.WithTimeout(t.ctx, cleanEvery)
	defer cancel()
	_ = t.until(ctx, func() (bool, error) { return t.closed || t.dirty, nil })
	t.mu.Lock()
	defer t.mu.Unlock()
	return !t.closed && t.state != stopped && t.ctx.Err() == nil
}

// tidy is one round of the keeper: its work is bounded.
func (t *Tier) tidy() {
	t.mu.Lock()
	for _, o := range t.numbers {
		if o != nil && o.builder != nil && len(o.builder.entries) > 0 &&
			time.Since(o.builder.began) > t.c.MaxAge {
			t.sealLocked(o.builder)
		}
	}
	if !t.dirty {
		t.mu.Unlock()
		return
	}
	t.dirty = false
	dead := t.deadLocked()
	t.mu.Unlock()
	for _, x := range dead {
		if !t.delete(x) {
			t.again()
			return
		}
	}
	if victims := t.choose(); len(victims) > 0 {
		if !t.merge(victims) {
			t.again()
			return
		}
	}
}

// again has the keeper try later what failed.
func (t *Tier) again() {
	if t.sleep(cleanEvery) {
		t.mu.Lock()
		t.dirty = true
		t.mu.Unlock()
	}
}

// deadLocked lists objects without pages without readers, and forgets those that were never sent.
func (t *Tier) deadLocked() (dead []*object) {
	for _, x := range t.objects {
		if x == nil || x.live > 0 || x.readers > 0 || x.kept > 0 || x.busy || x.b != nil {
			continue
		}
		if !x.stored && !x.doomed {
			t.forgetLocked(x)
			continue
		}
		if len(dead) == maxDeletes {
			t.dirty = true
			break
		}
		x.busy = true
		dead = append(dead, x)
	}
	return dead
}

func (t *Tier) deleteName(ctx context.Context, name string, limit time.Duration) error {
	_, err := try(ctx, t, limit, "delete "+name, func(ctx context.Context) (int, error) {
		return 0, t.c.Bucket.Delete(ctx, name)
	})
	return err
}

func (t *Tier) delete(x *object) bool {
	err := t.deleteName(t.ctx, x.name(t), t.c.Timeouts.Small)
	t.mu.Lock()
	defer t.mu.Unlock()
	x.busy = false
	if err != nil {
		return false
	}
	t.forgetLocked(x)
	t.stats.Deleted++
	return true
}

// choose names objects of one namespace whose pages are merged into one object: the one that is
// most worth it, and others that fit.
func (t *Tier) choose() []*object {
	t.mu.Lock()
	defer t.mu.Unlock()
	tight := t.stored > t.c.Size
	worth := map[*Owner][]*object{}
	var best *object
	share := func(x *object) float64 { return float64(x.live) / float64(x.pages) }
	for _, x := range t.objects {
		if x == nil || !x.stored || x.live == 0 || x.busy || x.b != nil {
			continue
		}
		full := t.perObject(x.owner.pageBytes)
		dead := x.live*mostlyDead < x.pages || tight && (x.pages-x.live)*hardlyWorth > x.pages
		if dead || x.pages*2 < min(full, MinObjectBytes/x.owner.pageBytes) {
			worth[x.owner] = append(worth[x.owner], x)
		}
		if dead && (best == nil || share(x) < share(best)) {
			best = x
		}
	}
	for o, list := range worth {
		if best == nil && (len(list) >= manySmall || livePages(list)*o.pageBytes >= MinObjectBytes &&
			len(list) > 1) {
			best = list[0]
		}
	}
	if best == nil {
		return nil
	}
	list := worth[best.owner]
	slices.SortFunc(list, func(a, b *object) int {
		if a == best || b == best {
			return map[bool]int{true: -1, false: 1}[a == best]
		}
		return cmp.Compare(a.live, b.live)
	})
	n, room := 0, t.perObject(best.owner.pageBytes)
	for n < len(list) && n < maxDeletes && list[n].live <= room {
		room -= list[n].live
		n++
	}
	return list[:n]
}

func livePages(list []*object) (n int) {
	for _, x := range list {
		n += x.live
	}
	return n
}

// move is a page that is merged into another object.
type move struct {
	node index.Node // pinned
	loc  uint32
	bad  bool
}

// merge copies the pages that victims still have into a new object and, once that is durable,
// places them there. Until then they are where they were.
func (t *Tier) merge(victims []*object) bool {
	t.mu.Lock()
	// Its life is given before the pages are looked up: a removal in between counts for it.
	b, err := t.builderLocked(victims[0].owner)
	if err != nil {
		t.mu.Unlock()
		return false
	}
	b.moves = []move{}
	for _, x := range victims {
		x.busy = true
		x.readers++
	}
	t.mu.Unlock()
	ok := true
	for _, x := range victims {
		if ok = t.gather(b, x); !ok {
			break
		}
	}
	b.sealed = true
	sent := false
	if err = ErrMissing; ok && len(b.moves) > 0 {
		t.mu.Lock()
		err = t.unwantedLocked(b)
		t.mu.Unlock()
		if sent = err == nil; sent {
			err = t.send(t.ctx, b)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, m := range b.moves {
		e := t.pages.At(m.node)
		switch {
		case e.Loc != m.loc:
		case m.bad:
			t.stats.Damaged++
			t.pages.Doom(m.node)
		case err == nil && b.entries[i].whole:
			t.countLocked(m.loc, -1)
			e.Loc = b.x.number<<placeBits | uint32(i)
			t.countLocked(e.Loc, 1)
			t.stats.Moved++
		}
		t.pages.Drop(m.node)
	}
	for _, x := range victims {
		x.busy = false
		x.readers--
	}
	b.done = true
	b.x.stored, b.x.doomed = err == nil, err != nil && sent
	t.returnLocked(b.x)
	t.touchLocked()
	t.wake.Broadcast()
	return ok && (err == nil || !sent)
}

// gather copies the pages that an object still has.
func (t *Tier) gather(b *builder, x *object) bool {
	h, err := t.readHeader(listed{x.name(t), x.life, int64(x.bytes)})
	if err != nil {
		return t.lose(x, err)
	}
	size := x.owner.pageBytes
	for i := 0; i < len(h.entries); {
		first := len(b.entries)
		n := 0
		t.mu.Lock()
		for n == 0 && i < len(h.entries) { // pages that lie one after another
			for i < len(h.entries) && len(b.entries) < b.pages &&
				(n == 0 || h.entries[i].at == h.entries[i-1].at+h.pageBytes) &&
				(n+1)*size <= max(MaxRangeBytes, size) && t.holdLocked(b, x, h, i) {
				n++
				i++
			}
			if n == 0 {
				i++
			}
		}
		t.mu.Unlock()
		if n == 0 {
			continue
		}
		at := int64(h.entries[i-n].at)
		to := b.room + first*size
		if err := t.readRange(t.ctx, x.name(t), at, b.mem.Elems()[to:to+n*size]); err != nil {
			return t.lose(x, err)
		}
		for j := first; j < first+n; j++ {
			e, m := &b.entries[j], &b.moves[j]
			e.whole = mem.CRC32C(0, b.page(uint32(j))) == e.crc
			m.bad = !e.whole
		}
	}
	return true
}

// holdLocked pins page i of an object if it is still there, and makes it the next entry of b.
func (t *Tier) holdLocked(b *builder, x *object, h *header, i int) bool {
	e := h.entries[i]
	n := t.pages.Find(&e.key)
	loc := x.number<<placeBits | (e.at-h.begin)/h.pageBytes
	if !t.pages.Readable(n, x.owner.number) || t.pages.At(n).Loc != loc {
		return false
	}
	t.pages.Hold(n)
	e.whole, e.crc = false, t.pages.At(n).CRC
	b.entries = append(b.entries, e)
	b.moves = append(b.moves, move{node: n, loc: loc})
	return true
}

// lose gives up the pages of an object that is gone, or is not the one that it was. It returns
// whether that is why it could not be read.
func (t *Tier) lose(x *object, err error) bool {
	foreign := isForeign(err)
	if !lost(err) && !foreign {
		return false
	}
	if foreign {
		t.passOver(x.name(t), err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	x.stored = x.stored && !foreign // it is not deleted then
	for n := index.Node(1); n <= t.pages.Last() && x.live > 0; n++ {
		e := t.pages.At(n)
		if e.State == index.Live && e.Loc>>placeBits == x.number && !e.Doomed {
			t.pages.Hold(n)
			t.pages.Doom(n)
			t.pages.Drop(n)
			t.stats.Missing++
		}
	}
	return true
}
