package object

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvspray/kvspray/store/index"
	"github.com/kvspray/kvspray/store/page"
	"golang.org/x/sync/errgroup"
)

func (t *Tier) ledgerName() string { return t.c.Prefix + "ledger.kvspray" }
func (t *Tier) pagesName() string  { return t.c.Prefix + "pages/" }

// begin reads the ledger, or makes one, and makes a new epoch durable in it. It tries all that the
// tier needs rights for.
func (t *Tier) begin(ctx context.Context) error {
	t.book.Lock()
	defer t.book.Unlock()
	limit := t.c.Timeouts.Open
	found, err := t.listSome(ctx, limit, t.pagesName(), "", 1)
	if err != nil {
		return err
	}
	if err := t.probe(ctx, limit); err != nil {
		return err
	}
	// A name that no object has: nothing of another user of the bucket is deleted.
	if err := t.deleteName(ctx, fmt.Sprintf("%snone-%x", t.pagesName(), t.ledger.process),
		limit); err != nil {
		return err
	}
	type loaded struct {
		data []byte
		tag  string
	}
	have, err := try(ctx, t, limit, "read "+t.ledgerName(), func(ctx context.Context) (loaded,
		error) {
		data, tag, err := t.c.Bucket.Load(ctx, t.ledgerName())
		return loaded{data, tag}, err
	})
	was, when := &ledger{eras: map[page.ID]era{}}, Condition{Tag: have.tag}
	switch {
	case errors.Is(err, ErrNotFound) && len(found) > 0:
		return &ConfigError{"prefix", t.c.Prefix, "object " + found[0].name + " is there, and no " +
			"record of namespaces, " + t.ledgerName(), "name another prefix, or empty it yourself: " +
			"its pages are lost"}
	case errors.Is(err, ErrNotFound):
		_, _ = rand.Read(was.store[:]) // never fails
		when = Condition{Absent: true}
	case err != nil:
		return err
	default:
		if was, err = parseLedger(have.data); err != nil {
			return &ConfigError{"prefix", t.c.Prefix, fmt.Sprintf("object %s: %v", t.ledgerName(),
				err), "name another prefix, or empty it yourself"}
		}
	}
	t.mu.Lock()
	t.ledger.store, t.ledger.epoch, t.ledger.eras = was.store, was.epoch+1, was.eras
	first := t.ledger.epoch << epochShift
	pending := maps.Clone(t.pending)
	for id := range pending {
		t.endEraLocked(id)
	}
	t.mu.Unlock()
	if err := t.writeLedger(ctx, limit, when); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for id := range t.pending { // one that came while the ledger was written has had its error
		t.endEraLocked(id)
	}
	clear(t.pending)
	t.life, t.state, t.problem = first, loading, nil
	t.wake.Broadcast()
	return nil
}

// writeEras returns once the object store has these changes of eras. One write does for all
// callers that wait.
func (t *Tier) writeEras(ctx context.Context, changes uint64) error {
	has := func() bool {
		t.mu.Lock()
		defer t.mu.Unlock()
		return t.ledger.durable >= changes
	}
	if has() {
		return nil
	}
	t.book.Lock()
	defer t.book.Unlock()
	if has() {
		return nil
	}
	return t.writeLedger(ctx, t.c.Timeouts.Small, Condition{Tag: t.tag})
}

// writeLedger makes the ledger durable, unless another process has replaced it: then it stops the
// tier. The caller holds book.
func (t *Tier) writeLedger(ctx context.Context, limit time.Duration, when Condition) error {
	t.mu.Lock()
	t.ledger.generation++
	generation, changes := t.ledger.generation, t.ledger.changes
	data := t.ledger.encode()
	t.mu.Unlock()
	taken := false
	tag, err := try(ctx, t, limit, "write "+t.ledgerName(), func(ctx context.Context) (string,
		error) {
		tag, err := t.c.Bucket.Put(ctx, t.ledgerName(), data, when)
		if !errors.Is(err, ErrChanged) {
			return tag, err
		}
		// A write of this process may have changed it, whose answer was lost.
		have, tag, err := t.c.Bucket.Load(ctx, t.ledgerName())
		if err != nil && !errors.Is(err, ErrNotFound) {
			return "", err
		}
		l, err := parseLedger(have)
		switch {
		case err != nil || l.process != t.ledger.process:
			taken = true
			return "", &ConfigError{"prefix", t.c.Prefix, "another process has opened the store " +
				"under it", "give each sidecar a prefix of its own, and restart it"}
		case l.generation != generation:
			when = Condition{Tag: tag}
			return "", errors.New("an earlier write of it came in between")
		}
		return tag, nil
	})
	switch {
	case err == nil:
		t.tag = tag
		t.mu.Lock()
		t.ledger.durable = changes
		maps.DeleteFunc(t.ledger.ended, func(_ page.ID, change uint64) bool {
			return change <= changes
		})
		t.mu.Unlock()
	case taken:
		t.stop(err)
	}
	return err
}

// keep opens the store if Open could not, finds what is in the bucket, and cleans until Close.
func (t *Tier) keep() {
	for t.stateNow() == opening {
		if !t.sleep(firstAway) {
			return
		}
		ctx, cancel := context.WithTimeout(t.ctx, t.c.Timeouts.Open)
		err := t.begin(ctx)
		cancel()
		t.mu.Lock()
		if err != nil && t.state == opening {
			t.problem = err
		}
		t.mu.Unlock()
	}
	if t.stateNow() == stopped || !t.load() {
		return
	}
	for t.waitForWork() {
		t.tidy()
	}
}

func (t *Tier) stateNow() state {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.state
}

// stop ends all writing. Pages of this tier can still be read.
func (t *Tier) stop(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.state, t.problem = stopped, err
	t.wake.Broadcast()
}

// sleep returns false if the tier was closed.
func (t *Tier) sleep(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-t.ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// listed is an object of an earlier start.
type listed struct {
	name string
	life uint64
	size int64
}

// load finds the pages of all earlier starts, the oldest ones first. It goes on until it has all;
// false: the tier was closed, or has stopped.
func (t *Tier) load() bool {
	rest, ok := t.list()
	if !ok {
		return false
	}
	for len(rest) > 0 {
		n := min(len(rest), 4*t.c.Loads)
		failed, err := t.loadSome(rest[:n])
		rest = append(rest[n:], failed...)
		if err != nil && !t.sleep(firstAway) {
			return false
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state != loading {
		return false
	}
	t.state, t.dirty = ready, true
	t.wake.Broadcast()
	return true
}

// list names the objects of earlier starts, the oldest ones first. It goes on until it has all;
// false: the tier was closed, or has stopped.
func (t *Tier) list() (out []listed, ok bool) {
	t.mu.Lock()
	epoch := t.ledger.epoch
	t.mu.Unlock()
	for after, more := "", true; more; {
		some, err := t.listSome(t.ctx, t.c.Timeouts.Small, t.pagesName(), after, ListPage)
		if errors.Is(err, errBackward) {
			t.stop(err)
			return nil, false
		}
		if err != nil {
			if !t.sleep(firstAway) {
				return nil, false
			}
			continue
		}
		for _, l := range some {
			digits := strings.TrimPrefix(l.name, t.pagesName())
			life, err := strconv.ParseUint(digits, 16, 64)
			switch {
			case err != nil || len(digits) != 16 || digits != fmt.Sprintf("%016x", life):
				t.passOver(l.name, errForeign)
			case epochOf(life) < epoch:
				l.life = life
				out = append(out, l)
			}
			after = l.name
		}
		more = len(some) == ListPage
	}
	slices.SortFunc(out, func(a, b listed) int { return cmp.Compare(a.life, b.life) })
	return out, true
}

// errBackward: a list would have no end.
var errBackward = errors.New("store.object: a list does not go forward")

// listSome names up to count of the objects with a prefix whose names come after another one. Up to
// ListPage are one request.
func (t *Tier) listSome(ctx context.Context, limit time.Duration, prefix, after string,
	count int) ([]listed, error) {
	enough := errors.New("enough")
	return try(ctx, t, limit, "list "+prefix, func(ctx context.Context) ([]listed, error) {
		var out []listed
		last := after
		err := t.c.Bucket.List(ctx, prefix, after, func(name string, size int64) error {
			if name <= last || !strings.HasPrefix(name, prefix) {
				return fmt.Errorf("%w: %w", errBackward, &ConfigError{"endpoint", name,
					fmt.Sprintf("was listed with the prefix %q and start-after %q", prefix, last),
					"use an object store that lists in the order of names (ListObjectsV2, start-after)"})
			}
			last = name
			if out = append(out, listed{name: name, size: size}); len(out) == count {
				return enough
			}
			return nil
		})
		if errors.Is(err, enough) {
			err = nil
		}
		return out, err
	})
}

// passOver notes an object that is not touched.
func (t *Tier) passOver(name string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.stats.Foreign++
	if t.problem == nil {
		t.problem = &ConfigError{"prefix", t.c.Prefix, fmt.Sprintf("object %s is passed over: %v",
			name, err), "name another prefix, or remove the object yourself"}
	}
}

// loadSome reads the headers of objects, several at a time, and takes up their pages in order. It
// returns those that could not be read.
func (t *Tier) loadSome(some []listed) (failed []listed, last error) {
	headers := make([]*header, len(some))
	errs := make([]error, len(some))
	var g errgroup.Group
	g.SetLimit(t.c.Loads)
	for i, l := range some {
		g.Go(func() error {
			headers[i], errs[i] = t.readHeader(l)
			return nil
		})
	}
	_ = g.Wait()
	t.mu.Lock()
	ids := t.ledger.byEra()
	t.mu.Unlock()
	for i, l := range some {
		switch err := errs[i]; {
		case err == nil:
			t.mu.Lock()
			t.adoptLocked(headers[i], ids)
			t.mu.Unlock()
		case isForeign(err):
			t.passOver(l.name, err)
		case lost(err): // deleted since it was listed
		default:
			failed, last = append(failed, l), err
		}
	}
	return failed, last
}

// isForeign reports whether an object was read, and is none of this store's or release's.
func isForeign(err error) bool {
	var v errVersion
	return errors.Is(err, errForeign) || errors.Is(err, errOther) || errors.Is(err, errDamaged) ||
		errors.As(err, &v)
}

// firstRead is how much of an object is read to find its header.
const firstRead = 64 << 10

func (t *Tier) readHeader(l listed) (*header, error) {
	t.mu.Lock()
	store := t.ledger.store
	t.mu.Unlock()
	if l.size < headBytes {
		return nil, errForeign
	}
	b := make([]byte, min(l.size, firstRead))
	if err := t.readRange(t.ctx, l.name, 0, b); err != nil {
		return nil, err
	}
	if n := headerLength(b); n > len(b) && int64(n) <= l.size {
		more := make([]byte, n)
		copy(more, b)
		if err := t.readRange(t.ctx, l.name, int64(len(b)), more[len(b):]); err != nil {
			return nil, err
		}
		b = more
	}
	return parse(b, store, l.life, l.size)
}

// adoptLocked takes up the pages of an object, if its era counts. All that is in the bucket is
// found, also what had been given up before. Of a page that is in two objects, the place that was
// found first counts, and a new one of this start before both: the object stays until that one is
// uploaded.
func (t *Tier) adoptLocked(h *header, ids map[page.Era]page.ID) {
	o := t.ended
	if id, ok := ids[h.era]; ok && t.ledger.eras[id].era == h.era {
		if known, err := t.ownerLocked(id, int(h.pageBytes)); err == nil && known.emptying == 0 {
			o = known
		}
	}
	x, err := t.newObjectLocked(o, h.era, h.life)
	if err != nil {
		return
	}
	x.begin, x.pages, x.bytes, x.stored = h.begin, len(h.entries), h.bytes, true
	t.stored += x.bytes
	t.touchLocked()
	if o == t.ended {
		return // it is deleted
	}
	for i := range h.entries {
		e := &h.entries[i]
		n, err := t.pages.Begin(o.number, &e.key, e.before(), func() (uint32, error) {
			if err := t.roomLocked(o); err != nil {
				return 0, err
			}
			loc := x.number<<placeBits | (e.at-h.begin)/h.pageBytes
			t.countLocked(loc, 1)
			return loc, nil
		})
		if isHere(err) {
			t.keepLocked(x, e, (e.at-h.begin)/h.pageBytes)
		}
		if err != nil {
			continue
		}
		t.pages.Finish(n, e.crc)
		t.pages.Drop(n)
	}
}

// olderAt is where an object of an earlier start has a page that was put again before that object
// was found. It counts if the new one cannot be uploaded.
type olderAt struct {
	x   *object
	loc uint32
	crc uint32
}

// keepLocked keeps an object for a page that a builder has, too.
func (t *Tier) keepLocked(x *object, e *entry, i uint32) {
	n := t.pages.Find(&e.key)
	here := t.pages.At(n)
	if here.State == index.Gone || t.pages.Owner(uint32(n)) != x.owner.number {
		return
	}
	y, at := t.at(here.Loc)
	if y.b == nil || y.b.done || y.b.entries[at].older != nil {
		return
	}
	y.b.entries[at].older = &olderAt{x, x.number<<placeBits | i, e.crc}
	x.kept++
}

// fallBackLocked gives page i of a builder, whose node is n, its older place, if it has one.
func (t *Tier) fallBackLocked(b *builder, i uint32, n index.Node) bool {
	older := b.entries[i].older
	if older == nil {
		return false
	}
	t.pages.At(n).Loc = older.loc
	t.pages.Finish(n, older.crc)
	t.countLocked(older.loc, 1)
	t.countLocked(b.x.number<<placeBits|i, -1)
	return true
}

// endKeepingLocked ends what keepLocked began for the pages of a builder.
func (t *Tier) endKeepingLocked(b *builder) {
	for i := range b.entries {
		if older := b.entries[i].older; older != nil {
			b.entries[i].older = nil
			older.x.kept--
		}
	}
	t.touchLocked()
}
